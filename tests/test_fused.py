"""Fused optimizer calls write their slots in place: but not where a slot is read as another's gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_cg as fcg
from functional_cg import optim
from functional_cg.testing import assert_trees_all_equal

WEIGHTS = {"a": True, "b": False, "c": True}

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optim.sgd(0.1),
    "momentum": lambda: optim.sgd(0.1, momentum=0.9),
    "adagrad": lambda: optim.adagrad(0.1),
    "masked adamw": lambda: optim.adamw(0.1, weight_decay=0.1, mask=WEIGHTS),
    "two rules": lambda: optim.partition(
        {"one": optim.sgd(0.1), "two": optim.adam(0.1)}, {"a": "one", "b": "two", "c": "one"}
    ),
}

# What the gradients of the leaves are: other leaves, as in games and mechanics, in either order.
GRADIENTS: dict[str, Callable[[Any], Any]] = {
    "a game": lambda s: {"a": s.params["c"], "b": s.grads["b"], "c": -s.params["a"]},
    "the same game": lambda s: {"a": -s.params["c"], "b": s.grads["b"], "c": s.params["a"]},
    "exchanged": lambda s: {"a": s.params["c"], "b": s.params["a"][0], "c": s.params["a"]},
    "their own": lambda s: s.params,
    "kept": lambda s: s.grads,
    "kept, exchanged": lambda s: {**s.grads, "a": s.grads["c"], "c": s.grads["a"]},
}


def leaves(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        n: torch.randn(shape, generator=generator) for n, shape in (("a", (6, 4)), ("b", (4,)), ("c", (6, 4)))
    }


@pytest.mark.parametrize("gradients", GRADIENTS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_leaves_that_are_gradients_of_others_are_read_before_they_are_written(
    optimizer: str, gradients: str
) -> None:
    def train_step(state: Any) -> Any:
        grads = GRADIENTS[gradients](state)
        return state.apply_gradients(grads).replace(grads=grads), {"grads": grads}

    captured = fcg.TrainState.create(params=leaves(0), optimizer=OPTIMIZERS[optimizer](), accumulate=True)
    captured = captured.replace(grads=leaves(1))
    eager, step = fcg.fork(captured), fcg.graph_step(train_step, lowering="aten")
    for call in range(3):
        eager, expected = step.eager(eager)
        captured, metrics = step(captured)
        assert_trees_all_equal((captured, metrics), (eager, expected), f"call {call}")
