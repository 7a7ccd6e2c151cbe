"""The page on sharded training: its programs run, on two ranks and on one, and the names on it exist."""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import functional_cg as fcg
from notebooks.helpers.launching import on_ranks
from tests.exports import exports

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "functional_cg" / "sharding" / "README.md").read_text()


def run_blocks(blocks: list[str], directory: str) -> dict[str, Any]:
    """Run program texts one after the other: what they print, and how far they come."""
    os.chdir(directory)
    torch.manual_seed(0)  # the page does not seed its parameters
    names: dict[str, Any] = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for block in blocks:
            exec(compile(block, "README.md", "exec"), names)
    return {
        "loss": float(names["metrics"]["loss"]),
        "captures": names["train_step"].stats.captures,
        "printed": printed.getvalue(),
        "step": int(names["state"].step),
    }


def test_the_programs_learn_on_two_ranks_and_go_on_on_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, save, load = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    first, second = on_ranks(2, run_blocks, [train, save], str(tmp_path))
    assert first["printed"].startswith("tensor(")
    assert not second["printed"]
    assert first["loss"] == second["loss"] < 0.01
    assert first["captures"] == second["captures"] == 1

    shortened = train.replace("range(300)", "range(3)")
    monkeypatch.chdir(tmp_path)
    alone = run_blocks([shortened, load], ".")
    assert alone["step"] == 300
    assert alone["captures"] == 1


def test_the_names_exist() -> None:
    for name in set(re.findall(r"`(\w+Error)`", PAGE)) - {"ValueError", "RuntimeError"}:
        assert name in exports(fcg)
    for name in set(re.findall(r"sharding\.(\w+)\(", PAGE)):
        assert name in exports(fcg.sharding)
    for path in set(re.findall(r"`((?:functional_cg|notebooks)/[\w/]+\.\w+)`", PAGE)):
        assert (ROOT / path).exists()
