"""Stochastic rounding: rounds up or down at random, so that sums of small numbers are right on average."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..random.arguments import check_key
from ..random.words import half_words
from ..shards.tensor import Sharded

__all__ = ["stochastic_round"]

_NARROW = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
# Input dtype -> the integer dtype of its bits.
_INTEGERS = MappingProxyType({torch.float32: torch.int32, torch.float64: torch.int64})
_DRAWN = 16  # random bits per element


def stochastic_round(
    key: Tensor, x: Tensor, dtype: torch.dtype = torch.bfloat16, *, stream: int = 0
) -> Tensor:
    """Round each element at random to one of its two neighbors in ``dtype``, so that its mean is unchanged.

    The mean over keys is ``x``: exactly so from f32 to bf16, otherwise within 2**-14 of the gap between neighbors,
    since each element draws 16 bits. Values representable in ``dtype``, infinities and NaN do not change; a number
    beyond the largest finite one is treated as by ``x.to(dtype)``. Gradients flow as through ``x.to(dtype)``.

    The bits are the same on CPU and CUDA, eager and captured. An element of a shard draws what it would draw in the
    whole leaf, so the result does not depend on the number of ranks.

    Source: Gupta et al. 2015, "Deep Learning with Limited Numerical Precision".

    Args:
      key: i64[2].
      x: f32[...] or f64[...], whole or sharded.
      dtype: ``torch.bfloat16``, ``torch.float16``, ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
      stream: Part of the counter: leaves that share a key use different streams.
    Returns:
      A tensor of ``dtype`` and the shape of ``x``.
    Raises:
      LayoutError: If ``key`` is not an i64[2].
      TypeError: If ``x`` is not f32 or f64, or ``dtype`` is not one of the four.

    Example:
      >>> import torch, functional_cg as fcg
      >>> x = torch.full((10_000,), 1.001)  # bfloat16 has 1 and 1.0078125 there
      >>> rounded = fcg.precision.stochastic_round(fcg.random.key(0), x)
      >>> rounded.unique(), rounded.double().mean()
      (tensor([1.0000, 1.0078], dtype=torch.bfloat16), tensor(1.0010, dtype=torch.float64))
    """
    check_key(key)
    if not isinstance(x, Tensor) or x.dtype not in _INTEGERS:
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(
            f"precision.stochastic_round: expected x of f32 or f64, got {got}. To fix: compute it in f32; what is "
            "narrower has been rounded to the nearest number already."
        )
    if dtype not in _NARROW:
        names = ", ".join(map(str, _NARROW))
        raise TypeError(f"precision.stochastic_round: expected dtype to be one of {names}, got {dtype!r}")
    if not isinstance(x, Sharded):
        return _drawn(key, x, dtype, stream)
    start = x.placement.start if x.placement.sharded else None
    return Sharded(_drawn(key, x.local, dtype, stream, start), x.placement)


def _drawn(key: Tensor, x: Tensor, dtype: torch.dtype, stream: int, start: int | None = None) -> Tensor:
    """Round all elements; for a shard, ``start`` is the index of its first element in the whole leaf."""
    halves = half_words(key, x.numel(), stream, start).view(x.shape)
    out: Tensor = _Rounded.apply(x, halves, dtype)
    return out


class _Rounded(torch.autograd.Function):
    """``f(x, halves, dtype)``, with the derivative of a cast."""

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, halves: Tensor, dtype: torch.dtype) -> tuple[Any, int]:
        """Round the whole batch: torch 2.11 has no rule for a view in another dtype, and all is by element."""
        x, halves = (
            one.expand(info.batch_size, *one.shape) if dim is None else one.movedim(dim, 0)
            for one, dim in zip((x, halves), dims, strict=False)
        )
        return _Rounded.apply(x, halves, dtype), 0

    @staticmethod
    def forward(x: Tensor, halves: Tensor, dtype: torch.dtype) -> Tensor:
        return _rounded(x, halves, dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.to(ctx.dtype), None, None


def _rounded(x: Tensor, halves: Tensor, dtype: torch.dtype) -> Tensor:
    """Add noise below the last bit kept, then truncate: a carry rounds up.

    Works on the bits of ``x`` and never on values in ``dtype``, which compilers may keep in f32.
    """
    wide, narrow = torch.finfo(x.dtype), torch.finfo(dtype)
    integers, cut = _INTEGERS[x.dtype], round(math.log2(narrow.eps / wide.eps))
    noise = halves.to(integers) & (2**_DRAWN - 1)
    if cut > _DRAWN:
        noise = (noise << (cut - _DRAWN)) + (1 << (cut - _DRAWN - 1))  # centered on the bits not drawn
    else:
        noise = noise >> (_DRAWN - cut)

    def moved(y: Tensor) -> Tensor:
        cut_off: Tensor = ((y.view(integers) + noise) & -(1 << cut)).view(x.dtype)
        return cut_off

    if narrow.smallest_normal == wide.smallest_normal:
        near = moved(x)
    else:
        # Subnormals of `dtype` are spaced like the smallest normal numbers: shift there and back.
        there = torch.where(x.abs() < narrow.smallest_normal, narrow.smallest_normal, torch.zeros_like(x))
        near = (moved(x.abs() + there) - there).copysign(x)
    out: Tensor = torch.where(x.abs() <= narrow.max, near, x).to(dtype)
    return out
