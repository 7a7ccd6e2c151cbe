"""The page of what works: models by library, and the reasons of those that are refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from .judge import Outcome

__all__ = ["page"]


def page(found: Mapping[str, Sequence[tuple[str, Outcome]]]) -> str:
    """Return the page as Markdown.

    Args:
      found: By library with its version, the models and what became of them.
    """
    judged = {
        library: [row for row in rows if row[1].verdict != "unusable"] for library, rows in found.items()
    }
    counts = Counter(outcome.verdict for rows in judged.values() for _, outcome in rows)
    total = counts.total()
    lines = [
        "# Models of other libraries",
        "",
        f"{counts['works']} of {total} models work ({100 * counts['works'] / max(total, 1):.1f} %)"
        + "".join(f", {count} {verdict}" for verdict, count in sorted(counts.items()) if verdict != "works")
        + f". torch {torch.__version__}.",
        "",
        "`python -m tests.bench.zoo --page FILE` writes this page. Each model is built from the configuration",
        "of its library, made small, and trained with new data at each call. Models that an ordinary loop does not",
        f"train that way are left out ({sum(map(len, found.values())) - total}).",
    ]
    for library, rows in judged.items():
        works = [name for name, outcome in rows if outcome.verdict == "works"]
        lines += [
            "",
            f"## {library}: {len(works)} of {len(rows)}",
            "",
            ", ".join(f"`{name}`" for name in works),
        ]
        others = [(name, outcome) for name, outcome in rows if outcome.verdict != "works"]
        if others:
            lines += ["", "| model | | reason | what its message suggests |", "|---|---|---|---|"]
            lines += [
                f"| `{name}` | {one.verdict} | {_cell(one.reason)} | {_cell(one.fix)} |"
                for name, one in others
            ]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
