"""What autograd makes for itself is traced as it runs: tensors that a function saves, tangents that are zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import functional_cg as fcg
from functional_cg.testing import Simulator
from tests.shares import thorough


class Exp(torch.autograd.Function):
    """Saves its result, which autograd unpacks as another tensor each time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, times: float) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        ctx.times = times
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (y,) = ctx.saved_tensors
        return grads[0] * y * ctx.times, None


class Inner(torch.autograd.Function):
    """Computes a gradient in its backward, from an input and its result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, act: Any) -> Tensor:
        y = act(x)
        ctx.act = act
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, y = ctx.saved_tensors
        with torch.enable_grad():
            again = x.detach().requires_grad_(True)
            (grad,) = torch.autograd.grad(ctx.act(again), again, grads[0])
        return grad * y, None


def saved_by_a_node(x: Tensor) -> Tensor:
    y = x.exp()
    assert y.grad_fn is not None
    return y * y.grad_fn._saved_result.detach()  # type: ignore[attr-defined]


SAVING: dict[str, Callable[[Tensor], Tensor]] = {
    "result": lambda x: Exp.apply(x, 2.0),
    "input and result": lambda x: Inner.apply(x, torch.tanh),
    "node": saved_by_a_node,
}


def equals_eager(loss: Callable[[Any, Tensor], Tensor], **options: Any) -> None:
    """Judge a captured step by the same function run eagerly, over calls with new data."""
    layer = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    apply, params, _ = fcg.from_module(layer)

    def train_step(state: Any, x: Tensor) -> Any:
        def loss_fn(params: Any) -> Tensor:
            return loss(lambda x: apply(params, {}, x)[0], x)

        value, grads = fcg.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads), value

    state = fcg.TrainState.create(params=params, optimizer=fcg.optim.sgd(0.1))
    step, plain = fcg.graph_step(train_step, lowering="aten", **options), fcg.snapshot(state)
    for _ in range(4):
        x = torch.randn(5, 3, dtype=torch.float64)
        plain, expected = train_step(plain, x)
        state, value = step(state, x)
        assert torch.equal(value, expected)
        for ours, theirs in zip(fcg.tree.leaves(state.params), fcg.tree.leaves(plain.params), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", SAVING)
def test_functions_may_save_their_results(kind: str) -> None:
    equals_eager(lambda model, x: SAVING[kind](model(x)).square().mean())


@pytest.mark.parametrize("calls", range(4))
def test_a_scripted_function_is_traced_whatever_it_is_specialised_to(calls: int) -> None:
    """After a call or two, TorchScript runs what it has made of a function and of its gradient."""

    def swish(x: Tensor, beta: float) -> Tensor:
        return x * torch.sigmoid(beta * x)

    scripted = torch.jit.script(swish)
    for _ in range(calls):
        scripted(torch.randn(5, 2, dtype=torch.float64), 1.5)
    equals_eager(lambda model, x: scripted(model(x), 1.5).square().mean())


def laplacian(model: Any, x: Tensor) -> Tensor:
    hessian = torch.func.vmap(torch.func.hessian(lambda one: model(one[None]).square().sum()))(x)
    return hessian.diagonal(dim1=1, dim2=2).sum(1).square().mean()


def jacobian(model: Any, x: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.jacfwd(lambda one: model(one[None])[0]))(x).square().mean()


def dual(model: Any, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        value, tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x))))
        return (value * tangent).mean()


FORWARD = {"hessian": laplacian, "jacfwd": jacobian, "dual": dual}


@pytest.mark.parametrize("kind", FORWARD)
def test_forward_mode_equals_eager(kind: str) -> None:
    equals_eager(FORWARD[kind])


@pytest.mark.parametrize("kind", ["hessian", "jacfwd"])
def test_forward_mode_along_views_again_and_again(kind: str) -> None:
    """Of parts of one tensor, as in several steps per call."""
    equals_eager(lambda model, x: torch.stack([FORWARD[kind](model, part) for part in x[1:].split(2)]).mean())


@pytest.mark.parametrize("kind", FORWARD)
def test_forward_mode_survives_the_rules_of_a_graph(kind: str) -> None:
    equals_eager(FORWARD[kind], backend=Simulator())


def test_forward_mode_is_verified() -> None:
    equals_eager(dual, debug="verify+poison")


def test_a_product_with_a_zero_tangent_is_zero() -> None:
    """What torch skips for the tangent of a constant is skipped in a replay: it computes no ``inf * 0``."""

    def product(x: Tensor) -> Tensor:
        return x * torch._efficientzerotensor(3) + 1

    fn = fcg.graph_fn(lambda state, x: product(x) + state["w"], lowering="aten")
    state = fcg.place({"w": torch.zeros(3)})
    for number in (1.0, torch.inf, 2.0):
        x = torch.full((3,), number)
        assert torch.equal(fn(state, x), product(x))


@thorough
def test_compiled_steps_hold_zero_tangents() -> None:
    step = fcg.graph_fn(lambda state, x: x * torch._efficientzerotensor(3) + state["w"], lowering="inductor")
    state = fcg.place({"w": torch.ones(3)})
    for _ in range(3):
        x = torch.randn(3)
        assert torch.equal(step(state, x), torch.ones(3))
