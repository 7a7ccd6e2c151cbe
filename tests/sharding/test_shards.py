"""Ops on shards, and reads of gathered leaves, match the same ops on whole leaves."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import functional_cg as fcg
from functional_cg import optim, sharding
from tests.sharding.programs import Setting, randn
from tests.sharding.ranks import on_ranks

GATHER = sharding.gather
SMALL = 0.001  # nothing beside 1.5 in bfloat16


def with_nan(place: int) -> Tensor:
    leaf = randn(1, 5)
    leaf[place] = math.nan
    return leaf


def half(*shape: int) -> Tensor:
    return (torch.ones(shape) * 1.5).bfloat16()


Op = Callable[[Tensor], Tensor]

EXTREMES: dict[str, Op] = {
    "max": lambda w: w.max(), "min": lambda w: w.min(), "amax": lambda w: w.amax(), "amin": lambda w: w.amin(),
    "norm": lambda w: w.norm(), "inf norm": lambda w: torch.linalg.vector_norm(w, ord=math.inf),
    "inf norm of several": lambda w: torch.stack(torch._foreach_norm([w, w + 1], math.inf)),
}  # fmt: skip

# Name -> a leaf, and what a step computes of it; the NaN is on rank 0 or 1 alone.
OPS: dict[str, tuple[Tensor, Op]] = {
    **{f"{name} of a NaN at {place}": (with_nan(place), op) for place in (0, 4) for name, op in EXTREMES.items()},
    **{f"norm of order {order}": (randn(1, 5), partial(Tensor.norm, p=order)) for order in (0.5, 1, 3, math.inf)},
    "norms of order 3": (randn(1, 5), lambda w: torch.stack(torch._foreach_norm([w, w + 1], 3.0))),
    "max": (randn(1, 5), Tensor.max),
    "min": (randn(1, 5), Tensor.min),
    "inf": (torch.tensor([1.0, -math.inf, math.inf]), lambda w: torch.stack([w.max(), w.min()])),
    "one number in f32 beside bf16": (half(5), lambda w: GATHER(w + torch.full((1,), SMALL))),
    "a number in f32 beside bf16": (half(5), lambda w: GATHER(w + torch.full((), SMALL))),
    "a number in f32 beside a number in bf16": (half(), lambda w: GATHER(w + torch.full((), SMALL))),
    "chosen numbers": (half(), lambda w: GATHER(torch.where(torch.full((), True), w, torch.full((), SMALL)))),
}  # fmt: skip


def of_shards(stage: int) -> dict[str, tuple[Tensor, Tensor]]:
    params = {name: leaf for name, (leaf, _) in OPS.items()}
    zero = Setting({"data": 2}, stage).zero("cpu")
    state = fcg.TrainState.create(params=params, optimizer=optim.sgd(0.1), sharding=zero)

    def train_step(state: Any) -> Any:
        return state, {name: op(state.params[name]) for name, (_, op) in OPS.items()}

    step = fcg.graph_step(train_step, lowering="aten")
    _, eager = step.eager(fcg.fork(state))
    _, captured = step(state)
    return {name: (captured[name], eager[name]) for name in OPS}


def test_ops_on_shards_are_those_on_whole_leaves() -> None:
    for results in on_ranks(2, of_shards, 3):
        for name, (leaf, op) in OPS.items():
            for result in results[name]:
                torch.testing.assert_close(result, op(leaf), equal_nan=True, msg=name)


def refused_shapes() -> list[str]:
    zero, said = Setting({"data": 2}, 3).zero("cpu"), []
    for leaf, other in ((torch.ones(5), torch.ones(1, 1)), (torch.ones(()), torch.ones(1))):
        state = fcg.TrainState.create(params={"w": leaf}, optimizer=optim.sgd(0.1), sharding=zero)

        def step(state: Any, other: Tensor = other) -> Any:
            return state, {"out": GATHER(state.params["w"] + other * 1)}

        try:
            fcg.graph_step(step, lowering="aten", constants={"other": other})(state)
        except fcg.LayoutError as error:
            said.append(str(error))
    return said


def test_one_number_of_more_dimensions_than_the_leaf_is_refused() -> None:
    for said in on_ranks(2, refused_shapes):
        assert len(said) == 2
        assert all("combines a sharded leaf with a tensor of another shape" in message for message in said)


# -- views of a gathered leaf that autograd keeps -----------------------------------------------------------------


def complex_product(params: Any, x: Tensor) -> Tensor:
    """Pairs of numbers read as complex ones, as filters in the frequency domain are."""
    a, b = torch.view_as_complex(params["a"]), torch.view_as_complex(params["b"])
    return (a * b).abs().square().mean() + (torch.view_as_complex(params["c"]) * x).real.square().mean()


def pairs() -> dict[str, Tensor]:
    return {name: randn(seed, 5, 3, 2).double() for seed, name in enumerate("abc")}


def gradients(stage: int) -> tuple[Any, Any]:
    zero = Setting({"data": 2}, stage).zero("cpu")
    state = fcg.TrainState.create(params=pairs(), optimizer=optim.sgd(0.1), sharding=zero)

    def step(state: Any, x: Tensor) -> Any:
        return state, GATHER(fcg.grad(complex_product)(state.params, x))

    step = fcg.graph_step(step, lowering="aten")
    x = randn(9, 5, 3).double()
    eager = step.eager(fcg.fork(state), x)[1]
    return eager, step(state, x)[1]


def test_leaves_read_as_complex_numbers_have_the_gradients_of_whole_ones() -> None:
    whole = {name: leaf.requires_grad_() for name, leaf in pairs().items()}
    complex_product(whole, randn(9, 5, 3).double()).backward()
    for results in on_ranks(2, gradients, 3):
        for grads in results:
            for name, leaf in whole.items():
                torch.testing.assert_close(grads[name], leaf.grad)
