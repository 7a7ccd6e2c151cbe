"""The table of hazards as a page of Markdown."""

from __future__ import annotations

from pathlib import Path

from tests.hazards.catalogue import HAZARDS, OUTCOMES, Hazard
from tests.hazards.functions import path_of, runs_on

__all__ = ["PAGE", "page"]

PAGE = Path(__file__).resolve().with_name("README.md")

_INTRODUCTION = """\
# Hazards of captured training

What goes wrong when a training step is captured once and replayed, as seen in public projects; what you see here; the
tests that prove it; and the wrong implementations in `tests/mutants` that have the mistake, each of which the tests
notice. Written by `python -m tests.hazards`; a test compares this page with the table.

- *impossible*: the result is right, whatever you do.
- *refused*: an error of its own class before anything is launched; the state is as it was.
- *documented*: it behaves as the test shows, the same at every call.

Priority 1 must hold, 2 should, 3 is a diagnostic or no goal. *CPU* is the CPU backend and, where the test draws steps,
the simulator; *GPU* is one GPU: `python -m pytest tests -m cuda`. Sharding runs in processes with gloo on the CPU, and
with NCCL on *several GPUs*: `python -m pytest tests -m multi_gpu`.
"""


def page() -> str:
    """The whole page."""
    counts = [[sum(h.priority == p and h.outcome == o for h in HAZARDS) for o in OUTCOMES] for p in (1, 2, 3)]
    summary = [_line("priority", *OUTCOMES), _rule(1 + len(OUTCOMES))]
    summary += [_line(str(p), *map(str, row)) for p, row in enumerate(counts, 1)]
    table = [_line("id", "hazard", "priority", "what you see", "tests", "mutants", "runs on"), _rule(7)]
    table += [_row(hazard) for hazard in HAZARDS]
    return "\n".join([_INTRODUCTION, *summary, "", *table, ""])


def _row(hazard: Hazard) -> str:
    tests = "<br>".join(_link(test) for test in hazard.tests)
    where = ", ".join(sorted(runs_on(hazard)))
    sees = hazard.sees.replace("|", "\\|")
    return _line(
        hazard.id,
        hazard.title,
        str(hazard.priority),
        sees,
        tests,
        " ".join(hazard.mutants) or "-",
        where,
    )


def _link(test: str) -> str:
    """The test's name, leading to its file."""
    file, _, function = path_of(test).partition("::")
    inside = file.removeprefix("tests/")
    return f"[{function}]({inside.removeprefix('hazards/') if inside.startswith('hazards/') else '../' + inside})"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _rule(columns: int) -> str:
    return "|" + "---|" * columns
