"""The page of rows."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tests.judges.rows import OUTCOMES, Row

__all__ = ["PAGE", "page"]

PAGE = Path(__file__).resolve().with_name("README.md")

_MOST = 6  # cases that are named for a reason
# What reasons that are one may differ in: numbers, shapes, names, and what follows the cause of an error.
_VARIES = re.compile(r"\[[\d, ]*\]|\([\d, ]*\)|\d+(\.\d+)?(e[+-]\d+)?|`[^`]*`|, when calling .*")
_LINE = re.compile(r", at \w+\.py:\d+")
_LEFT_OUT = "left out: "

_INTRODUCTION = """\
# Outside judges

Suites that others wrote, asked of steps. `python -m tests.judges` runs them all, in hours, and `--page FILE...` writes
this page of its files of rows; `--help` tells how to choose, and to go on after a run that was cut off. A sample of
each judge runs with the tests (`tests/test_judges.py`).

- *equal*: the same dtype, shape, strides and bits as the judge's.
- *rounded*: the same dtype, shape and strides; values as near as 16 roundings of the largest element, and 4 times the
  error of the eager run against float64, or its change by inputs that are rounded once more. Judges with bounds of
  their own say so in their file.
- *refused*: an error of this package, before the state changes.
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
    """The cases with an outcome, by judge and reason; of reasons that differ in numbers or names, the first one."""
    reasons: dict[tuple[str, str], str] = {}
    found: dict[tuple[str, str], dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for (judge, device, _, lowering), rows in groups.items():
        for row in rows:
            for kind, where, why in row.notes:
                if kind == outcome:
                    name, why = _told(row.case, where, why)
                    name = f"{name} {where}".strip() if outcome == "DIFFERS" else name
                    key = judge, _VARIES.sub("0", why)
                    found[judge, reasons.setdefault(key, why)][name].add(f"{device} {lowering}")
    lines = ["", f"## {outcome[0].upper()}{outcome[1:]}", ""]
    if not found:
        return [*lines, "None."]
    lines += [_line("judge", "reason", "cases", "where"), _rule(4)]
    for (judge, why), names in sorted(found.items()):
        places = {f"{device} {lowering}" for one, device, _, lowering in groups if one == judge}
        here = set[str]().union(*names.values())
        where = "everywhere" if here == places else ", ".join(sorted(here))
        lines.append(_line(judge, why.replace("|", "\\|"), _some(sorted(names)), where))
    return lines


def _told(case: str, where: str, why: str) -> tuple[str, str]:
    """What is named, and for which reason: a test that is left out by its own name, a gradient as the op itself."""
    if case.startswith(_LEFT_OUT):
        return where, case.removeprefix(_LEFT_OUT)
    return case, _LINE.sub("", why.removeprefix("gradient: "))


def _some(names: Sequence[str]) -> str:
    more = len(names) - _MOST
    return ", ".join(f"`{name}`" for name in names[:_MOST]) + (f" and {more} more" if more > 0 else "")


def _rounded(groups: dict[tuple[str, str, str, str], list[Row]]) -> list[str]:
    """The cases that `"aten"` does not repeat bit by bit."""
    lines = ["", '## Rounded with `lowering="aten"`', ""]
    for (judge, device, version, lowering), rows in sorted(groups.items()):
        names = [row.case for row in rows if row.counts.get("rounded")]
        if lowering == "aten" and names:
            lines.append(f"- {judge}, {device}, torch {version}: {_some(names)}")
    return lines if len(lines) > 3 else [*lines, "None."]


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _rule(columns: int) -> str:
    return "|" + "---|" * columns
