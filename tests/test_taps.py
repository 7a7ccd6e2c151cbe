"""Taps read what the step computed at each call, and change nothing."""

from __future__ import annotations

from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor

import functional_cg as fcg
from tests.shares import CALLS


def data(n: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(n))


def start() -> dict[str, Tensor]:
    return {"w": data(100)[:3].clone(), "n": torch.tensor(0)}


def tapping(state: Any, x: Tensor) -> Any:
    def loss_fn(w: Tensor) -> Tensor:
        hidden = torch.relu(x @ w)
        fcg.tap("hidden", hidden)
        loss = hidden.square().mean()
        fcg.tap("loss", loss, keep=5)
        return loss

    loss, grad = fcg.value_and_grad(loss_fn)(state["w"])
    fcg.tap("n", state["n"], keep=3)
    return {"w": state["w"] - 0.1 * grad, "n": state["n"] + 1}, {"loss": loss}


def silent(state: Any, x: Tensor) -> Any:
    loss, grad = fcg.value_and_grad(lambda w: torch.relu(x @ w).square().mean())(state["w"])
    return {"w": state["w"] - 0.1 * grad, "n": state["n"] + 1}, {"loss": loss}


@pytest.mark.parametrize("lowering", ["aten", "inductor"])
def test_taps_of_replays_are_those_of_eager_runs_and_change_nothing(lowering: Any) -> None:
    step, twin, plain = (
        fcg.graph_step(fn, lowering=lowering if fn is not silent else "aten")
        for fn in (tapping, tapping, silent)
    )
    exact = lowering == "aten"
    state, shadow, without = fcg.place(start()), fcg.place(start()), fcg.place(start())
    losses = []
    for n in range(CALLS):
        before = state["w"].clone()
        state, metrics = step(state, data(n))
        shadow, _ = twin.eager(shadow, data(n))
        losses.append(metrics["loss"])
        assert list(step.taps) == list(twin.taps) == ["hidden", "loss", "n"]
        torch.testing.assert_close(step.taps["hidden"], torch.relu(data(n) @ before))
        assert torch.equal(step.taps["loss"], torch.stack(losses[-5:]))
        assert step.taps["n"].tolist() == list(range(n + 1))[-3:]
        if exact:
            without, _ = plain(without, data(n))
            assert torch.equal(state["w"], without["w"])
            assert all(torch.equal(step.taps[name], twin.taps[name]) for name in step.taps)
    assert step.stats.replays == CALLS
    assert not step.stats.eager_calls


def test_what_was_read_is_a_copy_and_stays() -> None:
    step = fcg.graph_step(tapping)
    state, metrics = step(start(), data(0))
    first, kept = step.taps["hidden"], step.taps["hidden"].clone()
    metrics["loss"].zero_()
    assert step.taps["loss"].item() != 0
    step.taps["hidden"].zero_()
    assert torch.equal(step.taps["hidden"], kept)
    state, _ = step(state, data(1))
    assert torch.equal(first, kept)
    assert not torch.equal(step.taps["hidden"], kept)


def test_a_leaf_is_tapped_as_it_was_at_that_moment() -> None:
    @fcg.graph_step
    def step(state: Any, x: Tensor) -> Any:
        total = x.sum(0)
        fcg.tap("before", total)
        total += 1
        fcg.tap("after", total)
        fcg.tap("w", state["w"])
        return {"w": state["w"] + total}, {}

    state = fcg.place({"w": torch.zeros(3)})
    for n in range(3):
        old = state["w"].clone()
        state, _ = step(state, data(n))
        assert torch.equal(step.taps["before"], data(n).sum(0))
        assert torch.equal(step.taps["after"], data(n).sum(0) + 1)
        assert torch.equal(step.taps["w"], old)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        fcg.tap("in backward", grad)
        return grad * 2


def test_gradients_on_their_way_are_tapped() -> None:
    def fn(state: Any, x: Tensor) -> Any:
        def loss_fn(w: Tensor) -> Tensor:
            hidden = Doubled.apply(x @ w)
            hidden.register_hook(lambda grad: fcg.tap("in hook", grad))
            return hidden.square().sum()

        return {**state, "w": state["w"] - 1e-3 * fcg.grad(loss_fn)(state["w"])}, {}

    for run in (step := fcg.graph_step(fn), step.eager):
        state = fcg.place(start())
        for n in range(3):
            expected = 4 * data(n) @ state["w"]
            state, _ = run(state, data(n))
            for name in ("in hook", "in backward"):
                torch.testing.assert_close(step.taps[name], expected)


