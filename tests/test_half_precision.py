"""A compiled step rounds where the step does: what a cast or a sum in half precision loses is there."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._inductor import config
from torch._inductor.lowering import make_pointwise

import functional_cg as fcg
from functional_cg.stages.fx_passes import rounding
from functional_cg.stages.fx_passes.rounding import ROUNDED, keep_roundings
from tests.compiled_graphs import compiled
from tests.test_core_graph import cored

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# Where loops are vectors or in half precision, torch 2.11's C++ backend drops casts, whatever it is told.
OLD_HOST = not hasattr(config, "emulate_precision_casts_on_saved_tensors")

Step = Callable[[Any, Tensor], Any]


def fed_back(state: Any, x: Tensor) -> Any:
    """A sum whose error is added to the next one, as in compressed communication."""
    total = state["a"] + x
    sent = total.bfloat16()
    return {**state, "a": total - sent.float()}, {"sent": sent}


def promoted(state: Any, x: Tensor) -> Any:
    total = state["a"] + x
    return {**state, "a": total - total.half()}, {}


def compensated(state: Any, x: Tensor) -> Any:
    """Kahan's sum, in bfloat16 alone."""
    addend = (x * 0.01).bfloat16() - state["low"]
    total = state["high"] + addend
    return {**state, "high": total, "low": (total - state["high"]) - addend}, {}


def split(state: Any, x: Tensor) -> Any:
    """A master copy in float32 as two halves of it."""
    master = state["high"].float() + state["low"].float() - x * 1e-3
    high = master.bfloat16()
    return {**state, "high": high, "low": (master - high.float()).bfloat16()}, {}


def activated(state: Any, x: Tensor) -> Any:
    hidden = torch.nn.functional.gelu(x.bfloat16() + state["high"])
    return {**state, "a": (hidden * hidden).float() - hidden.float() * hidden.float()}, {"hidden": hidden}


def summed(state: Any, x: Tensor) -> Any:
    """A sum of whole numbers that half precision cannot hold."""
    rows = (x * 100).round().bfloat16().expand(7, 64)
    return {**state, "a": rows.float().sum(0) - rows.sum(0).float()}, {}


def scaled(state: Any, x: Tensor) -> Any:
    """Sums of a multiple, whose products have too many bits: the sum rounds, and the product does not."""
    half, by = x.bfloat16(), 11 / 64
    high, low = torch.add(state["high"], half, alpha=-by), state["low"].clone().add_(half, alpha=by)
    lost = high.float() - (state["high"].float() - by * half.float())
    return {"a": lost, "high": high, "low": low}, {}


def filled(state: Any, x: Tensor) -> Any:
    """A number in half precision that fills a value: one of more bits is not what it is multiplied by."""
    tenth = torch.full((64,), 0.1, dtype=BF16, device=x.device)
    return {**state, "a": x * tenth - x * 0.1}, {}


@pytest.mark.parametrize("step", [fed_back, promoted, compensated, split, activated, summed, scaled, filled])
@compiled
def test_what_a_rounding_loses_is_there(compiled_on: str, step: Step) -> None:
    if OLD_HOST and compiled_on == "cpu":
        pytest.skip("torch 2.11 drops casts on a CPU")
    start = {"a": torch.zeros(64), "high": torch.ones(64, dtype=BF16), "low": torch.zeros(64, dtype=BF16)}
    state = eager = fcg.tree.map(lambda leaf: leaf.to(compiled_on), start)
    train_step, lost = fcg.graph_step(step, lowering="inductor"), 0.0
    state = fcg.place(state)
    for call in range(6):
        x = torch.randn(64, generator=torch.Generator().manual_seed(call)).to(compiled_on)
        (state, metrics), (eager, expected) = train_step(state, x), step(eager, x)
        fcg.testing.assert_trees_all_equal(metrics, expected)
        fcg.testing.assert_trees_all_equal(fcg.snapshot(state), eager)
        lost += float((eager["a"] if step not in (compensated, split) else eager["low"]).abs().sum())
    assert lost > 0


