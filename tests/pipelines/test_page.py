"""The page on pipelines: its program runs on two ranks and on one, with the same bits, and its chart is drawn."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
import torch

from functional_cg import report
from functional_cg.pipelines.schedules import NAMES
from tests.sharding.ranks import on_ranks
from tests.shares import THOROUGH

mpl.use("Agg")

PAGE = (Path(__file__).resolve().parents[2] / "functional_cg" / "pipelines" / "README.md").read_text()


def run_program(text: str) -> Any:
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(compile(text, "README.md", "exec"), names)
    return float(names["metrics"]["loss"])


def test_the_program_learns_and_has_the_same_bits_on_one_rank() -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    if not THOROUGH:
        assert 0 < run_program(program.replace("range(300)", "range(20)")) < 0.1
        return
    first, second = on_ranks(2, run_program, program)
    assert first == second == run_program(program) < 0.01


def test_all_schedules_are_on_the_page() -> None:
    for name in NAMES:
        assert f"| `{name}` |" in PAGE


@pytest.mark.parametrize(("name", "bars"), [("1f1b", 20), ("zero_bubble", 48)])
def test_the_chart_has_a_bar_for_each_action(name: str, bars: int) -> None:
    ax = report.schedule(name, ranks=2, microbatches=4)
    assert len(ax.patches) == bars
    assert len(ax.get_yticks()) == 2
    mpl.pyplot.close("all")
