"""A cross-entropy over many classes on ranks: one kernel with its gradient, beside the collectives."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

import functional_cg as fcg
from functional_cg.stages.fx_passes import logits
from tests.sharding.law import CALLS, held, rank_of
from tests.sharding.programs import Setting, warm_up
from tests.sharding.ranks import on_ranks
from tests.test_cross_entropy import LARGE, batch, initial, mean_loss, step_of

RANKS = 2


@mock.patch.object(logits, "_LARGE", LARGE)
def trained(stage: int) -> Any:
    """Captured and eager, side by side; whether the step has the kernel, and its counts."""
    warm_up()
    zero = Setting({"data": RANKS}, stage).zero("cuda")
    head = initial("cuda").params["head"].clone()
    state = fcg.TrainState.create(params={"head": head}, optimizer=fcg.optim.sgd(10.0), sharding=zero)
    twin, step = fcg.fork(state), fcg.graph_step(step_of(mean_loss))
    for call in range(CALLS):
        seen = batch(RANKS * call + rank_of(), "cuda")
        twin, expected = step.eager(twin, seen)
        state, metrics = step(state, seen)
        # The sum over classes is added up in another order, and slopes are rounded to bf16.
        torch.testing.assert_close(metrics["loss"], expected["loss"], rtol=1e-4, atol=1e-5)
    for one, other in zip(
        fcg.tree.leaves(held(state.params)), fcg.tree.leaves(held(twin.params)), strict=True
    ):
        torch.testing.assert_close(one.clone(), other.clone(), rtol=1e-2, atol=2e-2)
    text = step.lower(state, batch(0, "cuda")).plan.as_text()
    return "cross_entropy_" in text, step.stats.captures, step.stats.replays


@pytest.mark.multi_gpu(2)
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_train_with_the_joined_loss(stage: int) -> None:
    assert on_ranks(RANKS, trained, stage, device="cuda", timeout=240.0) == [(True, 1, CALLS)] * RANKS