def half_program(seed: int, half: torch.dtype, calls: int = 40) -> Step:
    """Random calls by element on values in half and in single precision; all of them leave the step.

    Products are of two values in half precision: theirs are exact in float32, so it does not matter what they are fused
    with.
    """
    chance, ops = random.Random(seed), []
    for _ in range(calls):
        kind = chance.choice(("add", "sub", "mul", "cast", "cast", "where", "neg"))
        ops.append((kind, chance.randrange(10**6), chance.randrange(10**6), chance.choice((half, half, F32))))

    def step(state: Any, x: Tensor) -> Any:
        values = [state["a"], state["high"], state["low"], x, x.to(half)]
        for kind, i, j, dtype in ops:
            a, b = values[i % len(values)], values[j % len(values)]
            if kind == "cast":
                made = a.to(dtype)
            elif kind == "where":
                made = torch.where(a > b, a, -a)
            elif kind == "neg":
                made = -a
            elif kind == "mul" and a.dtype == b.dtype != F32:
                made = (a * b).clamp(-4, 4)
            else:
                made = (a - b if kind == "sub" else a + b).clamp(-4, 4)
            values.append(made)
        new = {"a": values[-1].float(), "high": values[-2].to(half), "low": values[-3].to(half)}
        return new, dict(enumerate(values))

    return step


@pytest.mark.parametrize("seed", range(4))
@compiled
def test_random_calls_in_half_precision_have_the_bits_of_eager(compiled_on: str, seed: int) -> None:
    if OLD_HOST and compiled_on == "cpu":
        pytest.skip("torch 2.11 drops casts on a CPU")
    half = (BF16, F16)[seed % 2]
    step, start = (
        half_program(seed, half),
        {"a": torch.zeros(64), "high": torch.ones(64), "low": torch.ones(64)},
    )
    eager = {name: leaf.to(compiled_on, F32 if name == "a" else half) for name, leaf in start.items()}
    train_step, state = fcg.graph_step(step, lowering="inductor"), fcg.place(eager)
    for call in range(6):
        x = torch.randn(64, generator=torch.Generator().manual_seed(call)).to(compiled_on)
        (state, metrics), (eager, expected) = train_step(state, x), step(eager, x)
        fcg.testing.assert_trees_all_equal(metrics, expected)
        fcg.testing.assert_trees_all_equal(fcg.snapshot(state), eager)


def test_only_what_rounds_is_marked() -> None:
    """A call that returns numbers that it is given costs nothing, nor does one in single precision."""

    def graph(*calls: tuple[Any, ...], dtype: torch.dtype = BF16) -> tuple[int, int]:
        made = fx.Graph()
        x = made.placeholder("x")
        made.output(tuple(made.call_function(target, (x, *args)) for target, *args in calls))
        core = cored(fx.GraphModule(torch.nn.Module(), made), torch.ones(4, dtype=dtype)).graph
        keep_roundings(core)
        marked = sum(bool(node.meta.get("low_precision_pointwise_barrier")) for node in core.nodes)
        return marked, sum(node.target is ROUNDED for node in core.nodes)

    aten = torch.ops.aten
    assert graph((aten.relu.default,), (aten.neg.default,), (aten.clone.default,)) == (0, 0)
    assert graph((aten.add.Tensor, 1), dtype=F32) == (0, 0)
    assert graph((aten.add.Tensor, 1)) == (1, 0)
    assert graph((aten.full_like.default, 0.1)) == (0, 1)
    assert graph((aten.sum.default,)) == graph((aten.gelu.default,)) == (0, 1)


def test_torch_rounds_where_it_is_told() -> None:
    """Its compiler reads the mark: on a CPU, which keeps all roundings, no result would tell."""
    assert rounding._ROUNDS in inspect.getsource(make_pointwise)
