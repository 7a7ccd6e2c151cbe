"""Which programs are told that they dropped a new value: those that forgot one, and none that is right."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functional_cg as fcg


class Averaged(fcg.TrainState):
    ema: dict[str, Tensor]


def state_of(optimizer: Any) -> Averaged:
    params = {"w": torch.ones(3), "v": torch.ones(2), "t": torch.tensor(1.0)}
    return Averaged.create(params=params, optimizer=optimizer, ema=fcg.snapshot(params))


def grads_of(state: Any, x: Tensor) -> Any:
    return fcg.value_and_grad(lambda p: ((p["w"].tanh() * x) ** 2).sum() * p["t"] + p["v"].exp().sum())(
        state.params
    )[1]


def dropped(step: Any, *args: Any) -> list[str]:
    """Return the leaves for which the step is told that it dropped a value, without the lines."""
    inspection = fcg.graph_step(step).lower(*args).inspection
    return [re.sub(r" \([^(]*\)$", "", text).removeprefix("state.") for text in inspection.dropped]


def injected(factory: Callable[..., Any]) -> Any:
    return fcg.optim.inject_hyperparams(factory)(learning_rate=0.1)


def adamw(learning_rate: Any = 0.1) -> Any:
    return fcg.optim.adamw(learning_rate, weight_decay=0.1)


def grouped(learning_rate: Any = 0.1) -> Any:
    groups = {"a": adamw(learning_rate), "b": fcg.optim.adamw(learning_rate, weight_decay=0.0)}
    return fcg.optim.partition(groups, {"w": "a", "v": "b", "t": "a"})


OPTIMIZERS = {
    "sgd": lambda: fcg.optim.sgd(0.1, momentum=0.9),
    "adamw": adamw,
    "lion": lambda: fcg.optim.lion(0.1, weight_decay=0.1),
    "injected sgd": lambda: injected(lambda learning_rate: fcg.optim.sgd(learning_rate)),
    "injected adamw": lambda: injected(lambda learning_rate: adamw(learning_rate)),
    "injected groups": lambda: injected(lambda learning_rate: grouped(learning_rate)),
    "clipped": lambda: fcg.optim.chain(fcg.optim.clip_by_global_norm(1.0), adamw()),
}


# --- right programs ----------------------------------------------------------------------------------------


def update(state: Any, x: Tensor) -> Any:
    return state.apply_gradients(grads_of(state, x)), {}


def left_out(state: Any, x: Tensor) -> Any:
    return state.apply_gradients({**grads_of(state, x), "w": None}), {}


def clipped_and_left_out(state: Any, x: Tensor) -> Any:
    """A gradient that is computed from its parameter, and dropped, is no new value of the parameter."""
    grads = fcg.tree.map(lambda g: torch.where(g.norm() > 1, g / g.norm(), g), grads_of(state, x))
    return state.apply_gradients({**grads, "w": None, "t": None}), {}


def averaged(state: Any, x: Tensor) -> Any:
    new = state.apply_gradients(grads_of(state, x))
    return new.replace(ema=fcg.tree.map(lambda old, p: 0.9 * old + 0.1 * p, state.ema, new.params)), {}


@pytest.mark.parametrize("step", [update, left_out, clipped_and_left_out, averaged])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_right_update_drops_nothing(name: str, step: Any) -> None:
    assert dropped(step, state_of(OPTIMIZERS[name]()), torch.randn(3)) == []


def test_a_count_that_is_put_back_is_not_dropped() -> None:
    def step(state: Any, x: Tensor) -> Any:
        new = state.apply_gradients({**grads_of(state, x), "v": None})
        where = lambda s: s.opt_state.inner_states["b"][0].count  # noqa: E731
        return fcg.tree.at(where, new, where(state)), {}

    assert dropped(step, state_of(grouped()), torch.randn(3)) == []


class Table(nn.Module):
    """Reads a table by which nothing else is computed, and looks at its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))
        self.register_buffer("table", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        self.table * 2, self.w + 1
        return (self.w * x).sum()


def weight_norm() -> nn.Module:
    """The second result of the op has the layout of `weight_g`, and only the backward would read it."""
    with pytest.warns(FutureWarning, match="weight_norm"):
        module = torch.nn.utils.weight_norm(nn.Linear(3, 5, bias=False))
    module.weight_g.requires_grad = False
    return module


@pytest.mark.parametrize("module", [weight_norm, Table])
@pytest.mark.parametrize("train", [True, False])
def test_what_a_module_computes_on_its_way_is_not_dropped(module: Any, *, train: bool) -> None:
    apply, params, buffers = fcg.from_module(module())
    state = fcg.TrainState.create(params=params, buffers=buffers, optimizer=fcg.optim.sgd(0.1))

    def step(state: Any, x: Tensor) -> Any:
        def loss_fn(p: Any) -> Tensor:
            return apply(p, state.buffers, x, train=train)[0].square().sum()

        return state.apply_gradients(fcg.value_and_grad(loss_fn)(state.params)[1]), {}

    assert dropped(step, state, torch.randn(3)) == []


def test_a_second_result_of_an_op_is_no_new_value() -> None:
    def step(state: Any) -> Any:
        weight, _norms = torch._weight_norm_interface(state["v"], state["g"])
        return {**state, "v": weight}, {}

    assert dropped(step, fcg.place({"v": torch.ones(5, 3), "g": torch.ones(5, 1)})) == []


# --- wrong programs ----------------------------------------------------------------------------------------


def forgotten(state: Any, x: Tensor) -> Any:
    state.apply_gradients(grads_of(state, x))
    return state, {}


def without_opt_state(state: Any, x: Tensor) -> Any:
    return state.replace(params=state.apply_gradients(grads_of(state, x)).params), {}


def without_params(state: Any, x: Tensor) -> Any:
    return state.replace(opt_state=state.apply_gradients(grads_of(state, x)).opt_state), {}


def without_average(state: Any, x: Tensor) -> Any:
    new = state.apply_gradients(grads_of(state, x))
    fcg.tree.map(lambda old, p: 0.9 * old + 0.1 * p, state.ema, new.params)
    return new, {}


def without_decay(state: Any, x: Tensor) -> Any:
    new = state.apply_gradients(grads_of(state, x))
    state.ema["t"] * 0.99
    return new, {}


@pytest.mark.parametrize(
    ("step", "fields"),
    [
        (forgotten, {"step", "params", "opt_state"}),
        (without_opt_state, {"step", "opt_state"}),
        (without_params, {"step", "params"}),
        (without_average, {"ema"}),
        (without_decay, {"ema"}),
    ],
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_forgotten_value_is_named(name: str, step: Any, fields: set[str]) -> None:
    found = dropped(step, state_of(OPTIMIZERS[name]()), torch.randn(3))
    stays = {"opt_state"} if name == "injected sgd" else set()  # its state is the rate alone
    assert {re.split(r"\W", text)[0] for text in found} == fields - stays
    assert not any("hyperparams" in text for text in found)  # the update leaves them as they are


@pytest.mark.parametrize("name", ["lion", "sgd"])
def test_an_optimizer_state_that_a_bare_update_returned_is_named(name: str) -> None:
    optimizer = OPTIMIZERS[name]()

    def step(state: Any, x: Tensor) -> Any:
        updates, _ = optimizer.update(grads_of(state, x), state.opt_state, state.params)
        return state.replace(params=fcg.optim.apply_updates(state.params, updates)), {}

    assert dropped(step, state_of(optimizer), torch.randn(3))
