"""What autograd makes for itself is traced as it runs: tensors that a function saves, tangents that are zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import functional_cg as fcg
from functional_cg.errors import SideEffectError
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
    """After a call or two, TorchScript runs what it has made of a function and of its gradient.

    Of a sigmoid it makes a gradient that rounds otherwise; of this one, the same.
    """

    def gated(x: Tensor, beta: float) -> Tensor:
        return x * torch.relu(beta * x)

    scripted = torch.jit.script(gated)
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


# --- steps that differentiate by torch's own functions -------------------------------------------------------


def loss_of(params: list[Tensor], x: Tensor) -> Tensor:
    hidden, out = params
    return ((x @ hidden).relu() @ out).sum()


def by_backward(params: list[Tensor], x: Tensor) -> tuple[Any, Tensor]:
    loss = loss_of(params, x)
    loss.backward()
    return [one.grad for one in params], loss


def by_grad(params: list[Tensor], x: Tensor) -> tuple[Any, Tensor]:
    loss = loss_of(params, x)
    return torch.autograd.grad(loss, params), loss


def by_two_backwards(params: list[Tensor], x: Tensor) -> tuple[Any, Tensor]:
    """Gradients add up where two losses are differentiated, as those of slices of a batch."""
    losses = [loss_of(params, part) for part in x.split(2)]
    for loss in losses:
        loss.backward()
    return [one.grad for one in params], losses[1]


def by_inner_steps(params: list[Tensor], x: Tensor) -> tuple[Any, Tensor]:
    inner = params
    for part in x.split(2):
        steps = torch.autograd.grad(loss_of(inner, part), inner, create_graph=True)
        inner = [one - step for one, step in zip(inner, steps, strict=True)]
    loss = loss_of(inner, x)
    return torch.autograd.grad(loss, params), loss


LEAVES: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda leaf: leaf.requires_grad_(),
    "detached": lambda leaf: leaf.detach().requires_grad_(),
    "cloned": lambda leaf: leaf.clone().requires_grad_(True),
    "parameter": lambda leaf: nn.Parameter(leaf.clone()),
}
OPTIONS: dict[str, dict[str, Any]] = {"simulator": {"backend": Simulator()}, "verify": {"debug": "verify"}}


@pytest.mark.parametrize("run", ["aten", "simulator", "verify", "eager"])
@pytest.mark.parametrize("by", [by_backward, by_grad, by_two_backwards, by_inner_steps])
@pytest.mark.parametrize("leaf", LEAVES)
def test_a_step_that_differentiates_by_torch_equals_its_function(by: Any, leaf: str, run: str) -> None:
    """Without any mode around it, as where the function is called by itself; whole numbers, so bit for bit."""

    def step_fn(state: list[Tensor], x: Tensor) -> Any:
        params = [LEAVES[leaf](one) for one in state]
        grads, loss = by(params, x)
        return [update(one, grad) for one, grad in zip(params, grads, strict=True)], {"loss": loss}

    def update(one: Tensor, grad: Tensor) -> Tensor:
        if one.shape[0] == 3:
            return (one - grad) % 5  # it still has a graph
        return one.data.clone().sub_(grad.data).remainder_(5)

    draw = torch.Generator().manual_seed(0)
    plain = [torch.randint(-2, 3, size, generator=draw).float() for size in ((3, 4), (4, 2))]
    state: Any = fcg.place([one.clone() for one in plain])
    step = fcg.graph_step(step_fn, **OPTIONS.get(run, {}))
    for _ in range(4):
        x = torch.randint(-2, 3, (4, 3), generator=draw).float()
        plain, expected = step_fn([one.detach().clone() for one in plain], x)
        state, metrics = (step.eager if run == "eager" else step)(state, x)
        assert torch.equal(metrics["loss"], expected["loss"])
        assert not metrics["loss"].requires_grad
        assert all(map(torch.equal, fcg.snapshot(state), plain))


@thorough
@pytest.mark.parametrize("by", [by_backward, by_two_backwards, by_inner_steps])
def test_compiled_steps_differentiate_by_torch(by: Any) -> None:
    def step_fn(state: list[Tensor], x: Tensor) -> Any:
        params = [one.detach().requires_grad_() for one in state]
        grads, loss = by(params, x)
        return [(one - grad) % 5 for one, grad in zip(params, grads, strict=True)], loss

    plain = [torch.ones(3, 4), torch.ones(4, 2)]
    state, step = fcg.place([one.clone() for one in plain]), fcg.graph_step(step_fn, lowering="inductor")
    for number in range(3):
        x = torch.arange(12.0).view(4, 3) % (number + 2)
        plain, expected = step_fn([one.detach() for one in plain], x)
        state, loss = step(state, x)
        assert torch.equal(loss, expected)
        assert all(map(torch.equal, fcg.snapshot(state), plain))


@pytest.mark.parametrize("ambient", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_a_step_begins_with_gradients_on(ambient: Any) -> None:
    step = fcg.graph_step(lambda state, x: (state, x + torch.is_grad_enabled()))
    state = fcg.place(torch.ones(2))
    with ambient():
        for _ in range(2):
            state, metrics = step(state, torch.zeros(2))
            assert torch.equal(metrics, torch.ones(2))
            state, metrics = step.eager(state, torch.zeros(2))
            assert torch.equal(metrics, torch.ones(2))


def test_declared_constants_make_no_gradient_differentiable() -> None:
    """A frozen model's parameters may ask for gradients: the calls are those of one whose parameters do not."""
    model = nn.Sequential(nn.LayerNorm(4), nn.SiLU(), nn.Linear(4, 1))

    def step_fn(state: Tensor, x: Tensor) -> Any:
        loss, grad = fcg.value_and_grad(lambda w: model(x @ w).square().mean())(state)
        return state - grad, loss

    calls = []
    for asks in (True, False):
        model.requires_grad_(asks)
        step = fcg.graph_step(step_fn, constants=list(model.parameters()), debug="verify")
        step(fcg.place(torch.ones(4, 4)), torch.ones(2, 4))
        calls.append(len(step.lower(torch.ones(4, 4), torch.ones(2, 4)).program.instrs))
    assert calls[0] == calls[1]


def test_a_backward_leaves_nothing_beside_constants() -> None:
    frozen = nn.Parameter(torch.ones(2))

    def step_fn(state: Tensor, x: Tensor) -> Any:
        leaf = state.detach().requires_grad_()
        (leaf * frozen * x).sum().backward()
        return state - leaf.grad, {}

    step, state = fcg.graph_step(step_fn, constants=frozen), fcg.place(torch.ones(2))
    for _ in range(2):
        with pytest.raises(
            SideEffectError, match=r"(?s)`step_fn`: calls `backward\(\)`.*constants.grad"
        ) as caught:
            step(state, torch.ones(2))
        assert "To fix: switch them off, `constant.requires_grad_(False)`" in str(caught.value)
        assert frozen.grad is None
    frozen.requires_grad_(False)
    state, _ = step(state, torch.ones(2))
    assert torch.equal(fcg.snapshot(state), torch.zeros(2))
