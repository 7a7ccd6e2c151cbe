"""Parameters whose gradient is None: what stays as it is, and what goes on; the oracle is torch.optim."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import functional_cg as fcg
from functional_cg import optim

GRADIENT = torch.tensor([1.0, 2.0, -3.0])
REST = 50


def after_a_rest(optimizer: optim.GradientTransformation) -> Any:
    """The state after `b` had no gradient for a while, and then one."""
    params = {"a": torch.zeros(3), "b": torch.zeros(3)}
    state = fcg.TrainState.create(params=params, optimizer=optimizer)

    @fcg.graph_step(static_argnames=("resting",))
    def step(state: Any, gradient: torch.Tensor, resting: bool) -> Any:
        return state.apply_gradients({"a": gradient, "b": None if resting else gradient}), None

    for i in range(REST + 1):
        state, _ = step(state, GRADIENT, resting=i < REST)
    return fcg.snapshot(state)


def of_torch() -> dict[str, torch.Tensor]:
    params = {name: torch.nn.Parameter(torch.zeros(3)) for name in "ab"}
    judge = torch.optim.Adam(params.values(), lr=0.1)
    for i in range(REST + 1):
        params["a"].grad, params["b"].grad = GRADIENT, None if i < REST else GRADIENT
        judge.step()
    return {name: p.detach() for name, p in params.items()}


LABELLED = {"x": optim.adam(0.1), "y": optim.adam(0.1)}


@pytest.mark.parametrize(
    "optimizer",
    [
        optim.partition(LABELLED, {"a": "x", "b": "y"}),
        optim.chain(optim.clip_by_global_norm(100.0), optim.partition(LABELLED, {"a": "x", "b": "y"})),
        optim.partition(
            {name: optim.inject_hyperparams(optim.adam)(learning_rate=0.1) for name in "xy"},
            {"a": "x", "b": "y"},
        ),
        optim.from_torch(torch.optim.Adam, lr=0.1),
    ],
    ids=["partition", "behind a clip", "injected", "from_torch"],
)
def test_what_rests_goes_on_as_in_torch(optimizer: optim.GradientTransformation) -> None:
    state, judge = after_a_rest(optimizer), of_torch()
    for name, p in judge.items():
        torch.testing.assert_close(state.params[name], p, rtol=1e-6, atol=1e-7)


def test_a_count_rests_with_all_of_its_parameters() -> None:
    state = after_a_rest(optim.partition(LABELLED, {"a": "x", "b": "y"}))
    assert {name: int(one[0].count) for name, one in state.opt_state.inner_states.items()} == {
        "x": REST + 1,
        "y": 1,
    }


def test_a_count_that_others_share_goes_on() -> None:
    state = after_a_rest(optim.adam(0.1))
    assert int(state.opt_state[0].count) == REST + 1
    steps = REST + 1
    ratio = (0.1 / (1 - 0.9**steps)) / (0.001 / (1 - 0.999**steps)) ** 0.5
    torch.testing.assert_close(state.params["b"] / of_torch()["b"], torch.full((3,), ratio))
