"""The CUDA kernels of ``fcg::cross_entropy_``, ``fcg::read_rows`` and ``fcg::write_rows_``.

One program per row. The first pass finds the maximum and the sum of exponentials block by block, rescaling
the sum once per block; the second reads the row again, backwards and, in the same kernel, mostly from the cache, and
overwrites it with the gradient. Both make of each logit what the step makes of it, in registers.
Source of the first pass: Milakov & Gimelshein 2018, "Online normalizer calculation for softmax".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import triton
import triton.language as tl

__all__ = ["cross_entropy_cuda", "read_rows_cuda", "write_rows_cuda"]

_BLOCK, _BLOCK_OF_CHAIN = 8192, 2048  # what a chain makes of a logit takes registers
_MOST_WARPS = 8
_DTYPES: Mapping[str, tl.dtype] = MappingProxyType(
    {"bfloat16": tl.bfloat16, "float16": tl.float16, "float32": tl.float32}
)


@triton.jit
def _exp(x):
    """Return e**x, within 2 units in the last place; 0 where it is no normal number."""
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * 1.4426950408889634], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _tanh(x):
    """Return tanh, within 9 units in the last place: near 0 by its Taylor series, without a branch."""
    square = x * x
    series = -0.33333333 + square * (0.13333333 + square * (-0.053968254 + square * 0.021869488))
    inverse = tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [_exp(2 * x) + 1], dtype=tl.float32, is_pure=True, pack=1
    )
    return tl.where(tl.abs(x) < 0.25, x + x * square * series, 1 - 2 * inverse)


@triton.jit
def _rounded(x, DTYPE: tl.constexpr):
    """Round to a dtype; bf16 two at a time, as the compiler does only for neighbours in a register."""
    if DTYPE == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "{.reg .b32 pair; cvt.rn.bf16x2.f32 pair, $3, $2; shl.b32 $0, pair, 16; and.b32 $1, pair, 0xffff0000;}",
            "=r,=r,r,r", [x], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return x.to(DTYPE).to(tl.float32)


@triton.jit
def _through(x, NUMBERS: tl.constexpr, DTYPES: tl.constexpr, COUNT: tl.constexpr):
    """Return what the first calls of a chain make of logits."""
    for i in tl.static_range(COUNT):
        if NUMBERS[i] is None:
            x = _tanh(x)
        else:
            x = x * NUMBERS[i]
        x = _rounded(x, DTYPES[i])
    return x


@triton.jit
def _back_through(slope, x, NUMBERS: tl.constexpr, DTYPES: tl.constexpr, COUNT: tl.constexpr):
    """Return the gradient of logits, given that of what a chain makes of them."""
    for j in tl.static_range(COUNT):
        slope = _rounded(slope, DTYPES[COUNT - 1 - j])
        if NUMBERS[COUNT - 1 - j] is None:
            made = _through(x, NUMBERS, DTYPES, COUNT - j)
            slope = slope * (1 - made * made)
        else:
            slope = slope * NUMBERS[COUNT - 1 - j]
    return slope


@triton.jit
def _read_row(
    first, right, numbers, count, classes,
    SUMS: tl.constexpr, BLOCK: tl.constexpr, NUMBERS: tl.constexpr, DTYPES: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Store a row's numbers, ``count`` apart, and return the first two."""
    tl.device_assert((right >= 0) & (right < classes), "a target is no class")
    block = tl.arange(0, BLOCK)
    top = -float("inf")
    sums = tl.zeros((BLOCK,), tl.float32)
    apart = tl.zeros((BLOCK,), tl.float32)
    # Log-probabilities are added up as differences from the first: many logits have much in common.
    one = _through(tl.load(first).to(tl.float32), NUMBERS, DTYPES, COUNT)
    one = tl.where(tl.abs(one) < float("inf"), one, 0.0)
    for start in range(0, classes, BLOCK):
        inside = start + block < classes
        x = tl.load(first + start + block, mask=inside, other=-float("inf"), eviction_policy="evict_last")
        x = _through(x.to(tl.float32), NUMBERS, DTYPES, COUNT)
        if COUNT > 0:
            x = tl.where(inside, x, -float("inf"))
        new = tl.maximum(top, tl.max(x, 0))
        finite = tl.where(new == -float("inf"), 0.0, new)
        sums = sums * _exp(top - finite) + _exp(x - finite)
        if SUMS:
            apart += tl.where(inside, x - one, 0.0)
        top = new
    total = tl.log(tl.sum(sums, 0))
    found = _through(tl.load(first + right).to(tl.float32), NUMBERS, DTYPES, COUNT) - top - total
    tl.store(numbers, top)
    tl.store(numbers + count, total)
    tl.store(numbers + 2 * count, found)
    if SUMS:
        tl.store(numbers + 3 * count, tl.sum(apart, 0) + classes * (one - top - total))
    else:
        tl.store(numbers + 3 * count, 0.0)
    return top, total


