"""Stochastic rounding on shards draws as on the whole leaf, so any number of ranks rounds alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import functional_cg as fcg
from functional_cg import optim
from functional_cg.testing import assert_trees_all_equal
from tests.sharding.law import CALLS, assert_same_step
from tests.sharding.programs import Setting, mlp_params, randn
from tests.sharding.ranks import on_ranks
from tests.shares import share


def state_on(zero: Any) -> Any:
    params = fcg.tree.map(lambda leaf: leaf.bfloat16(), mlp_params())
    optimizer = optim.stochastic_rounding(optim.adamw(1e-3, weight_decay=0.1), key=1)
    return fcg.TrainState.create(params=params, optimizer=optimizer, sharding=zero)


def step_of(state: Any, batch: Any) -> Any:
    """All ranks have the same rows: a mean over two or four of one gradient is that gradient."""

    def loss_fn(params: Any) -> Any:
        h = torch.tanh(batch.bfloat16() @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]
        out = params["scale"] * h * params["one"] + params["none"].sum() + params["even"].square().mean()
        return (out.float() - 1).square().mean()

    loss, grads = fcg.value_and_grad(loss_fn)(state.params)
    key = fcg.random.fold_in(fcg.random.key(3, batch.device), state.step)
    rounded = fcg.precision.stochastic_round(key, state.params["even"].float() * 1.01)
    return state.apply_gradients(grads), {"loss": loss, "sum": rounded.float().sum()}


def batch_of(call: int) -> Any:
    return randn(call, 4, 5)


def trained(settings: list[Setting]) -> Any:
    """The whole parameters after captured steps, which had the bits of eager ones."""
    ends = []
    for setting in settings:
        captured = state_on(setting.zero("cpu"))
        eager, step = fcg.fork(captured), fcg.graph_step(step_of, lowering="aten")
        for call in range(CALLS):
            captured, eager, _, _ = assert_same_step(step, captured, eager, batch_of(call), call)
        assert step.stats.replays == CALLS
        ends.append(fcg.sharding.state_dict(captured))
    return ends


@pytest.mark.parametrize(
    ("ranks", "settings"),
    share(
        [
            (2, [Setting({"data": 2}, 1), Setting({"data": 2}, 3)]),
            (4, [Setting({"replica": 2, "shard": 2}, 3)]),
        ],
        2,
    ),
)
def test_any_number_of_ranks_rounds_as_one(ranks: int, settings: list[Setting]) -> None:
    ends, *_ = on_ranks(ranks, trained, settings)
    alone, step = state_on(None), fcg.graph_step(step_of, lowering="aten")
    start = fcg.state_dict(alone)
    for call in range(CALLS):
        alone, _ = step(alone, batch_of(call))
    expected = fcg.state_dict(alone)
    assert not torch.equal(expected["params.w1"], start["params.w1"])
    for setting, end in zip(settings, ends, strict=True):
        assert_trees_all_equal(dict(end), dict(expected), str(setting))
