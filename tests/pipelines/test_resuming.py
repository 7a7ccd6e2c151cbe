"""A run goes on where others stopped: with another schedule, other stages, on other ranks, and with averages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import functional_cg as fcg
from functional_cg import sharding
from functional_cg.testing import assert_trees_all_equal
from tests.pipelines.programs import (
    ONE,
    TWO,
    Averaged,
    Run,
    average_of,
    loss_of,
    made,
    optimizer_of,
    params,
    rows,
)
from tests.sharding.law import rank_of
from tests.sharding.ranks import on_ranks
from tests.shares import share, thorough

FEATURES = ("dropout", "clip", "adamw", "averages")
EACH = 2  # calls of a leg


@dataclass(frozen=True)
class Leg:
    """A part of a run.

    Attributes:
      ranks: How many take part.
      run: The program; with schedule None it is micro-batches, without any pipeline.
      axes: Of the mesh.
    """

    ranks: int
    run: Run
    axes: Mapping[str, int]


def gone(legs: Sequence[Leg], number: int, folder: str) -> list[Any]:
    """Go some legs, each from where the one before it, on whatever ranks, has saved the state.

    Args:
      legs: The legs.
      number: Of the first.
      folder: Where the checkpoints are.
    Returns:
      The metrics of each call, and the evaluations of the averages.
    """
    kept = []
    for place, leg in enumerate(legs, number):
        state, step, evaluate = begun(leg)
        if place:
            state = fcg.checkpoints(folder).load(state) if place % 2 else fcg.load(f"{folder}/{place}", state)
        for call in range(place * EACH, (place + 1) * EACH):
            state, metrics = step(state, rows(call, 0))
            kept.append({**metrics, **evaluate(state, rows(call, 0))})
        fcg.checkpoints(folder).save(state, step=place + 1, wait=True)
        whole = sharding.state_dict(state)
        if rank_of() == 0:
            fcg.save(f"{folder}/{place + 1}", whole)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
    return kept


def begun(leg: Leg) -> tuple[Any, Any, Any]:
    """A fresh state, the step, and an evaluation of both averages."""
    if leg.run.schedule is not None:
        pipe, state, function = made(leg.run, leg.axes)
        loss_fn = loss_of(pipe.cut, leg.run)
        grads_of = pipe.value_and_grad(loss_fn)
    else:
        loss_fn = loss_of(lambda tree: tree, leg.run)
        grads_of = fcg.microbatches(leg.run.microbatches)(fcg.value_and_grad(loss_fn))
        state, function = without_a_pipeline(leg.run, grads_of)

    @fcg.graph_fn(lowering="aten")
    def evaluate(state: Any, batch: Any) -> Any:
        key = fcg.random.key(0)
        return {
            "average": grads_of(average_of(state), batch, key=key)[0],
            "gathered": loss_fn(sharding.gather(average_of(state)), batch, key=key),
            "whole": loss_fn(state.ema, batch, key=key),
        }

    return state, fcg.graph_step(function, lowering="aten"), evaluate


def without_a_pipeline(run: Run, grads_of: Any) -> tuple[Any, Any]:
    def train_step(state: Any, batch: Any) -> Any:
        key = fcg.random.fold_in(state.key, state.step)
        loss, grads = grads_of(state.params, batch, key=key)
        new = state.apply_gradients(grads)
        metrics = {"loss": loss, "own loss": loss, "norm": fcg.optim.global_norm(grads)}
        ema = fcg.tree.map(lambda mean, p: mean.lerp(p, 0.25), state.ema, new.params)
        return new.replace(ema=ema), metrics

    given = {"optimizer": optimizer_of(run), "key": fcg.random.key(3), "ema": params()}
    return Averaged.create(params=params(), **given), train_step


ON_ONE = Leg(1, Run("1f1b", FEATURES, cuts=(2,)), ONE)
ON_TWO = replace(ON_ONE, ranks=2, axes=TWO)
IN_FOUR = [
    replace(ON_TWO, run=replace(ON_TWO.run, schedule=name, cuts=(1, 2, 3))) for name in ("zbv", "interleaved")
]
PLAIN = replace(ON_ONE, run=replace(ON_ONE.run, schedule=None))
ON_FOUR = Leg(4, replace(ON_ONE.run, cuts=(1, 2, 3)), {"stage": 4})
SHARDED = replace(ON_TWO, ranks=4, run=replace(ON_TWO.run, stage=3))


def assert_goes_on(legs: Sequence[Leg], folder: Path) -> None:
    """All legs give the metrics, and the last one the state, of one rank that never stopped."""
    found, number = [], 0
    for ranks, some in grouped(legs):
        of_ranks = (
            [gone(some, number, str(folder))]
            if ranks == 1
            else on_ranks(ranks, gone, some, number, str(folder))
        )
        for other in of_ranks[1:]:
            assert_trees_all_equal(other, of_ranks[0])
        found += of_ranks[0]
        number += len(some)
    alone = replace(ON_ONE, run=replace(ON_ONE.run, features=legs[0].run.features))
    state, step, evaluate = begun(alone)
    for call, metrics in enumerate(found):
        state, expected = step(state, rows(call, 0))
        expected |= evaluate(state, rows(call, 0))
        if "clip" not in alone.run.features:  # shards add their squares up in another order
            metrics.pop("norm"), expected.pop("norm")
        assert_trees_all_equal(metrics, expected, f"call {call}")
    assert_trees_all_equal(fcg.load(f"{folder}/{number}", begun(alone)[0]), state)
    assert not state.ema["w0"].equal(state.params["w0"])
    assert_trees_all_equal(state.ema, average_of(state))


def grouped(legs: Sequence[Leg]) -> list[tuple[int, list[Leg]]]:
    """Legs that follow each other on as many ranks."""
    out = list[tuple[int, list[Leg]]]()
    for leg in legs:
        if not out or out[-1][0] != leg.ranks:
            out.append((leg.ranks, []))
        out[-1][1].append(leg)
    return out


def test_other_schedules_and_ranks_go_on_where_a_pipeline_stopped(tmp_path: Path) -> None:
    """Two ranks with a stage each (thorough: also with two each), and one rank that knows no pipelines."""
    assert_goes_on([ON_TWO, *share(IN_FOUR, 2)[1:], PLAIN], tmp_path)


@thorough
def test_a_run_moves_between_one_two_and_four_ranks(tmp_path: Path) -> None:
    assert_goes_on([PLAIN, ON_FOUR, *IN_FOUR, ON_ONE, ON_TWO, ON_FOUR, PLAIN, IN_FOUR[1]], tmp_path)


@thorough
def test_a_tied_leaf_moves_to_shards_of_two_by_two_ranks_and_back(tmp_path: Path) -> None:
    """Without what depends on the number of ranks that read data: dropout, and the order in a norm of shards."""
    legs = [ON_TWO, SHARDED, IN_FOUR[0], replace(SHARDED, run=replace(SHARDED.run, stage=1)), ON_ONE]
    features = ("tied", "adamw", "averages")
    assert_goes_on([replace(leg, run=replace(leg.run, features=features)) for leg in legs], tmp_path)
