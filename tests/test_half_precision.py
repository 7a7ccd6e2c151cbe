"""A compiled step rounds where the step does: what a cast or a sum in half precision loses is there."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import functional_cg as fcg
from functional_cg.stages.fx_passes.rounding import ROUNDED, keep_roundings
from tests.compiled_graphs import compiled, compiled_in_turn, compiled_once
from tests.shares import THOROUGH
from tests.test_core_graph import cored

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

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


def scaled_by_hand(state: Any, x: Tensor) -> Any:
    """The same with each rounding written out: a kernel for hosts without AVX2 rounds the product, too."""
    half, by = x.bfloat16().float(), 11 / 64
    high, low = state["high"].float() - by * half, state["low"].float() + by * half
    return {"a": high.bfloat16().float() - high, "high": high.bfloat16(), "low": low.bfloat16()}, {}


def multiplied(state: Any, x: Tensor) -> Any:
    """A difference from a product: one operation of a GPU does both, and does not round the product."""
    half = x.bfloat16()
    return {**state, "a": (state["high"] - 3 * half).float(), "low": half * half + state["low"] / 2}, {}


def filled(state: Any, x: Tensor) -> Any:
    """A number in half precision that fills a value: one of more bits is not what it is multiplied by."""
    tenth = torch.full((64,), 0.1, dtype=BF16, device=x.device)
    return {**state, "a": x * tenth}, {}


def chosen(state: Any, x: Tensor) -> Any:
    """Formulas that end in a choice between what they have computed; an overflow is one of the values."""
    functional, half = torch.nn.functional, x.bfloat16()
    rest, over = half % 0.7, functional.prelu((x * 300).half(), torch.tensor([300.0], device=x.device).half())
    shrunk, by = functional.softshrink(half, 0.3), torch.tensor(1.001)
    lost = sum((one.float() - one.float().to(one.dtype).float()).abs() for one in (rest, shrunk, half % by))
    return {**state, "a": lost + shrunk}, {
        "over": over.float(),
        "rest": [rest, half % by, half.fmod(by), half % half],
    }


@pytest.mark.kernels
@compiled_in_turn(
    "step",
    [
        (step,)
        for step in (
            fed_back, promoted, compensated, split, activated, summed, scaled, multiplied, filled, chosen,
        )
    ],
)  # fmt: skip
def test_what_a_rounding_loses_is_there(compiled_on: str, step: Step) -> None:
    start = {"a": torch.zeros(64), "high": torch.ones(64, dtype=BF16), "low": torch.zeros(64, dtype=BF16)}
    state = eager = fcg.tree.map(lambda leaf: leaf.to(compiled_on), start)
    train_step, lost = fcg.graph_step(step, lowering="inductor"), 0.0
    state, judge = fcg.place(state), scaled_by_hand if step is scaled else step
    for call in range(6):
        x = torch.randn(64, generator=torch.Generator().manual_seed(call)).to(compiled_on)
        (state, metrics), (eager, expected) = train_step(state, x), judge(eager, x)
        fcg.testing.assert_trees_all_equal(metrics, expected)
        fcg.testing.assert_trees_all_equal(fcg.snapshot(state), eager)
        lost += float((eager["a"] if step not in (compensated, split) else eager["low"]).abs().sum())
    assert lost > 0


def half_program(seed: int, half: torch.dtype, calls: int = 40) -> Step:
    """Random calls by element on values in half and in single precision; a third of them leaves the step.

    Products are of two values in half precision. They are exact in float32, and what reads one reads it rounded.
    """
    chance, ops = random.Random(seed), []
    for _ in range(calls):
        kind = chance.choice(("add", "sub", "mul", "wide mul", "cast", "cast", "where", "neg"))
        ops.append((kind, chance.randrange(10**6), chance.randrange(10**6), chance.choice((half, half, F32))))
    # What is stored as well is rounded; the others are only computed where they are read.
    seen = chance.sample(range(5 + calls), (5 + calls) // 3)

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
                made = a.clamp(-4, 4) * b.clamp(-4, 4)
            elif kind == "wide mul" and a.dtype == b.dtype != F32:
                made = (a.clamp(-4, 4).float() * b.clamp(-4, 4).float()).to(half)
            else:
                made = (a - b if kind == "sub" else a + b).clamp(-4, 4)
            values.append(made)
        new = {"a": values[-1].float(), "high": values[-2].to(half), "low": values[-3].to(half)}
        return new, {i: values[i] for i in seen}

    return step


@pytest.mark.kernels
@pytest.mark.parametrize("seed", range(20 if THOROUGH else 2))
@compiled_once
def test_random_calls_in_half_precision_have_the_bits_of_eager(compiled_on: str, seed: int) -> None:
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


def compared(x: Tensor, number: Tensor) -> Any:
    """Comparisons with numbers that half precision does not hold, and with a tensor without dimensions."""
    near = torch.stack([x, x.new_full((64,), 3.14), x.new_full((64,), 0.1)]).to(BF16)
    return (near == 3.14, near > 0.1, near.le(0.3), near < number, number == near)


def promoted_by_dimensions(x: Tensor, number: Tensor) -> Any:
    """What has no dimensions is cast to the dtype of what has some."""
    half = x.to(BF16)
    return (half + number, half - number, number / half, half * number, torch.where(x > 0, half, number))


def in_decimals(x: Tensor, _: Tensor) -> Any:
    half = (x * 4).to(BF16)
    rounded = [torch.round(value, decimals=d) for value in (half, x * 4) for d in (1, 2, -1)]
    return (*rounded, half.round())


def with_numbers(x: Tensor, _: Tensor) -> Any:
    """Numbers that half precision does not hold: some kernels round them, and others compute with them as they are."""
    out: list[Tensor] = []
    for half in ((x * 300).to(BF16), (x * 300).to(F16)):
        for number in (0.1, 257, 4097):
            out += [half + number, half - number, number - half, half * number, half % number, half >= number]
            out += [torch.fmod(half, number), half.clamp(max=number)]
            out += [torch.nn.functional.softshrink(half, number), half.clone().sub_(number), half // number]
        # Whose multiples are exact: some kernels round them before they add.
        whole = (x * 4).round().clamp(-7, 7).to(half.dtype)
        out += [torch.add(whole, whole, alpha=number) for number in (257, 4097)]
    return out


def embedded(x: Tensor, _: Tensor) -> Any:
    """Thousands of equal terms for a row: their sum stops growing where each of them is rounded."""
    index, ones = ((x * 10).long() % 2).repeat(70), torch.ones(70 * 64, 3, device=x.device)
    backward = torch.ops.aten.embedding_dense_backward
    return [backward(ones.to(half), index, 4, 1, False) for half in (BF16, F16)]


def with_integers(x: Tensor, _: Tensor) -> Any:
    """Integers become halves before a call computes with them."""
    whole = (x * 1000).long() + 2000
    halves = (x.to(BF16), x.to(F16))
    return [out for half in halves for out in (whole * half, whole + half, half - whole, half / whole)]


def by_powers(x: Tensor, _: Tensor) -> Any:
    """``ldexp`` of mixed dtypes, and a loss whose dtype is that of the prediction alone."""
    half, whole = x.to(F16), (x * 4).long()
    pairs = ((x > 0, half), (whole, half), (half, x), (half, whole), (x, half), (x.to(BF16), whole))
    loss = torch.nn.functional.huber_loss(half, x * 2, reduction="none", delta=0.5)
    return (*(torch.ldexp(*pair) for pair in pairs), loss, loss.float() + 1)


def of_differences(x: Tensor, number: Tensor) -> Any:
    """Losses whose differences, or squares of them, overflow to infinity in half precision; and of mixed dtypes."""
    functional = torch.nn.functional
    losses = (
        functional.mse_loss,
        functional.smooth_l1_loss,
        functional.huber_loss,
        partial(functional.smooth_l1_loss, beta=0.3),
        partial(functional.huber_loss, delta=0.3),
    )
    of_both = [(x.to(half), number.to(half) - 3 * x.to(half)) for half in (BF16, F16)]
    of_both.append(((x * 30_000).to(F16), (number - x * 30_000).to(F16)))
    alone = [loss(*pair, reduction="none") for loss in losses for pair in of_both]
    mean = functional.mse_loss(
        (x * 100).to(F16), (number - x * 100).to(F16)
    )  # of squares, some of them infinite
    return [*alone, mean, *(loss(x.to(F16), x * 2, reduction="none") for loss in losses[:2])]


@pytest.mark.kernels
@compiled_in_turn(
    "fn",
    [
        (fn,)
        for fn in (
            compared, promoted_by_dimensions, in_decimals, with_integers,
            with_numbers, by_powers, embedded, of_differences,
        )
    ],
)  # fmt: skip
def test_numbers_and_dtypes_are_those_of_torchs_kernels(
    compiled_on: str, fn: Callable[[Tensor, Tensor], Any]
) -> None:
    step = fcg.graph_step(lambda s, *x: ({"n": s["n"] + 1}, fn(*x)), lowering="inductor")
    state = fcg.place({"n": torch.zeros((), device=compiled_on)})
    for call in range(16):
        x = torch.randn(64, generator=torch.Generator().manual_seed(call)).to(compiled_on)
        number = x[0].double() * 0.1
        state, metrics = step(state, x, number)
        for mine, theirs in zip(metrics, fn(x, number), strict=True):
            assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
            if mine.dtype == F32:  # powers differ in the last bit
                torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=0.0)
            else:
                assert torch.equal(mine, theirs)


@pytest.mark.kernels
def test_a_loss_on_a_gpu_reads_its_target_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler keeps the cast, although the loss is computed in single precision."""
    monkeypatch.setattr("functional_cg.stages.passes.formulas._on_gpu", lambda x: True)
    x = torch.randn(64, generator=torch.Generator().manual_seed(0))
    found = fcg.graph_fn(lambda *pair: torch.ops.aten.huber_loss(*pair, 0, 0.5), lowering="inductor")
    half, target = x.half(), x * 2
    whole = torch.ops.aten.huber_loss(half.float(), target.half().float(), 0, 0.5)
    assert torch.equal(found(half, target), whole.half())
    assert not torch.equal(whole.half(), torch.ops.aten.huber_loss(half, target, 0, 0.5))


