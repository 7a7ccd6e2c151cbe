"""Sharded steps in branches: the bits of one line, by one order of collectives on all ranks, and none runs alone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import functional_cg as fcg
from functional_cg.shards.collectives import is_collective
from functional_cg.stages.branches.order import beside_collectives
from functional_cg.testing import Simulator
from tests.branched import schedules
from tests.sharding.law import (
    CALLS,
    HYBRID,
    Run,
    assert_same_step,
    backends,
    batches,
    law,
    on_gloo_and_nccl,
    rank_of,
)
from tests.sharding.programs import PROGRAMS, Setting, mlp_batch, mlp_state, randn
from tests.sharding.ranks import on_ranks, outcomes
from tests.shares import THOROUGH, diagonal, share

TWO = {"data": 2}
SMALL = {"bucket_bytes": 100}
STAGES = {"w1": 3, "b1": 1, "w2": 2, "b2": 3, "one": 1, "scale": 2, "none": 3, "even": 3}

SETTINGS = [
    Run("gpt", Setting(TWO, 3, {"bucket_bytes": 1000, "prefetch": 2})),
    Run("mlp", Setting(TWO, 3, {"bucket_bytes": 1, "prefetch": 0, "reshard": False})),
    Run("mlp", Setting(TWO, STAGES, SMALL)),
]


def on_lanes(device: str, **options: Any) -> dict[str, Any]:
    """The options of a step on lanes: simulated ones on a host."""
    return {"branches": 3, **options} | ({"backend": Simulator()} if device == "cpu" else {})


def laws(runs: Sequence[Run], device: str, options: Any = None) -> list[Any]:
    """The counts of each run; each rank has durations of its own, and so lanes of its own."""
    counts = []
    for number, run in enumerate(runs):
        with schedules(2 * number + rank_of()):
            of_run = Run(run.program, run.setting, on_lanes(device, **(options or {})))
            counts.append(law(of_run, device)["counts"])
    return counts


def assert_same_bits(ranks: int, runs: Sequence[Run], device: str, options: Any = None) -> None:
    found = on_ranks(ranks, laws, runs, device, options, device=device, timeout=200.0)
    assert found == [[(1, 1, CALLS)] * len(runs)] * ranks


@on_gloo_and_nccl
def test_all_programs_at_all_stages_on_lanes(device: str) -> None:
    """Other lanes on each rank: they meet in each collective all the same."""
    bf16 = {"param_dtype": torch.bfloat16}
    runs = [
        Run(name, Setting(TWO, stage, {**SMALL, **(bf16 if name == "mlp in bf16" else {})}))
        for name, stage in diagonal([*PROGRAMS], [3, 1, 2], device)
    ]
    assert_same_bits(2, [*share(runs, 4, device), *share(SETTINGS, 6, device)], device)


@backends(4)
def test_two_axes_on_lanes(device: str) -> None:
    stages = (1, 2, 3) if THOROUGH or device == "cuda" else (3,)
    assert_same_bits(4, [Run("mlp", Setting(HYBRID, stage, SMALL)) for stage in stages], device)


@on_gloo_and_nccl
def test_a_compiled_step_on_lanes(device: str) -> None:
    if device == "cpu" and not THOROUGH:
        pytest.skip("here in the profile `thorough`: it is compiled on each rank")
    runs = [Run("mlp", Setting(TWO, stage, SMALL)) for stage in (3, 1)]
    assert_same_bits(2, runs[: 1 if device == "cpu" else 2], device, {"lowering": "inductor"})


# -- what it says, and that nothing races where ranks differ ------------------------------------------------------


def layers(state: Any, batch: Any) -> Any:
    """Four layers with a mean over ranks in each, forward and backward: what weights' gradients have to run beside."""

    def loss_fn(params: Any) -> Tensor:
        h = batch["x"]
        for name in ("w1", "w2", "w3", "w4"):
            h = torch.tanh(h @ params[name])
            h = h - fcg.sharding.mean(h.mean(0, keepdim=True))
        return (h - batch["y"]).square().mean()

    loss, grads = fcg.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads), {"loss": fcg.sharding.mean(loss)}


def layers_state(zero: Any, device: str) -> Any:
    params = {f"w{n}": randn(n, 8, 8).to(device) / 2 for n in range(1, 5)}
    return fcg.TrainState.create(params=params, optimizer=fcg.optim.sgd(0.1), key=None, sharding=zero)


def layers_batch(call: int, rank: int) -> Any:
    return {"x": randn(100 * call + rank, 4, 8), "y": randn(100 * call + rank + 50, 4, 8)}


