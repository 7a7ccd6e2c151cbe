"""Calls with new data on each rank: shards, metrics and norms have the bits of the eager run (H101)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch._inductor import config

import functional_cg as fcg
from tests.compiled_graphs import lower_as_on_a_gpu
from tests.sharding.law import (
    CALLS,
    HYBRID,
    Run,
    backends,
    forks_in_turn,
    law,
    on_gloo_and_nccl,
    two_steps_on_one_state,
)
from tests.sharding.programs import PROGRAMS, Setting, warm_up
from tests.sharding.ranks import on_ranks
from tests.shares import THOROUGH, diagonal, share

TWO = {"data": 2}
SMALL = {"bucket_bytes": 100}  # some leaves share a launch, others have one of their own
BF16 = {"param_dtype": torch.bfloat16}

# A stage of its own for each leaf: those below a part that is a tree, such as `blocks`, share one.
STAGES = {"w1": 3, "b1": 1, "w2": 2, "b2": 3, "one": 1, "scale": 2, "none": 3, "even": 3}

# What `zero` can be told, and the meshes that have an axis of one rank.
SETTINGS = [
    Run("gpt", Setting(TWO, 2, {"bucket_bytes": 1000})),
    Run("gpt", Setting(TWO, 3, {"bucket_bytes": 1000, "prefetch": 2})),
    Run("lamb", Setting(TWO, 3, SMALL)),
    Run("micro-batches", Setting(TWO, 3, SMALL)),
    Run("mlp in bf16", Setting(TWO, 1, BF16 | {"reduce_dtype": torch.float32})),
    Run("sharpness-aware", Setting(TWO, 3, {"reshard": False, "prefetch": 3})),
    Run("mlp", Setting(TWO, 3, {"bucket_bytes": 1, "prefetch": 0, "reshard": False})),
    Run("mlp", Setting(TWO, STAGES, SMALL)),
    Run("accumulation", Setting(TWO, STAGES)),
    Run("mlp", Setting({"replica": 2, "shard": 1}, 3)),
    Run("mlp", Setting({"replica": 1, "shard": 2}, 3, {"prefetch": 4}), {"debug": "poison"}),
]


def laws(runs: Sequence[Run], device: str) -> list[Any]:
    """The counts of each run, and its metrics; its law raises where it is broken."""
    if device == "cuda":  # on the CPU the server of the ranks has done it
        warm_up()
    results = [law(run, device) for run in runs]
    return [(result["counts"], result["metrics"]) for result in results]


def runs(device: str) -> list[Run]:
    """Each program at each stage; on the CPU, where calls take long, some of them, each at one."""
    return [
        Run(name, Setting(TWO, stage, BF16 if name == "mlp in bf16" else {}))
        for name, stage in diagonal(share(PROGRAMS, 2, device), [1, 2, 3], device)
    ]


def assert_agree(ranks: int, runs: Sequence[Run], device: str, on_each: Any = laws) -> None:
    """Each rank keeps the law by one capture, and what is reduced by name is the same on all of them."""
    results = on_ranks(ranks, on_each, runs, device, device=device, timeout=200.0)
    for run, of_run in zip(runs, zip(*results, strict=True), strict=True):
        assert [counts for counts, _ in of_run] == [(1, 1, CALLS)] * ranks, run
        for of_call in zip(*(metrics for _, metrics in of_run), strict=True):
            for name, first in of_call[0].items():
                assert torch.isfinite(first).all(), (run, name)
                if name in ("own loss", "worst"):
                    assert len({float(metrics[name]) for metrics in of_call}) == ranks, "ranks see other data"
                else:
                    assert all(torch.equal(metrics[name], first) for metrics in of_call), (run, name)


@on_gloo_and_nccl
def test_all_programs_at_all_stages(device: str) -> None:
    assert_agree(2, runs(device), device)


@on_gloo_and_nccl
def test_all_settings(device: str) -> None:
    assert_agree(2, share(SETTINGS, 6, device), device)


COMPILED = [Run("mlp", Setting(TWO, 3, SMALL), {"lowering": "inductor"})]
# Compiled on each rank, which takes long; on GPUs it is what everybody runs.
COMPILED_ON_GPUS = [
    Run(name, Setting(TWO, stage), {"lowering": "inductor"})
    for name, stage in (("mlp", 1), ("accumulation", 2), ("gpt", 3))
]


@on_gloo_and_nccl
def test_programs_compiled(device: str) -> None:
    if device == "cpu" and not THOROUGH:
        pytest.skip("compiled as on a GPU below; here in the profile `thorough`")
    assert_agree(2, COMPILED if device == "cpu" else [*COMPILED, *COMPILED_ON_GPUS], device)


def laws_as_on_a_gpu(runs: Sequence[Run], device: str) -> list[Any]:
    """The same where the compiled function writes the slots."""
    with mock.patch("functional_cg.step.captures.lower", lower_as_on_a_gpu):
        return laws(runs, device)


def test_programs_compiled_as_on_a_gpu() -> None:
    assert_agree(2, COMPILED, "cpu", laws_as_on_a_gpu)


@backends(4)
@pytest.mark.parametrize("axes", share([HYBRID, {"data": 4}], 2), ids=str)
def test_four_ranks(axes: dict[str, int], device: str) -> None:
    settings = {"mlp": (1, 2, 3), "gpt": (3,)}
    if device == "cpu" and not THOROUGH:  # four ranks on two cores
        settings = {"mlp": (3,)} if axes == HYBRID else {"mlp": (2,)}
    runs = [Run(name, Setting(axes, stage)) for name, stages in settings.items() for stage in stages]
    assert_agree(4, runs, device)


@on_gloo_and_nccl
def test_two_forks_are_stepped_in_turn(device: str) -> None:
    """One step, two arenas: a capture each, and neither sees the other."""
    counts = on_ranks(2, forks_in_turn, Setting(TWO, 3, SMALL), device, device=device)
    assert counts == [(1, 2, 2 * CALLS)] * 2


@on_gloo_and_nccl
@pytest.mark.parametrize("stage", share([3, 2, 1], 3))
def test_two_steps_take_turns_on_one_state(stage: int, device: str) -> None:
    """One adds up gradients, the other updates with the sum: collectives of two graphs on one communicator."""
    counts: Any = on_ranks(2, two_steps_on_one_state, Setting(TWO, stage, SMALL), device, device=device)
    assert counts == [[(1, 1, CALLS - CALLS // 4), (1, 1, CALLS // 4)]] * 2


def _order_of_a_replay(lowering: Any) -> list[str]:
    """Which collectives a replay launches, and when it waits."""
    program = PROGRAMS["mlp"]
    zero = Setting({"data": 2}, 3, {"bucket_bytes": 64, "prefetch": 2}).zero("cpu")
    state, step = program.state(zero, "cpu"), fcg.graph_step(program.step, lowering=lowering)
    rank = zero.mesh.rank
    with config.patch({"cpp.simdlen": 1}):  # quicker to compile
        state, _ = step(state, program.batch(0, rank))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(state, program.batch(1, rank))
    names = [event.name for event in profile.events() if event.name.startswith("_c10d_functional::")]
    return [name.removeprefix("_c10d_functional::") for name in names]


@pytest.mark.parametrize("lowering", share(["aten", "inductor"], 2))
def test_one_collective_is_under_way_at_a_time_on_a_host(lowering: str) -> None:
    """Of gathers that run side by side gloo breaks its heap, once in some thousand pairs, or hangs."""
    for order in on_ranks(2, _order_of_a_replay, lowering):
        launches = [name for name in order if name != "wait_tensor"]
        assert any("coalesced" in name for name in launches), order
        assert len(launches) > 6, order
        merged = [name for last, name in pairwise(["", *order]) if (last, name) != ("wait_tensor",) * 2]
        assert [name == "wait_tensor" for name in merged] == [False, True] * len(launches), order