@pytest.mark.parametrize("clip", [False, True])
@compiled
def test_a_loss_scale_sees_what_overflows(compiled_on: str, clip: bool) -> None:
    """Against ``torch.amp.GradScaler``: what is cast to half precision and back overflows as it does in eager."""
    adam = fcg.optim.adam(0.01)
    state: Any = ScaledState.create(
        params={"w": torch.ones(4, device=compiled_on)},
        optimizer=fcg.optim.chain(fcg.optim.clip_by_global_norm(0.5), adam) if clip else adam,
        scale=fcg.LossScale.create(2.0**12, growth_interval=3),
    )
    weight = torch.nn.Parameter(torch.ones(4))
    scaler, adam_of_torch = (
        torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3),
        torch.optim.Adam([weight], 0.01),
    )

    @fcg.graph_step(lowering="inductor")
    def step(state: Any, x: Tensor) -> Any:
        def loss(params: Any) -> Tensor:
            return state.scale.scaled((x.half() * params["w"].half()).float().sum())

        grads = state.scale.unscaled(fcg.grad(loss)(state.params))
        finite = fcg.optim.global_norm(grads).isfinite()
        new = fcg.cond(finite, lambda: state.apply_gradients(grads), lambda: state)
        return new.replace(scale=state.scale.adjusted(finite)), {"skipped": ~finite}

    for call in range(16):
        x = torch.randn(4, generator=torch.Generator().manual_seed(call))
        x[1] = {1: 70000.0, 2: 70000.0, 7: float("nan")}.get(call, x[1])
        state, metrics = step(state, x.to(compiled_on))
        adam_of_torch.zero_grad()
        scaler.scale((x.half() * weight.half()).float().sum()).backward()
        scaler.unscale_(adam_of_torch)
        finite = bool(weight.grad.isfinite().all())
        if clip and finite:
            weight.grad.mul_(min(1.0, 0.5 / float(weight.grad.norm())))
        scaler.step(adam_of_torch)
        scaler.update()
        assert (bool(metrics["skipped"]), float(state.scale.scale)) == (not finite, scaler.get_scale())
        torch.testing.assert_close(
            fcg.snapshot(state).params["w"].cpu(), weight.detach(), rtol=1e-5, atol=2e-6
        )


