"""``testing.stateful.machine`` on a compiled step of whole numbers.

``FCG_HYPOTHESIS_PROFILE=thorough`` makes it a thousand runs of thirty rules.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

import functional_cg as fcg
from functional_cg import tree
from functional_cg.testing.stateful import machine
from functional_cg.testing.strategies import like
from tests.compiled_graphs import compiled
from tests.exact_programs import EXACT
from tests.exact_steps import whole_numbers

LIMITS = settings(
    deadline=None,
    stateful_step_count=30,
    suppress_health_check=list(HealthCheck),
)


class Following(fcg.TrainState):
    target: Any


def create(seed: int, device: str) -> Any:
    params = {"w": torch.arange(6.0).reshape(3, 2).to(device) - 3, "b": torch.ones(2).to(device)}
    pair = (torch.zeros(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16))
    return Following.create(
        params=params,
        optimizer=fcg.optim.sgd(1.0),
        key=fcg.random.key(seed).to(device),
        buffers={"sum": torch.zeros(3).to(device), "pair": tree.map(lambda leaf: leaf.to(device), pair)},
        target=fcg.snapshot(params),
    )


@fcg.graph_step(lowering="inductor")
def train(state: Any, x: torch.Tensor) -> Any:
    """Whole numbers within [-8, 8]: an update, what it replaces, a sum, a swap, and a mask that is drawn."""
    mask = fcg.random.bernoulli(fcg.random.fold_in(state.key, state.step), 0.5, (2, 2))
    loss, grads = fcg.value_and_grad(
        lambda p: torch.where(mask, x @ p["w"] + p["b"], torch.zeros(2, 2, device=x.device)).sum()
    )(state.params)
    new = state.apply_gradients(grads)
    sums = (state.buffers["sum"] + x.sum(0)).clamp(-8, 8)
    metrics = {"loss": loss, "x": x[0], "w": state.params["w"], "sum": sums - state.buffers["sum"]}
    return new.replace(
        params=tree.map(lambda leaf: leaf.clamp(-8, 8), new.params),
        target=tree.map(torch.clone, state.params),
        buffers={"sum": sums, "pair": state.buffers["pair"][::-1]},
    ), metrics


@fcg.graph_fn(lowering="inductor")
def evaluate(state: Any, x: torch.Tensor) -> Any:
    return {"out": x @ state.params["w"], "b": state.params["b"], "step": state.step}


@compiled
def test_the_machine_of_a_compiled_step(compiled_on: str) -> None:
    exact = machine(
        train,
        state=st.builds(create, st.integers(0, 7), st.just(compiled_on)),
        inputs=like(torch.zeros(2, 3), elements=whole_numbers(3)).map(lambda x: x.to(compiled_on)),
        evaluate=[evaluate],
        rtol=EXACT,
    )
    run_state_machine_as_test(exact, settings=LIMITS)
