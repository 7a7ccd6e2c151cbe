"""The page of rows."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.judges.rows import OUTCOMES, Row

__all__ = ["PAGE", "page"]

PAGE = Path(__file__).resolve().with_name("README.md")

_INTRODUCTION = """\
# Outside judges

Suites that others wrote, asked of steps. `PYTHONPATH=. python -m tests.judges` runs them all and writes this page;
`--of`, `--device`, `--lowering`, `--jobs`, `--limit-s` choose; a run appends to the file of rows and can be resumed.
A sample of each runs with the tests (`tests/test_judges.py`).

- *equal*: the same dtype, shape, strides and bits as the judge's.
- *rounded*: the same dtype, shape and strides; values as near as 4 times the error of the eager run against float64,
  and 16 roundings of the largest element. Judges with bounds of their own say so in their file.
- *refused*: an error of this package, before anything runs.
- *documented*: another result, for a reason in `tests/judges/documented.py`.
- *DIFFERS*: a defect.
- *not run*: with the reason.

A case is one op, class or scenario, and ends as its worst comparison; comparisons are counted in brackets.
"""


def page(rows: Iterable[Row], totals: Mapping[tuple[str, str], int]) -> str:
    """The whole page; ``totals`` has the number of cases by judge and version of torch, where it is known."""
    groups: dict[tuple[str, str, str, str], list[Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: (row.key, row.torch)):
        groups[row.judge, row.device, row.torch, row.lowering].append(row)
    lines = [
        _INTRODUCTION,
        _line("judge", "device", "torch", "lowering", "cases", *OUTCOMES),
        _rule(5 + len(OUTCOMES)),
    ]
    for key, of_group in sorted(groups.items()):
        cases = Counter(row.outcome for row in of_group)
        compared: Counter[str] = Counter()
        for row in of_group:
            compared.update(row.counts)
        cells = [f"{cases[outcome]} ({compared[outcome]})" for outcome in OUTCOMES]
        total = totals.get((key[0], key[2]), len(of_group))
        number = str(total) if total == len(of_group) else f"{len(of_group)} of {total}"
        lines.append(_line(*key, number, *cells))
    for outcome in reversed(OUTCOMES[2:]):
        lines += _names(outcome, groups)
    lines += _rounded(groups)
    return "\n".join([*lines, ""])


def _names(outcome: str, groups: dict[tuple[str, str, str, str], list[Row]]) -> list[str]:
    """The cases with an outcome, by judge and reason."""
    found: dict[tuple[str, str], dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for (judge, device, _, lowering), rows in groups.items():
        for row in rows:
            for kind, where, why in row.notes:
                if kind == outcome:
                    name = f"{row.case} {where}".strip() if outcome == "DIFFERS" else row.case
                    found[judge, why][name].add(f"{device} {lowering}")
    lines = ["", f"## {outcome[0].upper()}{outcome[1:]}", ""]
    if not found:
        return [*lines, "None."]
    every = {f"{device} {lowering}" for _, device, _, lowering in groups}
    lines += [_line("judge", "reason", "cases"), _rule(3)]
    for (judge, why), names in sorted(found.items()):
        cells = []
        for name, places in sorted(names.items()):
            only = "" if len(places) == len(every) else f" ({', '.join(sorted(places))})"
            cells.append(f"`{name}`{only}")
        lines.append(_line(judge, why.replace("|", "\\|"), ", ".join(cells)))
    return lines


def _rounded(groups: dict[tuple[str, str, str, str], list[Row]]) -> list[str]:
    """The cases that `"aten"` does not repeat bit by bit."""
    lines = ["", '## Rounded with `lowering="aten"`', ""]
    for (judge, device, version, lowering), rows in sorted(groups.items()):
        names = [f"`{row.case}`" for row in rows if row.counts.get("rounded")]
        if lowering == "aten" and names:
            lines.append(f"- {judge}, {device}, torch {version}: {', '.join(names)}")
    return lines if len(lines) > 3 else [*lines, "None."]


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _rule(columns: int) -> str:
    return "|" + "---|" * columns
