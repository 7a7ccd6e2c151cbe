"""Light updates: the optimizer's own kernel updates small leaves after a compiled function that updates the others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_cg as fcg
from functional_cg import optim
from functional_cg.stages.lower.in_place import InPlacePlan
from functional_cg.testing import assert_replay_equals_eager
from tests.compiled_graphs import COMPILED, as_on_a_gpu, lower_as_on_a_gpu

SHAPES = {
    "a": (3,),
    "b": (8, 5),
    "c": (),
    "d": (2, 2),
    "e": (30,),
    "f": (1,),
    "g": (4, 4, 4),
    "h": (5,),
    "i": (7,),
}
LIGHT = 6  # of these leaves are small below

on_a_gpu = pytest.mark.parametrize("compiled_on", COMPILED[1:], indirect=True)

OPTIMIZERS = {
    "adamw by a schedule, clipped": optim.chain(
        optim.clip_by_global_norm(1.0), optim.adamw(optim.cosine(0.1, 40), weight_decay=0.5)
    ),
    "adam": optim.adam(0.1),
    "adamw": optim.adamw(0.1, weight_decay=0.5),
    "adagrad": optim.adagrad(0.1),
    "momentum": optim.sgd(0.1, momentum=0.9),
    "sgd": optim.sgd(0.1),
    "nesterov": optim.sgd(0.1, momentum=0.9, nesterov=True),
}


@pytest.fixture
def apart(compiled_on: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The device, where leaves of up to 20 elements are small, and no program is."""
    monkeypatch.setattr("functional_cg.stages.passes.fused._LIGHT", 20)
    for where in ("in_place", "compiled"):
        monkeypatch.setattr(f"functional_cg.stages.lower.{where}.SMALL", 0)
    if compiled_on == "cpu":
        monkeypatch.setattr("functional_cg.step.captures.lower", partial(lower_as_on_a_gpu, lanes=False))
    return compiled_on


def whole(number: int, device: str, **shapes: tuple[int, ...]) -> dict[str, Tensor]:
    """Leaves of whole numbers."""
    generator = torch.Generator().manual_seed(number)
    return {
        name: torch.randint(-4, 5, shape, generator=generator).to(device, torch.float32)
        for name, shape in shapes.items()
    }


def state_of(optimizer: Any, device: str) -> Any:
    return fcg.TrainState.create(
        params=whole(0, device, **SHAPES), optimizer=optimizer, key=fcg.random.key(0)
    )


def loss_fn(params: Any, x: dict[str, Tensor]) -> Tensor:
    """Each gradient is a sum over two rows."""
    return sum(((leaf - torch.stack([x[name], -leaf.detach()])) ** 2).sum() for name, leaf in params.items())  # type: ignore[return-value]


def train_step(state: Any, x: dict[str, Tensor]) -> Any:
    new = state.apply_gradients(fcg.grad(loss_fn)(state.params, x))
    return new, {"before": state.params["a"]}


def batches(device: str, calls: int = 16) -> list[dict[str, Tensor]]:
    return [whole(number + 1, device, **SHAPES) for number in range(calls)]


def updated_apart(step: Any, state: Any, x: Any) -> list[int]:
    """How many leaves each call behind the compiled function updates."""
    plan = step.lower(fcg.fork(fcg.place(state)), x).plan
    assert isinstance(plan, InPlacePlan)
    return [len(call.args[0]) for call in plan.schedule.fused]


@as_on_a_gpu("name", OPTIMIZERS, 6)
def test_an_optimizer_updates_as_eagerly(apart: str, name: str) -> None:
    state, given = state_of(OPTIMIZERS[name], apart), batches(apart)
    step = fcg.graph_step(train_step, lowering="inductor")
    clipped = "clipped" in name  # by a call on the list of all gradients
    assert updated_apart(step, state, given[0]) == [LIGHT] * (1 + clipped)
    assert_replay_equals_eager(step, state, given, rtol=1e-5, atol=1e-5)


def returned(state: Any, x: Any) -> Any:
    """Old and new values, and gradients, leave the step; one of each is a view."""
    grads = fcg.grad(loss_fn)(state.params, x)
    new = state.apply_gradients(grads)
    metrics = {
        "old": state.params["a"],
        "part": state.params["d"][0],
        "gradient": grads["h"],
        "row": grads["d"][1],
    }
    return new, {**metrics, "new": new.params["i"]}


def averaged(state: Any, x: Any) -> Any:
    """What is computed of a new value waits for it."""
    new, metrics = train_step(state, x)
    return new, {**metrics, "mean": new.params["a"].sum() + new.params["b"].sum()}


def of_each_other(state: Any, x: Any) -> Any:
    """Gradients are old values of other leaves."""
    params = state.params
    return state.apply_gradients({**params, "a": params["h"][:3], "h": params["i"][:5], "i": x["i"]}), {}


def in_turn(state: Any, x: Any) -> Any:
    """A second update reads what the first one made."""
    return train_step(train_step(state, x)[0], x)


def one_of_them(state: Any, x: Any) -> Any:
    """Only some leaves get their new value."""
    new, metrics = train_step(state, x)
    return state.replace(params={**state.params, "a": new.params["a"], "e": new.params["e"]}), metrics


def scaled(state: Any, x: Any) -> Any:
    """A call on the list of all gradients, of which one leaves the step, and one is read again."""
    grads = fcg.grad(loss_fn)(state.params, x)
    half = dict(zip(grads, torch._foreach_mul(list(grads.values()), 0.5), strict=True))
    return state.apply_gradients(half), {"half": half["h"], "twice": half["d"] * 2}


@as_on_a_gpu("fn", [train_step, returned, scaled, of_each_other, averaged, in_turn, one_of_them], 3)
def test_exact_steps_are_exact(apart: str, fn: Callable[..., Any]) -> None:
    """Fractions of whole numbers that float32 has room for: whatever order is chosen, bit by bit."""
    state, calls = state_of(optim.sgd(0.25, momentum=0.5), apart), 4 if fn is in_turn else 8
    assert_replay_equals_eager(fcg.graph_step(fn, lowering="inductor"), state, batches(apart, calls))


@on_a_gpu
def test_few_small_leaves_and_small_programs_are_left_to_the_compiler(
    apart: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, (x, *_) = state_of(optim.sgd(0.1, momentum=0.9), apart), batches(apart)
    monkeypatch.setattr("functional_cg.stages.passes.fused._FEW", LIGHT)
    assert not updated_apart(fcg.graph_step(train_step, lowering="inductor"), state, x)
    monkeypatch.setattr("functional_cg.stages.passes.fused._FEW", LIGHT - 1)
    assert updated_apart(fcg.graph_step(train_step, lowering="inductor"), state, x) == [LIGHT]
    monkeypatch.setattr("functional_cg.stages.lower.in_place.SMALL", 2**20)
    assert not updated_apart(fcg.graph_step(train_step, lowering="inductor"), state, x)


@pytest.mark.kernels
@on_a_gpu
def test_a_profile_knows_their_kernels(apart: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FCG_PROFILE_KERNELS", "1")
    state, (x, *_) = state_of(optim.adam(0.1), apart), batches(apart)
    found = fcg.graph_step(train_step, lowering="inductor").profile(fcg.place(state), x)
    kernel = next(one for one in found.kernels if one.name.startswith("_fused_adam."))
    assert [(one.op, one.phase) for one in kernel.calls] == [("_fused_adam", "update")]
    assert kernel.seconds > 0