def test_in_a_loop_a_name_has_several_values() -> None:
    def layer(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(x * w)
        fcg.tap("x", x, keep=4)
        return x, x

    @fcg.graph_fn
    def run(ws: Tensor, x: Tensor) -> Tensor:
        return fcg.scan(layer, x, ws)[1]

    for n in range(3):
        out = run(data(n)[:, 0], data(n)[0])
        assert torch.equal(run.taps["x"], out)


def test_under_vmap_a_value_has_the_batch_first() -> None:
    def one(x: Tensor) -> Tensor:
        fcg.tap("square", x * x)
        return (x * x).sum()

    step = fcg.graph_fn(lambda x: torch.func.vmap(one, in_dims=1)(x))
    for run in (step, step.eager):
        for n in range(2):
            run(data(n))
            assert torch.equal(step.taps["square"], (data(n) * data(n)).T)


def test_what_is_recomputed_is_tapped_and_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    def layer(w: Tensor, x: Tensor) -> Tensor:
        hidden = torch.tanh(x @ w)
        fcg.tap("hidden", hidden, keep=8)
        fcg.debug_print("seen")
        return torch.tanh(hidden)  # kept for the backward, so that the second run gets past the tap

    @fcg.graph_step
    def step(state: Any, x: Tensor) -> Any:
        grad = fcg.grad(lambda w: fcg.remat(layer)(w, x).sum())(state["w"])
        return {**state, "w": state["w"] - grad}, {}

    state, _ = step(start(), data(0))
    step.eager(state, data(0))
    assert step.taps["hidden"].shape == (2, 4, 3)
    assert capsys.readouterr().out == "seen\nseen\n"


def test_several_steps_have_taps_of_their_own() -> None:
    one, two = fcg.graph_step(tapping), fcg.graph_step(tapping)
    state, _ = one(start(), data(0))
    assert not two.taps
    assert two.taps != one.taps
    two(state, data(1))
    assert torch.equal(one.taps["n"], torch.tensor([0]))
    assert torch.equal(two.taps["n"], torch.tensor([1]))


def test_verified_calls_tap_once_and_a_refused_call_not_at_all() -> None:
    step = fcg.graph_step(tapping, debug="verify")
    state, _ = step(start(), data(0))
    assert step.taps["n"].tolist() == [0]
    with pytest.raises(fcg.LayoutError):
        step(state, torch.ones(7, 7))
    state, _ = step(state, data(1))
    assert step.taps["n"].tolist() == [0, 1]


def test_outside_of_a_step_nothing_happens() -> None:
    fcg.tap("x", torch.ones(2))
    torch.func.vmap(lambda x: fcg.tap("x", x) or x)(torch.ones(2))


def test_another_layout_begins_anew() -> None:
    @fcg.graph_fn(max_captures=2)
    def run(x: Tensor) -> Tensor:
        fcg.tap("x", x, keep=3)
        return x.sum()

    for size in (2, 2, 3):
        run(torch.full((size,), 1.0))
    assert torch.equal(run.taps["x"], torch.ones(1, 3))


@hypothesis.given(keep=st.integers(1, 6), calls=st.integers(1, 12))
def test_the_last_values_stay_in_order(keep: int, calls: int) -> None:
    @fcg.graph_fn(backend="eager")
    def run(x: Tensor) -> Tensor:
        fcg.tap("x", x, keep=keep)
        return x

    for n in range(calls):
        run(torch.tensor(n))
    expected = list(range(calls))[-keep:]
    assert run.taps["x"].tolist() == (expected if keep > 1 else expected[0])


def test_they_print() -> None:
    step = fcg.graph_step(tapping)
    assert repr(step.taps) == "nothing was tapped yet"
    step(start(), data(0))
    assert repr(step.taps) == "hidden  f32[4,3]@cpu\nloss  f32[]@cpu  last 1\nn  i64[]@cpu  last 1"
    assert "tap('hidden', 1)" in step.explain()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((3, torch.ones(2)), TypeError, "`name` has to be a text, got 3"),
        (("loss", 1.0), TypeError, "'loss' has to be a tensor, got float"),
        (("loss", torch.ones(2), 0), ValueError, "integer of 1 or more, got 0"),
        (("loss", torch.ones(2), True), ValueError, "integer of 1 or more, got True"),
    ],
)
def test_bad_arguments_are_refused(arguments: Any, error: type[Exception], message: str) -> None:
    name, x, *keep = arguments
    with pytest.raises(error, match=message):
        fcg.tap(name, x, **({"keep": keep[0]} if keep else {}))


def test_an_unknown_name_is_an_error_that_knows_the_others() -> None:
    step = fcg.graph_step(tapping)
    with pytest.raises(KeyError, match="nothing was tapped yet"):
        step.taps["loss"]
    step(start(), data(0))
    with pytest.raises(KeyError, match="tapped are hidden, loss, n"):
        step.taps["los"]


def test_a_name_that_changes_between_traces_is_refused() -> None:
    names = iter("abcdefgh")
    step = fcg.graph_step(lambda state, x: (fcg.tap(next(names), x), (state, {}))[1])
    with pytest.raises(fcg.BakedValueError, match=r"tap\('a', 1\)   then tap\('b', 1\)"):
        step(start(), data(0))