@triton.jit
def _write_row(
    first, right, top, total, factors, count, classes, stride,
    BLOCK: tl.constexpr, NUMBERS: tl.constexpr, DTYPES: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Overwrite a row's logits with ``a`` times their softmax, plus ``b`` at ``right``, plus ``c``."""
    a, b, c = tl.load(factors), tl.load(factors + count), tl.load(factors + 2 * count)
    right = right.to(tl.int32)
    block = tl.arange(0, BLOCK)
    last = (stride - 1) // BLOCK
    for back in range(last + 1):
        index = (last - back) * BLOCK + block
        x = tl.load(first + index, mask=index < classes, eviction_policy="evict_first").to(tl.float32)
        made = _through(x, NUMBERS, DTYPES, COUNT)
        slope = _exp(made - top - total) * a + tl.where(index == right, b + c, c)
        slope = _back_through(slope, x, NUMBERS, DTYPES, COUNT)
        slope = tl.where(index < classes, slope, 0.0)
        tl.store(first + index, slope.to(first.dtype.element_ty), mask=index < stride)


@triton.jit
def _kernel(
    rows, target, factors, numbers, count, classes, stride, READS: tl.constexpr, WRITES: tl.constexpr,
    SUMS: tl.constexpr, BLOCK: tl.constexpr, NUMBERS: tl.constexpr, DTYPES: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    right, first = tl.load(target + row), rows + row * stride
    numbers += row
    if READS:
        top, total = _read_row(first, right, numbers, count, classes, SUMS, BLOCK, NUMBERS, DTYPES, COUNT)
        tl.debug_barrier()  # all threads have read the target's logit before one overwrites it
    else:
        top, total = tl.load(numbers), tl.load(numbers + count)
    if WRITES:
        _write_row(
            first, right, top, total, factors + row, count, classes, stride, BLOCK, NUMBERS, DTYPES, COUNT
        )


def read_rows_cuda(
    rows: torch.Tensor,
    target: torch.Tensor,
    sums: bool,  # noqa: FBT001
    classes: int,
    *chain: Sequence[Any],
) -> torch.Tensor:
    """Return numbers of rows; see :func:`cross_entropy_cuda`."""
    numbers = torch.empty(4, len(rows), dtype=torch.float32, device=rows.device)
    _launch(rows, target, None, numbers, classes, chain, reads=True, writes=False, sums=sums)
    return numbers


def write_rows_cuda(
    rows: torch.Tensor,
    target: torch.Tensor,
    numbers: torch.Tensor,
    factors: torch.Tensor,
    classes: int,
    *chain: Sequence[Any],
) -> None:
    """Overwrite rows with the gradient; see :func:`cross_entropy_cuda`."""
    _launch(rows, target, factors, numbers, classes, chain, reads=False, writes=True, sums=False)


def cross_entropy_cuda(
    rows: torch.Tensor,
    target: torch.Tensor,
    factors: torch.Tensor,
    sums: bool,  # noqa: FBT001
    classes: int,
    *chain: Sequence[Any],
) -> torch.Tensor:
    """Launch the kernel without a sync; the grid depends only on shapes.

    Args:
      rows: f[n, classes + padding], contiguous, bf16, f16 or f32; overwritten with the gradient, padding with zeros.
      target: i64[n], a class of each row.
      factors: f32[3, n], of the softmax, of the target, and of all classes.
      sums: Whether the sum of the log-probabilities is asked for.
      classes: How many elements of a row are logits.
      chain: What the step makes of logits before their loss: the names of calls (``"cast"``, ``"mul"``, ``"div"`` or
        ``"tanh"``), the other operands, the dtypes of the results.
    Returns:
      f32[4, n], of each row the maximum, the logarithm of the sum of exponentials of what that is subtracted from, the
      log-probability of the target, and the sum of all, or 0.
    """
    numbers = torch.empty(4, len(rows), dtype=torch.float32, device=rows.device)
    _launch(rows, target, factors, numbers, classes, chain, reads=True, writes=True, sums=sums)
    return numbers


def _launch(
    rows: torch.Tensor,
    target: torch.Tensor,
    factors: torch.Tensor | None,
    numbers: torch.Tensor,
    classes: int,
    chain: Sequence[Any],
    *,
    reads: bool,
    writes: bool,
    sums: bool,
) -> None:
    # In registers, logits are fp32: a cast to it changes nothing.
    links = [link for link in zip(*chain, strict=True) if link[::2] != ("cast", "float32")]
    block = min(_BLOCK_OF_CHAIN if links else _BLOCK, triton.next_power_of_2(classes))
    count, stride = rows.shape
    factors = numbers if factors is None else factors.contiguous()
    with torch.cuda.device(rows.device):
        _kernel[(count,)](
            rows, target.contiguous(), factors, numbers.contiguous(), count, classes, stride,
            READS=reads, WRITES=writes, SUMS=sums, BLOCK=block,
            NUMBERS=tuple(_factor(call, number) for call, number, _ in links),
            DTYPES=tuple(_DTYPES[dtype] for *_, dtype in links), COUNT=len(links),
            num_warps=max(1, min(_MOST_WARPS, block // (512 if links else 1024))),
            debug=True,  # keeps the assertion
            sanitize_overflow=False,  # which would add others
        )  # fmt: skip


def _factor(call: str, number: float) -> float | None:
    """Return the number by which a call multiplies; None for ``tanh``. On a GPU torch divides by a number so, too."""
    if call == "tanh":
        return None
    known = torch.tensor(number, dtype=torch.float32, device="cpu")
    return (1 / known if call == "div" else known).item()
