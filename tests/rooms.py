"""Draws the chart of ``functional_cg/README.md`` from the imports: ``python -m tests.rooms``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.test_layers import FOLDERS, LAYERS, ROOMS, ROOT, SOURCES, imports, room

__all__ = ["drawing", "page"]

PAGE = ROOT / "README.md"
START, END = "<!-- layers -->\n", "<!-- end of layers -->\n"


def _edges() -> dict[int, set[int]]:
    """From which other layers each one imports."""
    known = frozenset(SOURCES)
    found: dict[int, set[int]] = {number: set() for number in range(len(LAYERS))}
    for module, source in SOURCES.items():
        here = ROOMS[room(module)]
        targets = imports(source, module, known, is_folder=module in FOLDERS)
        found[here] |= {ROOMS[room(one.target)] for one in targets} - {here}
    return found


def _without_detours(edges: Mapping[int, set[int]]) -> Iterator[tuple[int, int]]:
    """Without what follows from others."""
    reached: dict[int, set[int]] = {}
    for here in sorted(edges):
        reached[here] = set().union(*({other} | reached[other] for other in edges[here]))
        for other in sorted(edges[here]):
            if not any(other in reached[between] for between in edges[here]):
                yield here, other


def drawing() -> str:
    """The layers with their rooms and what they import, in the language of Mermaid."""
    lines = ["```mermaid", "flowchart TD"]
    for number, (name, rooms) in reversed([*enumerate(LAYERS.items())]):
        listed = ", ".join(one.replace(".", "/") for one in rooms if one not in ("__init__", "stages"))
        lines.append(f'    layer{number}["<b>{name}</b><br>{listed}"]')
    lines += [f"    layer{here} --> layer{other}" for here, other in _without_detours(_edges())]
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
