"""Property tests of a step: ``python -m functional_cg.examples.programs.property_test``, or with pytest.

The step is a regression on batches padded to a fixed size; a mask marks the rows that count. The tests state laws,
hypothesis searches for inputs that break them, and two broken steps show what they catch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import Phase, given, settings
from torch import Tensor

import functional_cg as fcg
from functional_cg.testing import assert_pure, assert_replay_equals_eager, assert_trees_all_close
from functional_cg.testing.strategies import inputs, like

Params = dict[str, Tensor]
Batch = dict[str, Tensor]
State = fcg.TrainState[Params]
Result = tuple[State, dict[str, Tensor]]
Mean = Callable[[Tensor, Tensor], Tensor]


def create_state(device: str = "cpu") -> State:
    params = {"w": torch.zeros(3, device=device), "b": torch.zeros((), device=device)}
    return fcg.TrainState.create(params=params, optimizer=fcg.optim.adam(0.1))


def example_batch() -> Batch:
    return {"x": torch.zeros(8, 3), "y": torch.zeros(8), "mask": torch.ones(8, dtype=torch.bool)}


def mean(rows: Tensor, mask: Tensor) -> Tensor:
    return (mask / mask.sum().clamp(min=1)) @ rows


def careless_mean(rows: Tensor, mask: Tensor) -> Tensor:
    return rows.mean(dim=0)  # counts the padding rows, too


def update(state: State, batch: Batch, center: Mean, rate: float = 1.0) -> Result:
    def loss_fn(params: Params) -> Tensor:
        x = batch["x"] - center(batch["x"], batch["mask"])
        return mean((x @ params["w"] + params["b"] - batch["y"]) ** 2, batch["mask"])

    loss, grads = fcg.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(fcg.tree.map(lambda grad: rate * grad, grads)), {"loss": loss}


@fcg.graph_step
def train_step(state: State, batch: Batch) -> Result:
    return update(state, batch, mean)


@settings(deadline=None)  # the first example captures the step
@given(inputs(example_batch(), calls=5))
def test_replay_equals_eager(batches: list[Batch]) -> None:
    assert_replay_equals_eager(train_step, create_state(), batches)


@settings(deadline=None)
@given(like(example_batch()))
def test_step_is_pure(batch: Batch) -> None:
    assert_pure(train_step, create_state(), batch)


def padding_does_not_matter(step: Callable[[State, Batch], Result], batch: Batch, other: Tensor) -> None:
    padded = {**batch, "x": torch.where(batch["mask"][:, None], batch["x"], other)}
    assert_trees_all_close(step(create_state(), padded), step(create_state(), batch))


@settings(deadline=None)
@given(like(example_batch()), like(torch.zeros(8, 3)))
def test_padding_does_not_matter(batch: Batch, other: Tensor) -> None:
    padding_does_not_matter(train_step, batch, other)


@settings(deadline=None)
@given(like(torch.zeros(3)))
def test_step_learns_any_plane(slope: Tensor) -> None:
    state, losses = create_state(), []
    for x in torch.randn(100, 8, 3):
        batch = {**example_batch(), "x": x, "y": 3 + (x - x.mean(dim=0)) @ slope}
        state, metrics = train_step(state, batch)
        losses.append(metrics["loss"])
    assert losses[-1] < 0.1 * losses[0], f"from {losses[0]:.3f} to {losses[-1]:.3f} only"


def test_padding_matters_to_a_careless_step() -> None:
    careless = fcg.graph_step(lambda state, batch: update(state, batch, careless_mean))

    @settings(deadline=None, phases=[Phase.generate])  # nobody reads this failure, so it is not made small
    @given(like(example_batch()), like(torch.zeros(8, 3)))
    def law(batch: Batch, other: Tensor) -> None:
        padding_does_not_matter(careless, batch, other)

    with pytest.raises(AssertionError):
        law()


def test_hidden_counter_is_not_pure() -> None:
    calls = itertools.count(1)

    def warming_up(state: State, batch: Batch) -> Result:
        return update(state, batch, mean, rate=1 / next(calls))

    with pytest.raises(AssertionError, match="two traces of it differ"):
        assert_pure(warming_up, create_state(), example_batch())


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            print(f"holds: {name.removeprefix('test_').replace('_', ' ')}")