def explained(stage: int, device: str) -> tuple[str, list[str]]:
    """What a step says, and its collectives in order; its calls have the bits of the eager run."""
    zero, rank = Setting(TWO, stage, SMALL).zero(device), rank_of()
    step = fcg.graph_step(layers, lowering="aten", **on_lanes(device))
    captured = layers_state(zero, device)
    eager, lowered = (
        fcg.fork(captured),
        step.lower(captured, fcg.tree.map(lambda one: one.to(device), layers_batch(0, rank))),
    )
    for call in range(4):
        batch = fcg.tree.map(lambda one: one.to(device), layers_batch(call, rank))
        captured, eager, _, _ = assert_same_step(step, captured, eager, batch, call)
    order = [
        f"{i.name} {[str(v.spec).partition('@')[0] for v in i.inputs()]}"
        for i in lowered.program.instrs
        if is_collective(i.op)
    ]
    return step.explain(), order


@on_gloo_and_nccl
@pytest.mark.parametrize("stage", share([3, 2, 1], 3))
def test_collectives_run_beside_calls_and_explain_shows_it(stage: int, device: str) -> None:
    said = on_ranks(2, explained, stage, device, device=device)
    assert said[0][1] == said[1][1]
    text = said[0][0]
    assert "lanes with" in text
    assert f"one of them for {len(said[0][1])} collectives" in text
    assert f"{len(said[0][1])} collectives, estimated" in text
    rows = [line for line in text.splitlines() if " us: all_reduce, beside" in line]
    assert any("mm" in line for line in rows), text


def differs(device: str) -> None:
    """Rank 1 lowers to another order of collectives than rank 0."""

    def swapped(program: Any, *given: Any) -> None:
        beside_collectives(program, *given)
        places = [n for n, instr in enumerate(program.instrs) if is_collective(instr.op)]
        specs = {str(program.instrs[n].inputs()[0].spec): n for n in places}
        one, other = [*specs.values()][:2]
        program.instrs[one], program.instrs[other] = program.instrs[other], program.instrs[one]

    zero = Setting(TWO, 3, SMALL).zero(device)
    rank, state = rank_of(), mlp_state()(zero, device)
    patch = (
        mock.patch("functional_cg.stages.lower.compiled.beside_collectives", swapped)
        if rank
        else nullcontext()
    )
    with patch:
        step = fcg.graph_step(PROGRAMS["mlp"].step, lowering="aten", **on_lanes(device))
        with pytest.raises(
            fcg.RankError, match=r"ranks are about to do different things(.|\n)*collective \d+  "
        ) as said:
            step(state, batches("mlp", device, rank)(0))
    assert "the state is unchanged" in str(said.value) or "rank 1 differs" in str(said.value)


@on_gloo_and_nccl
def test_an_order_that_differs_by_rank_is_refused_before_the_capture(device: str) -> None:
    assert [one.error for one in outcomes(2, differs, device, device=device, timeout=60.0)] == ["", ""]


def order_on_lanes(number: int) -> list[str]:
    """The collectives of a step as its lanes come to them."""
    zero, rank = Setting(TWO, 3, SMALL).zero("cpu"), rank_of()
    with schedules(number):
        step = fcg.graph_step(PROGRAMS["mlp"].step, lowering="aten", **on_lanes("cpu"))
        plan = step.lower(mlp_state()(zero, "cpu"), mlp_batch(0, rank)).plan
    units = [plan.timeline.units[place.unit] for place in plan.timeline.places]
    return [unit.lines[0] for unit in units if unit.link]


ORDERS = 8 if THOROUGH else 3


def orders() -> list[list[str]]:
    return [order_on_lanes(number) for number in range(ORDERS)]


def test_the_order_of_collectives_is_a_matter_of_memory() -> None:
    """Whatever durations a rank estimates for what runs on its lanes, collectives keep the order of the program."""
    first, *others = on_ranks(2, orders)[0]
    assert len(first) > 6
    assert others == [first] * (ORDERS - 1)


def both(device: str) -> tuple[bool, bool]:
    """Whether a step is on lanes and the same in one line, after calls of both on one state each."""
    zero, rank = Setting(TWO, 3, SMALL).zero(device), rank_of()
    wide = fcg.graph_step(PROGRAMS["mlp"].step, lowering="aten", **on_lanes(device))
    line = fcg.graph_step(PROGRAMS["mlp"].step, lowering="aten", branches=1)
    states = [mlp_state()(zero, device) for _ in range(2)]
    for call in range(4):
        kept = []
        for n, step in enumerate((wide, line)):
            batch = fcg.tree.map(lambda one: one.to(device), mlp_batch(call, rank))
            states[n], metrics = step(states[n], batch)
            kept.append(fcg.snapshot(metrics))
        fcg.testing.assert_trees_all_equal(*kept, f"call {call}")
    return "lanes with" in wide.explain(), "lanes with" in line.explain()


@on_gloo_and_nccl
def test_lanes_have_the_bits_of_one_line(device: str) -> None:
    assert on_ranks(2, both, device, device=device) == [(True, False)] * 2
