"""Sixteen calls with new data on each rank: every shard, metric and norm has the bits of the eager run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.sharding.law import CALLS, HYBRID, Run, law, on_gloo_and_nccl
from tests.sharding.programs import PROGRAMS, Setting, warm_up
from tests.sharding.ranks import on_ranks

BF16 = {"mlp in bf16"}


def laws(runs: Sequence[Run], device: str) -> list[Any]:
    """The counts of each run; its law raises where it is broken."""
    warm_up()
    return [law(run, device)["counts"] for run in runs]


def runs(axes: dict[str, int]) -> list[Run]:

    return [
        Run(name, Setting(axes, stage, {"param_dtype": torch.bfloat16} if name in BF16 else {}))
        for name in PROGRAMS
        for stage in (1, 2, 3)
    ]


@on_gloo_and_nccl
@pytest.mark.parametrize("axes", [{"data": 2}], ids=["2"])
def test_all_programs_at_all_stages(axes: dict[str, int], device: str) -> None:
    for counts in on_ranks(2, laws, runs(axes), device):
        assert counts == [(1, 1, CALLS)] * len(runs(axes))


@pytest.mark.parametrize("axes", [{"data": 4}, HYBRID], ids=["4", "2x2"])
def test_four_ranks(axes: dict[str, int]) -> None:
    chosen = [run for run in runs(axes) if run.program in ("mlp", "gpt")]
    for counts in on_ranks(4, laws, chosen, "cpu"):
        assert counts == [(1, 1, CALLS)] * len(chosen)
