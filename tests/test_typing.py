"""mypy on ``typing_surface.py``: what a user's type checker knows about steps and states."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.shares import thorough

REPOSITORY = Path(__file__).resolve().parent.parent
SURFACE = REPOSITORY / "tests" / "typing_surface.py"

# Shows that mypy ran with the package's types: were everything Any, it would find nothing here.
PLANTED = """
from typing import assert_type

from torch import Tensor

import functional_cg as fcg


def double(x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return x * scale, x


step = fcg.graph_step(double)


def use(x: Tensor) -> None:
    assert_type(step(x, 2.0), Tensor)
    step(x, "2")
    step.no_such_method()
"""


@thorough  # the gate runs mypy, over this surface, too
@pytest.mark.slow
def test_mypy_sees_the_types_that_users_rely_on(tmp_path: Path) -> None:
    planted = tmp_path / "planted.py"
    planted.write_text(PLANTED, encoding="utf-8")
    command = ["-m", "mypy", "--config-file", "pyproject.toml", "--no-pretty", str(SURFACE), str(planted)]
    run = subprocess.run(
        [sys.executable, *command], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert run.stderr == ""
    # Errors inside the package are the business of mypy's own run over it.
    lines = [line for line in run.stdout.splitlines() if ": error:" in line]
    surface = [line for line in lines if "typing_surface.py" in line]
    found = [line.rpartition("[")[2].rstrip("]") for line in lines if "planted.py" in line]
    assert surface == []
    assert found == ["assert-type", "arg-type", "attr-defined"], run.stdout
