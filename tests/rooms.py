"""Draws the import chart of ``functional_cg/README.md`` from the imports: ``python -m tests.rooms``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from tests.test_layers import FOLDERS, ORDER, ROOT, SOURCES, imports, room

__all__ = ["drawing", "page"]

PAGE = ROOT / "README.md"
START, END = "<!-- rooms -->\n", "<!-- end of rooms -->\n"
_LEFT_OUT = {"__init__", "testing", "report", "examples", "stages"}  # they use the public names


def _edges() -> dict[str, set[str]]:
    """Which room imports from which."""
    known = frozenset(SOURCES)
    found: dict[str, set[str]] = {name: set() for name in ORDER if name not in _LEFT_OUT}
    for module, source in SOURCES.items():
        if room(module) in found:
            targets = {room(i.target) for i in imports(source, module, known, is_folder=module in FOLDERS)}
            found[room(module)] |= (targets & found.keys()) - {room(module)}
    return found


def _without_detours(edges: Mapping[str, set[str]]) -> dict[str, list[str]]:
    """Without what follows from others."""
    reached: dict[str, set[str]] = {}
    for name in sorted(edges, key=ORDER.index):
        reached[name] = set().union(*({other} | reached[other] for other in edges[name]))
    return {
        name: sorted(
            other for other in others if not any(other in reached[between] for between in others - {other})
        )
        for name, others in edges.items()
    }


def drawing() -> str:
    """The rooms and what they import, in the language of Mermaid."""
    edges = _without_detours(_edges())
    lines = ["```mermaid", "flowchart TD"]
    for name in reversed(list(edges)):
        lines.append(f'    {name.replace(".", "_")}["{name.replace(".", "/")}"]')
    for name in reversed(list(edges)):
        for other in edges[name]:
            lines.append(f"    {name.replace('.', '_')} --> {other.replace('.', '_')}")
    return "\n".join([*lines, "```", ""])


def page() -> str:
    """The page with the drawing as it is now."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    return before + START + drawing() + END + rest.partition(END)[2]


if __name__ == "__main__":
    new = page()
    sys.stdout.write("drawn anew\n" if new != PAGE.read_text(encoding="utf-8") else "as it was\n")
    Path(PAGE).write_text(new, encoding="utf-8")
