"""A sweep makes each call for all members at once: calls whose batching rules go by other dtypes, or are wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

import functional_cg as fcg

Step = Callable[[Any, Any], Any]


def results(step: Step, states: list[Any], x: Any) -> tuple[Any, list[Any]]:
    """What the sweep returns, and each member alone."""
    many, one = fcg.graph_step(fcg.sweep(step), lowering="aten"), fcg.graph_step(step, lowering="aten")
    alone = [one(fcg.tree.map(torch.clone, state), x) for state in states]
    return many(fcg.tree.stack(states), x), [(fcg.snapshot(state), out) for state, out in alone]


def agrees(step: Step, states: list[Any], x: Any, *, rtol: float = 0.0, atol: float = 0.0) -> None:
    (state, out), alone = results(step, states, x)
    for number, (of_one, out_of_one) in enumerate(alone):
        mine = fcg.tree.leaves(fcg.tree.take((fcg.snapshot(state), out), number))
        for found, wanted in zip(mine, fcg.tree.leaves((of_one, out_of_one)), strict=True):
            torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol, equal_nan=True)


# --- numbers of each member, and dtypes --------------------------------------------------------------------

FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
DTYPES = [*FLOATS, torch.uint8, torch.int8, torch.int32, torch.int64]
COMPARISONS = {
    name: getattr(torch, name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "maximum", "minimum", "fmod")
}
ARITHMETIC = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "pow": torch.pow,
    "atan2": torch.atan2, "copysign": torch.copysign, "xlogy": torch.xlogy, "floor_divide": torch.floor_divide,
    "remainder": torch.remainder, "where": lambda x, t: torch.where(x > 1, x, t), "rsub": lambda x, t: t - x,
    "foreach mul": lambda x, t: torch._foreach_mul([x], t)[0] if x.dtype in FLOATS else x * t,
    "clamp": lambda x, t: torch.clamp(x, min=t),
}  # fmt: skip


@example(name="floor_divide", dtype=torch.bfloat16, of_number=torch.float32, second=False)
@example(name="mul", dtype=torch.bfloat16, of_number=torch.float32, second=False)
@given(
    st.sampled_from(sorted(COMPARISONS | ARITHMETIC)),
    st.sampled_from(DTYPES),
    st.sampled_from(DTYPES),
    st.booleans(),
)
def test_a_number_of_each_member_promotes_as_that_of_one(
    name: str, dtype: torch.dtype, of_number: torch.dtype, second: bool
) -> None:
    """Whatever its dtype: of an operand without dimensions the category counts, in a sweep, too."""
    act = (COMPARISONS | ARITHMETIC)[name]
    x = torch.tensor([0.996, 1.0, 1.004, 3.0, 7.0, 100.0]).to(dtype)
    states = [{"t": torch.tensor(value).to(of_number)} for value in (1.002, 1.004, 44.0, 300.0)]

    def step(state: Any, x: Tensor) -> Any:
        pair = (state["t"], x) if second and name != "where" else (x, state["t"])
        return state, act(*pair)

    try:
        fcg.graph_step(step, lowering="aten")(fcg.tree.map(torch.clone, states[0]), x)
    except Exception:  # torch has no such kernel
        return
    agrees(step, states, x, rtol=1e-6)


def test_a_sum_in_place_rounds_as_that_of_one() -> None:
    states = [{"t": torch.tensor(1 + 2**-9)}, {"t": torch.tensor(1.0)}]
    agrees(lambda state, x: (state, x.clone().add_(state["t"])), states, torch.full((3,), -1.0).bfloat16())


# --- rules of torch that are wrong, or are not there -------------------------------------------------------


def own(value: float, *shape: int) -> dict[str, Tensor]:
    return {"w": torch.full(shape, float(value))}


def _neg_view(state: Any, x: Tensor) -> Any:
    z = torch.complex(state["w"], x)
    return state, z.conj().imag.clone()


def _foreach(state: Any, x: Tensor) -> Any:
    some = [state["w"], state["w"] * x]
    norms = [*torch._foreach_norm(some), *torch._foreach_norm(some, 2), *torch._foreach_norm(some, torch.inf)]
    return state, (
        norms,
        torch._foreach_addcmul(some, some, some, 0.5),
        torch._foreach_addcdiv(some, some, some),
    )


def _ring(state: Any, x: Tensor) -> Any:
    place = state["n"] % 3
    row = x[place]
    buffer = state["buffer"] * 1
    buffer[place] = row
    return {"n": state["n"] + 1, "buffer": buffer}, (row, buffer[place - 1])


def _said(state: Any, x: Tensor) -> Any:
    fcg.debug_print("{w} {x} {y}", w=state["w"], x=x, y=x[0] + 1)
    return state, state["w"].sum()


CALLS: dict[str, tuple[Step, list[Any], Tensor]] = {
    "index_fill of what all share": (
        lambda state, x: (state, x.index_fill(0, torch.tensor([0]), state["w"])), [own(1), own(2)], torch.zeros(3),
    ),
    "index_fill of one's own": (
        lambda state, x: (state, (state["w"] * x).index_fill(0, torch.tensor([0]), state["w"].sum())),
        [own(1, 3), own(2, 3)], torch.ones(3),
    ),
    "as_strided_scatter": (
        lambda state, x: (state, (state["w"] * 1).as_strided_scatter(x, (2,), (1,), 1)),
        [own(1, 4), own(2, 4)], torch.zeros(2),
    ),
    "a view of a conjugate": (_neg_view, [own(1, 2), own(2, 2)], torch.ones(2)),
    "lists": (_foreach, [own(1, 2), own(2, 2)], torch.tensor([0.5, 3.0])),
    "a ring buffer": (
        _ring, [{"n": torch.tensor(n), "buffer": torch.zeros(3, 2)} for n in range(4)], torch.arange(6.0).view(3, 2),
    ),
    "what is printed": (_said, [own(1, 2), own(2, 2)], torch.ones(2)),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_call_computes_what_it_computes_alone(name: str) -> None:
    agrees(*CALLS[name], rtol=1e-6)


def test_a_print_shows_what_members_share(capsys: pytest.CaptureFixture[str]) -> None:
    step = fcg.graph_step(fcg.sweep(_said))
    step(fcg.tree.stack([own(1, 1), own(2, 1)]), torch.zeros(1))
    assert capsys.readouterr().out.splitlines() == [
        "tensor([1.]) tensor([0.]) 1.0", "tensor([2.]) tensor([0.]) 1.0",
    ]  # fmt: skip


def test_batch_norm_in_mixed_precision() -> None:
    torch.manual_seed(0)
    apply, params, buffers = fcg.from_module(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))

    def step(state: Any, x: Tensor) -> Any:
        def loss_fn(params: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                out, new = apply(params, state["buffers"], x)
            return out.float().square().mean(), new

        (loss, new), grads = fcg.value_and_grad(loss_fn, has_aux=True)(state["params"])
        return {
            "params": fcg.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads),
            "buffers": new,
        }, loss

    members = [{"params": fcg.tree.map(lambda p, n=n: p * n, params), "buffers": buffers} for n in (1, 2)]
    agrees(step, members, torch.randn(4, 3, 6, 6), rtol=2e-2, atol=1e-2)


def test_autocast_around_a_sweep_casts_once() -> None:
    def member(state: Any, x: Tensor) -> Any:
        with torch.autocast("cpu", enabled=False):
            exact = x @ state["w"]
        return state, (exact, x @ state["w"])

    def under_autocast(fn: Any) -> Any:
        def step(state: Any, x: Tensor) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                return fn(state, x)

        return fcg.graph_step(step, lowering="aten")

    w, x = torch.randn(4, 3), torch.randn(2, 4)
    _, one = under_autocast(member)({"w": w.clone()}, x)
    _, many = under_autocast(fcg.sweep(member))({"w": w[None].clone()}, x)
    assert [part.dtype for part in many] == [torch.float32, torch.bfloat16]
    for found, wanted in zip(many, one, strict=True):
        assert torch.equal(found[0], wanted)


# --- what is refused ---------------------------------------------------------------------------------------


def _differentiated(state: Any, x: Tensor) -> Any:
    swept = fcg.sweep(lambda w, x: (w * x).sin().sum())
    loss, grad = fcg.value_and_grad(lambda w: swept(w, x).square().sum() + w.square().sum())(state)
    return state - 0.1 * grad, loss


def _closed_over(state: Any, x: Tensor) -> Any:
    loss, grad = fcg.value_and_grad(lambda w: fcg.sweep(lambda s, x: (s * x * w).sum())(state, x).sum())(
        state[0]
    )
    return state - 0.1 * grad, loss


def _into_a_view(state: Any, x: Tensor) -> Any:
    z = torch.complex(state, x.expand_as(state))
    z.conj().imag.mul_(2)
    return state, z.imag.clone()


REFUSED: dict[str, tuple[Any, str]] = {
    "its gradient": (_differentiated, "differentiates a sweep"),
    "the gradient of what a member closes over": (_closed_over, "differentiates a sweep"),
    "a write into a view without a rule": (fcg.sweep(_into_a_view), "writes into a view"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_lost_is_refused(name: str) -> None:
    step, text = REFUSED[name]
    state = fcg.place(torch.ones(3, 2))
    with pytest.raises(fcg.CaptureError, match=text):
        fcg.graph_step(step, lowering="aten")(state, torch.tensor([1.0, 2.0]))
    assert fcg.snapshot(state).tolist() == torch.ones(3, 2).tolist()


def test_the_fixes_of_a_gradient_work() -> None:
    def inside(w: Tensor, x: Tensor) -> Any:
        loss, grad = fcg.value_and_grad(lambda w: (w * x).sin().sum())(w)
        return w - 0.1 * grad, loss

    def mapped(w: Tensor, x: Tensor) -> Any:
        swept = torch.func.vmap(lambda w: (w * x).sin().sum())
        loss, grad = fcg.value_and_grad(lambda w: swept(w).square().sum())(w)
        return w - 0.1 * grad, loss

    x = torch.tensor([1.0, 2.0])
    agrees(inside, [torch.ones(2), torch.ones(2) * 2], x, rtol=1e-6)
    state, _ = fcg.graph_step(mapped)(torch.ones(3, 2), x)
    assert torch.allclose(fcg.snapshot(state), mapped(torch.ones(3, 2), x)[0])


def test_leaves_that_are_no_tensors_are_named() -> None:
    with pytest.raises(fcg.LayoutError, match=r"a leaf is no tensor(.|\n)*tree\['lr'\]  float"):
        fcg.tree.stack([{"w": torch.ones(2), "lr": 0.1}, {"w": torch.ones(2), "lr": 0.2}])
    with pytest.raises(fcg.LayoutError, match=r"tree\['w'\]  of tree 1  torch.float32 \[3\]"):
        fcg.tree.stack([{"w": torch.ones(2)}, {"w": torch.ones(3)}])


def test_a_mask_needs_a_new_state() -> None:
    evaluate = fcg.graph_fn(fcg.sweep(lambda state, x: (state["w"] * x).sum()))
    with pytest.raises(fcg.LayoutError, match="gets `active`, and returns no new state"):
        evaluate(fcg.place(own(1, 2, 3)), torch.ones(3), active=torch.ones(2).bool())
    assert F.relu(evaluate(fcg.place(own(1, 2, 3)), torch.ones(3))).tolist() == [3.0, 3.0]
