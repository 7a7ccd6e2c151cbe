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
    """Return tanh, within 6 units in the last place: near 0 by its Taylor series, without a branch."""
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
    first, classes, BLOCK: tl.constexpr, NUMBERS: tl.constexpr, DTYPES: tl.constexpr, COUNT: tl.constexpr
):
    """Return maximum, logarithm of the sum of exponentials that it is subtracted from, and sum of a row's logits."""
    block = tl.arange(0, BLOCK)
    top = -float("inf")
    sums = tl.zeros((BLOCK,), tl.float32)
    whole = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, classes, BLOCK):
        inside = start + block < classes
        x = tl.load(first + start + block, mask=inside, other=-float("inf"), eviction_policy="evict_last")
        x = _through(x.to(tl.float32), NUMBERS, DTYPES, COUNT)
        if COUNT > 0:
            x = tl.where(inside, x, -float("inf"))
        new = tl.maximum(top, tl.max(x, 0))
        finite = tl.where(new == -float("inf"), 0.0, new)
        sums = sums * _exp(top - finite) + _exp(x - finite)
        whole += tl.where(inside, x, 0.0)
        top = new
    return top, tl.log(tl.sum(sums, 0)), tl.sum(whole, 0)


@triton.jit
def _write_row(
    first, classes, stride, right, top, total, a, b, c,
    BLOCK: tl.constexpr, NUMBERS: tl.constexpr, DTYPES: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Overwrite a row's logits with the gradient: ``a`` times their softmax, plus ``b`` at ``right``, plus ``c``."""
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


@triton.jit(do_not_specialize=["ignored"])
def _cross_entropy_kernel(
    rows, target, scale, losses, classes, stride, each, ignored,
    BLOCK: tl.constexpr, NUMBERS: tl.constexpr, DTYPES: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    right = tl.load(target + row)
    counts = right != ignored
    right = tl.where(counts, right, 0)
    tl.device_assert((right >= 0) & (right < classes), "a target is no class")
    first = rows + row * stride
    top, total, _ = _read_row(first, classes, BLOCK, NUMBERS, DTYPES, COUNT)
    found = _through(tl.load(first + right).to(tl.float32), NUMBERS, DTYPES, COUNT) - top - total
    tl.store(losses + row, tl.where(counts, -found, 0.0))
    factor = tl.where(counts, tl.load(scale + row * each), 0.0)
    tl.debug_barrier()  # all threads have read the target's logit before one overwrites it
    right = right.to(tl.int32)
    _write_row(first, classes, stride, right, top, total, factor, -factor, 0.0, BLOCK, NUMBERS, DTYPES, COUNT)


@triton.jit
def _read_rows_kernel(
    rows, target, found, count, classes, stride,
    BLOCK: tl.constexpr, NUMBERS: tl.constexpr, DTYPES: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    right = tl.load(target + row)
    tl.device_assert((right >= 0) & (right < classes), "a target is no class")
    first = rows + row * stride
    top, total, whole = _read_row(first, classes, BLOCK, NUMBERS, DTYPES, COUNT)
    tl.store(found + row, top)
    tl.store(found + count + row, total)
    tl.store(found + 2 * count + row, whole)
    picked = _through(tl.load(first + right).to(tl.float32), NUMBERS, DTYPES, COUNT)
    tl.store(found + 3 * count + row, picked)


@triton.jit
def _write_rows_kernel(
    rows, target, found, factors, count, classes, stride,
    BLOCK: tl.constexpr, NUMBERS: tl.constexpr, DTYPES: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    top, total = tl.load(found + row), tl.load(found + count + row)
    a, b, c = tl.load(factors + row), tl.load(factors + count + row), tl.load(factors + 2 * count + row)
    right = tl.load(target + row).to(tl.int32)
    _write_row(
        rows + row * stride, classes, stride, right, top, total, a, b, c, BLOCK, NUMBERS, DTYPES, COUNT
    )


def cross_entropy_cuda(
    rows: torch.Tensor,
    target: torch.Tensor,
    scale: torch.Tensor,
    ignored: int,
    classes: int,
    calls: Sequence[str],
    numbers: Sequence[float],
    dtypes: Sequence[str],
) -> torch.Tensor:
    """Launch the kernel without a sync; the grid depends only on shapes.

    Args:
      rows: f[n, classes + padding], contiguous, bf16, f16 or f32; overwritten with the gradient, padding with zeros.
      target: i64[n].
      scale: f32[] or f32[n], the gradient of a row's loss.
      ignored: Target of rows that have neither loss nor gradient.
      classes: How many elements of a row are logits.
      calls: What the step makes of logits before their loss: ``"cast"``, ``"mul"``, ``"div"`` or ``"tanh"``.
      numbers: The other operands of these calls.
      dtypes: The dtypes of their results.
    Returns:
      f32[n], the loss of each row.
    """
    count, stride = rows.shape
    losses = torch.empty(count, dtype=torch.float32, device=rows.device)
    each = scale.stride(0) if scale.ndim else 0
    with torch.cuda.device(rows.device):
        _cross_entropy_kernel[(count,)](
            rows, target.contiguous(), scale, losses, classes, stride, each, ignored,
            **_options(classes, calls, numbers, dtypes),
        )  # fmt: skip
    return losses


def read_rows_cuda(
    rows: torch.Tensor,
    target: torch.Tensor,
    classes: int,
    calls: Sequence[str],
    numbers: Sequence[float],
    dtypes: Sequence[str],
) -> torch.Tensor:
    """Launch the kernel of ``fcg::read_rows``; arguments and result are described there."""
    count, stride = rows.shape
    found = torch.empty(4, count, dtype=torch.float32, device=rows.device)
    with torch.cuda.device(rows.device):
        _read_rows_kernel[(count,)](
            rows,
            target.contiguous(),
            found,
            count,
            classes,
            stride,
            **_options(classes, calls, numbers, dtypes),
        )
    return found


def write_rows_cuda(
    rows: torch.Tensor,
    target: torch.Tensor,
    found: torch.Tensor,
    factors: torch.Tensor,
    classes: int,
    calls: Sequence[str],
    numbers: Sequence[float],
    dtypes: Sequence[str],
) -> None:
    """Launch the kernel of ``fcg::write_rows_``; the arguments are described there."""
    count, stride = rows.shape
    with torch.cuda.device(rows.device):
        _write_rows_kernel[(count,)](
            rows, target.contiguous(), found.contiguous(), factors.contiguous(), count, classes, stride,
            **_options(classes, calls, numbers, dtypes),
        )  # fmt: skip


def _options(
    classes: int, calls: Sequence[str], numbers: Sequence[float], dtypes: Sequence[str]
) -> dict[str, Any]:
    """Return what a kernel is compiled for."""
    # In registers, logits are fp32: a cast to it changes nothing.
    links = [link for link in zip(calls, numbers, dtypes, strict=True) if link[::2] != ("cast", "float32")]
    block = min(_BLOCK_OF_CHAIN if links else _BLOCK, triton.next_power_of_2(classes))
    return {
        "BLOCK": block,
        "NUMBERS": tuple(_factor(call, number) for call, number, _ in links),
        "DTYPES": tuple(_DTYPES[dtype] for *_, dtype in links),
        "COUNT": len(links),
        "num_warps": max(1, min(_MOST_WARPS, block // (512 if links else 1024))),
        "debug": True,  # keeps the assertion
        "sanitize_overflow": False,  # which would add others
    }


def _factor(call: str, number: float) -> float | None:
    """Return the number by which a call multiplies; None for ``tanh``. On a GPU torch divides by a number so, too."""
    if call == "tanh":
        return None
    known = torch.tensor(number, dtype=torch.float32, device="cpu")
    return (1 / known if call == "div" else known).item()
