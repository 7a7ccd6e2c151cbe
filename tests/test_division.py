"""Division that rounds down, compiled: the bits of torch's kernels, also where the quotient is large or infinite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._inductor import config
from torch._inductor.cpu_vec_isa import pick_vec_isa

import functional_cg as fcg
from functional_cg.stages.passes.division import divide, remainder
from tests.compiled_graphs import compiled, compiled_in_turn

EDGES = [0.0, 1.0, 3.0, 7.5, 0.1, 0.3, 1e10, 1e-30, 1e38, torch.inf, torch.nan]
VALUES = torch.tensor([*EDGES, *(-edge for edge in EDGES)])
PAIRS = (VALUES.repeat_interleave(len(VALUES)), VALUES.repeat(len(VALUES)))
numbers = st.floats(width=32)


def assert_same_bits(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(one.signbit() & ~one.isnan(), other.signbit() & ~other.isnan())


@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=9))
def test_the_formulas(pairs: list[tuple[float, float]]) -> None:
    a, b = torch.tensor(pairs).T
    assert_same_bits(remainder(a, b), a % b)
    assert_same_bits(divide(a, b), a // b)
    assert_same_bits(remainder(a, pairs[0][1]), a % pairs[0][1])
    assert_same_bits(divide(pairs[0][0], b), pairs[0][0] // b)
    assert_same_bits(remainder(0.1, b.double()), 0.1 % b.double())
    assert_same_bits(divide(1e300, b.double()), 1e300 // b.double())


def divided(a: Tensor, b: Tensor) -> list[Tensor]:
    both = [
        a % b,
        a // b,
        torch.div(a, b, rounding_mode="floor"),
        a % 3,
        7 // b,
        a % torch.inf,
        a.clamp(-9, 9).nan_to_num().int() % 7,
    ]
    return [*both, a.clone().remainder_(b), a.clone().floor_divide_(b), (a % b).double()]


@pytest.mark.kernels
@compiled
def test_compiled(compiled_on: str) -> None:
    a, b = (one.to(compiled_on) for one in PAIRS)
    a = torch.where(a.abs() > 1e9, a, a.round(decimals=1))
    # Without vectors, torch's C++ disagrees with its kernels on which remainders are numbers; a trial refuses that.
    with config.patch({"cpp.simdlen": pick_vec_isa().bit_width()}):
        results = fcg.graph_fn(divided, lowering="inductor")(a, b)
    for one, other in zip(results, divided(a, b), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(one.signbit() & ~one.isnan(), other.signbit() & ~other.isnan())


@pytest.mark.kernels
@compiled_in_turn("dtype", [(torch.float16,), (torch.bfloat16,)])
def test_in_half_precision(compiled_on: str, dtype: torch.dtype) -> None:
    """An ulp decides what a quotient is rounded to: each operation rounds as torch's kernel does."""

    def quotients(a: Tensor, b: Tensor) -> list[Tensor]:
        both = [(a, b), (a, b[0]), (b[:1], a), *((a, number) for number in (0.1, 49, -257, 0.7, 4097))]
        out = [torch.div(*pair, rounding_mode=mode) for pair in both for mode in ("floor", "trunc")]
        return [*out, 5.3 // a, a.clone().floor_divide_(b), a % b, a % 0.3]

    step = fcg.graph_fn(quotients, lowering="inductor")
    for call in range(16):
        draw = torch.Generator().manual_seed(call)
        a, b = (torch.randn(4096, generator=draw) * size for size in (1000, 1))
        a, b = a.to(compiled_on, dtype), b.to(compiled_on, dtype)
        for one, other in zip(step(a, b), quotients(a, b), strict=True):
            assert_same_bits(one, other)


@pytest.mark.kernels
@compiled
def test_a_product_with_nothing_of_what_is_no_number(compiled_on: str) -> None:
    """``0 * nan`` is no number, at a later call, too."""

    def step(state: Any, x: Tensor) -> Any:
        return {"a": state["a"] + x * 0}, (x * 0, 0 * x + 1, (0 * x).sum(), x.int() * 0)

    compiled, state = (
        fcg.graph_step(step, lowering="inductor"),
        fcg.place({"a": torch.ones(3, device=compiled_on)}),
    )
    for value in (1.0, torch.nan, torch.inf):
        x = torch.tensor([1.0, value, 2.0], device=compiled_on)
        twin, expected = compiled.eager(fcg.fork(state), x)
        state, metrics = compiled(state, x)
        for one, other in zip((state["a"], *metrics), (twin["a"], *expected), strict=True):
            torch.testing.assert_close(one.clone(), other.clone(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("lowering", ["aten", "inductor"])
def test_a_result_that_is_written_into_a_tensor(lowering: Any) -> None:
    def written(state: Any, x: Tensor) -> Any:
        out = [torch.empty_like(x) for _ in range(3)]
        torch.remainder(x, 7, out=out[0])
        torch.floor_divide(x, 7, out=out[1])
        torch.div(x, 7, rounding_mode="floor", out=out[2])
        return torch.stack(out) + state["w"]

    call, state = fcg.graph_fn(written, lowering=lowering), fcg.place({"w": torch.ones(1)})
    for number in range(16):
        x = torch.arange(-6.0, 6.0) * number
        expected = (
            torch.stack([x.remainder(7), x.floor_divide(7), torch.div(x, 7, rounding_mode="floor")]) + 1
        )
        assert torch.equal(call(state, x), expected)


@pytest.mark.kernels
@compiled
def test_division_of_what_the_compiler_knows(compiled_on: str) -> None:
    """The bounds of ``arange`` are known to it, and it computes with them: positional encodings are made like this."""

    def known(x: Tensor) -> list[Tensor]:
        places = torch.arange(-6.0, 6.0, device=x.device)
        return [
            x + op(places, by)
            for by in (2, -3.0, 0.5, 0, x.new_full((), 2.0))
            for op in (torch.floor_divide, torch.remainder)
        ]

    step = fcg.graph_fn(known, lowering="inductor")
    for call in range(4):
        x = torch.full((12,), float(call), device=compiled_on)
        for one, other in zip(step(x), known(x), strict=True):
            assert_same_bits(one, other)
