"""Fp8 layers on ranks: each rank sees different maxima, and all continue with the largest."""

from __future__ import annotations

from typing import Any

import functional_cg as fcg
from functional_cg.nn import Fp8Scaling, fp8_linear
from tests.sharding.law import CALLS, assert_same_step, on_gloo_and_nccl, rank_of
from tests.sharding.programs import Setting, randn
from tests.sharding.ranks import on_ranks

RANKS = 2


class State(fcg.TrainState):
    fp8: Fp8Scaling


def loss_of(trained: Any, batch: Any) -> Any:
    params, scaling = trained
    hidden = batch
    for weight, one in zip(params, scaling, strict=True):
        hidden = fp8_linear(hidden, weight, None, one).tanh()
    return hidden.square().mean()


def step_of(state: Any, batch: Any) -> Any:
    loss, (grads, seen) = fcg.value_and_grad(loss_of)((state.params, state.fp8), batch)
    metrics = {"loss": fcg.sharding.mean(loss), "own": batch.abs().amax()}
    return state.apply_gradients(grads, fp8=state.fp8.updated(seen)), metrics


def own_scales_step(state: Any, batch: Any) -> Any:
    """Each rank would go on with a maximum of its own."""
    new, metrics = step_of(state, batch)
    return new.replace(
        fp8=state.fp8.__class__(state.fp8.scale * batch.amax(), state.fp8.history, state.fp8.seen)
    ), metrics


def trained(device: str) -> Any:
    zero = Setting({"data": RANKS}, 3).zero(device)
    params = [(randn(n, 32, 32) / 4).to(device) for n in range(2)]

    def fresh() -> Any:
        return State.create(
            params=params,
            optimizer=fcg.optim.sgd(0.1),
            sharding=zero,
            fp8=Fp8Scaling.create(2, device=device),
        )

    captured = fresh()
    eager, step = fcg.fork(captured), fcg.graph_step(step_of, lowering="aten")
    own, history = [], []
    for call in range(CALLS):
        # By turns one rank sees the larger numbers.
        scale = 2.0 ** (call % 5) * (8.0 if call % 2 == rank_of() else 1.0)
        batch = (randn(100 * call + rank_of(), 16, 32) * scale).to(device)
        captured, eager, metrics, _ = assert_same_step(step, captured, eager, batch, call)
        own.append(float(metrics["own"]))
        history.append(float(captured.fp8.history[0, 0, 0]))
    try:
        fcg.graph_step(own_scales_step, lowering="aten")(fresh(), randn(rank_of(), 16, 32).to(device))
    except fcg.RankError as error:
        return own, history, str(error)
    return own, history, ""


@on_gloo_and_nccl
def test_all_ranks_go_on_with_the_largest_maximum(device: str) -> None:
    (own, history, error), (other, same, _) = on_ranks(RANKS, trained, device, device=device)
    assert history == same
    for call, maxima in enumerate(zip(own, other, strict=True)):
        assert history[call] / 2 < max(maxima) <= history[call], f"call {call}"
    assert "fp8.scale  differs over data" in error
