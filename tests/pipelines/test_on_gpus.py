"""Pipelines on two and four GPUs: the bits of one, thousands of replays, a launch a step, its memory, its end.

What needs no GPU is rehearsed on gloo in the profile ``thorough``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import functional_cg as fcg
from functional_cg import sharding
from functional_cg.sharding.launch import end_groups
from functional_cg.testing import assert_trees_all_equal
from tests.bench.ranks.jobs import SIZES, Job
from tests.bench.ranks.pipelines import SYSTEMS
from tests.bench.ranks.rounds import held_gib
from tests.pipelines.programs import CUTS, ONE, TWO, Run, made, rows
from tests.pipelines.test_bitwise import assert_as_on_one_rank
from tests.sharding.ranks import on_ranks
from tests.shares import thorough

FEATURES = ("tied", "clip", "adamw", "dropout", "averages")
# Each rank of cuBLAS's own memory on these GPUs, in GiB: no program counts it.
WORKSPACE = 32 / 1024


def gpus(count: int) -> list[pytest.MarkDecorator]:
    # What libraries warn of depends on the machine.
    return [pytest.mark.multi_gpu(count), pytest.mark.filterwarnings("default")]


on_gpus = pytest.mark.parametrize("ranks", [pytest.param(count, marks=gpus(count)) for count in (2, 4)])
places = pytest.mark.parametrize(
    ("ranks", "device"),
    [
        pytest.param(2, "cpu", id="gloo", marks=thorough),
        *(pytest.param(count, "cuda", id=f"nccl-{count}", marks=gpus(count)) for count in (2, 4)),
    ],
)


def of_stages(schedule: str, ranks: int, **how: Any) -> Run:
    """A program with as many stages as a schedule has on these ranks."""
    cuts = tuple(range(1, ranks * (1 + len(CUTS[schedule]) // 2)))
    return Run(schedule, FEATURES, cuts=cuts, microbatches=2 * ranks, layers=2 * ranks, **how)


@pytest.mark.parametrize("schedule", CUTS)
@pytest.mark.multi_gpu(4)
@pytest.mark.filterwarnings("default")
def test_each_schedule_on_four_gpus(schedule: str) -> None:
    assert_as_on_one_rank([of_stages(schedule, 4)], 4, {"stage": 4}, "cuda")


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.multi_gpu(4)
@pytest.mark.filterwarnings("default")
def test_zero_beside_stages_on_four_gpus(stage: int) -> None:
    runs = [
        Run(schedule, (*FEATURES, "accumulate"), stage=stage) for schedule in ("1f1b", "zero_bubble", "zbv")
    ]
    assert_as_on_one_rank(runs, 4, TWO, "cuda")


def trained_long(run: Run, axes: Mapping[str, int], device: str, calls: int) -> Any:
    """The whole state after many calls, and how many graphs one more launches."""
    from tests.cuda.test_capture import profiled, starting_with

    pipe, state, function = made(run, axes, device)
    step = fcg.graph_step(function, lowering="aten")
    batches = [fcg.tree.map(lambda leaf: leaf.to(pipe.mesh.device), rows(call, 0)) for call in range(4)]
    for call in range(calls):
        state, _ = step(state, batches[call % 4])
    assert (step.stats.traces, step.stats.captures, step.stats.replays) == (1, 1, calls)
    (state, _), seen = (
        profiled(lambda: step(state, batches[0]))
        if device == "cuda"
        else (step(state, batches[0]), Counter[str]())
    )
    found = dict(sharding.state_dict(state))
    step.close()
    if dist.is_initialized():
        end_groups()
    return found, starting_with(seen, ("cudaGraphLaunch", "cuGraphLaunch"))


@places
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_thousands_of_replays_are_a_launch_each_and_end(schedule: str, ranks: int, device: str) -> None:
    """With the bits of one rank; without what fits learning rates alone, a state stays finite for so long.

    That groups end side by side is a test of groups; here none may wait for a capture, which would take for ever.
    """
    run, calls = (
        replace(of_stages(schedule, ranks), features=("tied", "clip")),
        2000 if device == "cuda" else 40,
    )
    expected, _ = trained_long(run, ONE, device, calls)
    assert all(leaf.isfinite().all() for leaf in expected.values())
    found = on_ranks(ranks, trained_long, run, {"stage": ranks}, device, calls, device=device, timeout=120.0)
    assert_trees_all_equal(found[0][0], expected)
    assert [launches for _, launches in found] == [1 if device == "cuda" else 0] * ranks


def held_and_counted(job: Job) -> tuple[float, float]:
    """GiB that a step's memory takes between calls, its graph's included, and that its program counts."""
    device = sharding.mesh({"data": -1}).device
    before = held_gib(device)
    step, counted = SYSTEMS["ours-aten"](job)
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    return held_gib(device) - before - WORKSPACE, counted()


@on_gpus
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_step_takes_the_memory_that_its_table_says(schedule: str, ranks: int) -> None:
    shape = replace(SIZES["llama-1b"], layers=2 * ranks, vocab=8000)
    job = Job(shape, ranks, 1, rows=1, microbatches=2 * ranks, schedule=schedule, per_rank=1)
    for held, counted in on_ranks(ranks, held_and_counted, job, device="cuda", timeout=200.0):
        assert held == pytest.approx(
            counted, rel=0.04
        )  # gaps that the allocator leaves, as its simulation says