class ScaledState(fcg.TrainState):
    scale: fcg.LossScale


def test_only_what_rounds_is_rounded() -> None:
    """A call that returns numbers that it is given costs nothing, nor does one in single precision."""

    def graph(*calls: tuple[Any, ...], dtype: torch.dtype = BF16, to: torch.dtype | None = None) -> int:
        made = fx.Graph()
        x = made.placeholder("x")
        made.output(
            tuple(
                made.call_function(target, (x, *args), {"dtype": to} if to else {}) for target, *args in calls
            )
        )
        core = cored(fx.GraphModule(torch.nn.Module(), made), torch.ones(4, dtype=dtype)).graph
        keep_roundings(core)
        core.eliminate_dead_code()
        return sum(node.target is ROUNDED for node in core.nodes)

    aten = torch.ops.aten
    assert graph((aten.relu.default,), (aten.neg.default,), (aten.clone.default,)) == 0
    assert graph((aten.view.default, [2, 2]), (aten.add.Tensor, 1), dtype=F32) == 0
    assert graph((aten.add.Tensor, 1), (aten.view.default, [2, 2])) == 1
    assert graph((aten.full_like.default, 0.1)) == graph((aten.sum.default,)) == 1
    assert graph((aten._to_copy.default,), dtype=F32, to=BF16) == 1
