"""H113 to H126: precision, averages, accumulation and curricula are values of the state and of the inputs."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import functional_cg as fcg
from functional_cg.testing import assert_trees_all_close, assert_trees_all_equal
from tests.hazards.law import CPU, Place, assert_law, everywhere
from tests.shares import CALLS, few


def loss_of(p: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ p["w"] + p["b"]).square().mean()


def params(place: Place) -> dict[str, Tensor]:
    return {"w": place.randn(4, 2, seed=0), "b": place.randn(2, seed=1)}


def batches(place: Place, calls: int = CALLS, rows: int = 8) -> list[Tensor]:
    return [place.randn(rows, 4, seed=n + 2) for n in range(calls)]


# -- precision --------------------------------------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("cache", [True, False])
def test_h113_autocast_casts_the_weights_of_this_call(place: Place, cache: bool) -> None:
    """A cast that is cached would be that of the first call."""

    def step_fn(p: Any, x: Tensor) -> Any:
        def loss(p: Any) -> tuple[Tensor, Tensor]:
            with torch.autocast(place.device, torch.bfloat16, cache_enabled=cache):
                out = torch.tanh(x @ p["w"]) @ p["w"].T  # the weight is used twice
            return out.float().square().mean(), x.bfloat16() @ p["w"].bfloat16()

        (value, cast), grads = fcg.value_and_grad(loss, has_aux=True)(p)
        new = fcg.tree.map(lambda leaf, g: leaf - 0.5 * g, p, grads)
        return new, {"value": value, "cast": cast, "w": p["w"]}

    _, _, kept = assert_law(place, step_fn, params(place), batches(place), rtol=1e-2)  # of 16 bits
    for metrics, x in zip(kept, batches(place), strict=True):
        assert_trees_all_equal(metrics["cast"], x.bfloat16() @ metrics["w"].bfloat16())
    assert len({float(metrics["value"]) for metrics in kept}) == CALLS


@everywhere
@few
@given(overflows=st.sets(st.integers(0, CALLS - 1), max_size=6))
def test_h114_a_loss_scale_is_a_leaf(place: Place, overflows: set[int]) -> None:
    """It halves and skips at an overflow, doubles after three good calls; Python counts along."""

    def step_fn(s: Any, x: Tensor) -> Any:
        loss, grad = fcg.value_and_grad(lambda w: (x @ w.half()).float().square().mean() * s["scale"])(s["w"])
        grad = grad / s["scale"]
        good = torch.isfinite(grad).all()
        grown = torch.where(good, s["grown"] + 1, 0)
        scale = torch.where(good, torch.where(grown == 3, s["scale"] * 2, s["scale"]), s["scale"] * 0.5)
        new = {"w": torch.where(good, s["w"] - 0.01 * grad, s["w"]), "scale": scale, "grown": grown % 3}
        return new, {"scale": scale, "found_inf": ~good, "loss": loss}

    start = {
        "w": place.randn(4, 2, seed=0),
        "scale": torch.tensor(8.0, device=place.device),
        "grown": torch.zeros((), dtype=torch.int64, device=place.device),
    }
    halves = [x.half() * (math.inf if n in overflows else 1) for n, x in enumerate(batches(place))]
    _, _, kept = assert_law(place, step_fn, start, halves)
    scale, grown = 8.0, 0
    for n, metrics in enumerate(kept):
        grown = 0 if n in overflows else grown + 1
        scale = scale / 2 if n in overflows else scale * 2 if grown == 3 else scale
        grown %= 3
        assert (float(metrics["scale"]), bool(metrics["found_inf"])) == (scale, n in overflows), f"call {n}"


@everywhere
def test_h115_a_delayed_scale_follows_its_history(place: Place) -> None:
    """Emulated float8: amax history and scale are leaves, updated once a call."""

    def step_fn(s: Any, x: Tensor) -> Any:
        quantised = (x / s["scale"]).to(torch.float8_e4m3fn).to(torch.float32) * s["scale"]
        history = torch.cat([s["history"][1:], x.abs().amax()[None]])
        out = quantised @ s["w"]
        return {"w": s["w"] * 0.9, "history": history, "scale": history.amax() / 448}, {
            "out": out,
            "scale": s["scale"],
        }

    start = {
        "w": place.randn(4, 2, seed=0),
        "history": torch.ones(4, device=place.device),
        "scale": torch.tensor(1 / 448, device=place.device),
    }
    inputs = [x * (1 + n % 5) for n, x in enumerate(batches(place))]
    peaks = [1.0] * 4 + [float(x.abs().max()) for x in inputs]
    _, _, kept = assert_law(place, step_fn, start, inputs)
    for n, metrics in enumerate(kept):
        torch.testing.assert_close(float(metrics["scale"]), max(peaks[n : n + 4]) / 448, rtol=1e-6, atol=0.0)


@everywhere
def test_h116_low_precision_copies_are_those_of_the_masters(place: Place) -> None:
    """Masters in float32, computed with in bfloat16: the copy is made anew from the master of the call."""

    def step_fn(masters: Any, x: Tensor) -> Any:
        def loss(p: Any) -> Tensor:
            low = fcg.tree.map(Tensor.bfloat16, p)
            return loss_of(low, x.bfloat16()).float()

        grads = fcg.grad(loss)(masters)
        new = fcg.tree.map(lambda p, g: p - 0.5 * g, masters, grads)
        return new, {"low": fcg.tree.map(Tensor.bfloat16, masters), "dtype": grads}

    _, state, kept = assert_law(place, step_fn, params(place), batches(place), rtol=2**-5)
    assert {leaf.dtype for leaf in fcg.tree.leaves(fcg.snapshot(state))} == {torch.float32}
    assert_trees_all_equal(kept[0]["low"], fcg.tree.map(Tensor.bfloat16, params(place)))
    assert not any(torch.equal(a["low"]["w"], b["low"]["w"]) for a, b in itertools.pairwise(kept))


# -- what training does -----------------------------------------------------------------------------------------------


@everywhere
def test_h118_an_average_in_the_state_is_the_one_computed_outside(place: Place) -> None:
    def step_fn(state: Any, x: Tensor) -> Any:
        grads = fcg.grad(loss_of)(state["p"], x)
        p = fcg.tree.map(lambda leaf, g: leaf - 0.5 * g, state["p"], grads)
        ema = fcg.tree.map(lambda average, leaf: average.lerp(leaf, 0.1), state["ema"], p)
        return {"p": p, "ema": ema}, {}

    start = {"p": params(place), "ema": params(place)}
    _, after, _ = assert_law(place, step_fn, start, batches(place))
    step = place.step(lambda p, x: (step_fn({"p": p, "ema": p}, x)[0]["p"], {}))
    outside, average = fcg.place(params(place)), params(place)
    for x in batches(place):
        outside, _ = step(outside, x)
        average = fcg.tree.map(lambda a, leaf: a.lerp(leaf, 0.1), average, fcg.snapshot(outside))
    place.assert_same(after["ema"], average, "average")
    place.assert_same(after["p"], outside, "parameters")


@everywhere
def test_h120_accumulation_inside_and_across_calls_are_one_sum(place: Place) -> None:
    """Four micro-batches in one call, or one a call with an accumulator: the same bits, in the same order."""

    def zeros() -> Any:
        return fcg.tree.map(torch.zeros_like, params(place))

    def inside(p: Any, x: Tensor) -> Any:
        total = fcg.tree.map(torch.zeros_like, p)
        for part in x.chunk(4):
            total = fcg.tree.map(torch.add, total, fcg.grad(loss_of)(p, part))
        return fcg.tree.map(lambda leaf, g: leaf - 0.125 * g, p, total), {}

    def across(state: Any, x: Tensor) -> Any:
        return {**state, "sum": fcg.tree.map(torch.add, state["sum"], fcg.grad(loss_of)(state["p"], x))}, {}

    def apply(state: Any) -> Any:
        p = fcg.tree.map(lambda leaf, g: leaf - 0.125 * g, state["p"], state["sum"])
        return {"p": p, "sum": fcg.tree.map(torch.zeros_like, state["sum"])}, {}

    _, together, _ = assert_law(place, inside, params(place), batches(place))
    add, update = place.step(across), place.step(apply)
    state: Any = fcg.place({"p": params(place), "sum": zeros()})
    for x in batches(place):
        for part in x.chunk(4):
            state, _ = add(state, part)
        state, _ = update(state)
    place.assert_same(state["p"], together, "parameters")
    place.assert_same(state["sum"], zeros(), "accumulator")
    # torch's own accumulation, in plain Python, is the judge
    leaves = {name: leaf.requires_grad_() for name, leaf in params(place).items()}
    for x in batches(place):
        for part in x.chunk(4):
            loss_of(leaves, part).backward()
        with torch.no_grad():
            for leaf in leaves.values():
                leaf -= 0.125 * leaf.grad  # type: ignore[operator]
                leaf.grad = None
    assert_trees_all_close(state["p"], {name: leaf.detach() for name, leaf in leaves.items()})


@everywhere
def test_h122_evaluation_borrows_the_state(place: Place) -> None:
    """Before, after and between the calls; training goes on as if there had been none."""
    evaluate = fcg.graph_fn(
        lambda p, x: {"loss": loss_of(p, x), "w": p["w"]}, backend=place.backend(), lowering="aten"
    )
    step = place.step(lambda p, x: (fcg.tree.map(lambda leaf: leaf * 0.9 + x.mean(), p), {}))
    state, alone = fcg.place(params(place)), fcg.place(params(place))
    kept = []
    for x in batches(place):
        generation, before = state.generation, fcg.snapshot(state)
        kept.append((evaluate(state, x), {"loss": loss_of(before, x), "w": before["w"]}))
        assert state.generation == generation
        state, _ = step(state, x)
        alone, _ = step(alone, x)
        place.assert_same(state, alone, "training")
    for got, expected in kept:
        place.assert_same(got, expected, "evaluation")
    assert evaluate.stats.captures == 1


def test_h125_a_curriculum_is_a_static_argument() -> None:
    """A flag that Python flips at call 3 is loud; named in ``static_argnames``, each value has its graph."""
    smooth = False

    def by_flag(p: Any, x: Tensor) -> Any:
        loss = loss_of(p, x)
        return p, {"loss": loss * 2 if smooth else loss}

    def by_argument(p: Any, x: Tensor, smooth: bool = False) -> Any:
        loss = loss_of(p, x)
        return p, {"loss": loss * 2 if smooth else loss}

    flagged, static = CPU.step(by_flag), CPU.step(by_argument, static_argnames=("smooth",))
    state, other, x = fcg.place(params(CPU)), fcg.place(params(CPU)), batches(CPU, 1)[0]
    state, first = flagged(state, x)
    smooth = True
    with pytest.raises(fcg.BakedValueError, match="smooth  traced False   now True"):
        flagged(state, x)
    for call in range(6):
        other, metrics = static(other, x, smooth=call >= 3)
        assert float(metrics["loss"]) == float(first["loss"]) * (2 if call >= 3 else 1)
    assert (static.stats.captures, static.stats.replays) == (2, 6)
