"""Launches of the CUDA kernels of attention with dropout, and the kernel that draws which weights stay."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..tensors.philox_triton import signed32
from .attention_triton import forward_kernel, keys_kernel, queries_kernel

__all__ = ["attention_backward_cuda", "attention_cuda"]

_LOG2_E = 1.4426950408889634
_WORD = 32  # bits
# Queries of a block and warps of the kernel that draws: four words for a thread.
_DRAW = (256, 2)
# By width, and whether in single precision: queries and keys of a block, warps, stages, registers of a thread. The best
# on an H100, where several small blocks at once hide what each waits for; of two that are as fast, the smaller.
_FORWARD = MappingProxyType(
    {
        (16, False): (64, 64, 4, 3, None),
        (32, False): (128, 64, 4, 3, None),
        (64, False): (64, 64, 4, 3, 128),
        (128, False): (64, 64, 4, 2, None),
        (256, False): (64, 32, 4, 2, None),
        (16, True): (128, 32, 4, 2, None),
        (32, True): (128, 32, 4, 2, None),
        (64, True): (128, 64, 8, 1, None),
        (128, True): (128, 32, 8, 1, None),
        (256, True): (32, 32, 4, 1, None),
    }
)
_OF_KEYS = MappingProxyType(
    {
        (16, False): (64, 64, 4, 2, 168),
        (32, False): (64, 64, 4, 3, 168),
        (64, False): (64, 64, 4, 2, None),
        (128, False): (64, 64, 4, 1, None),
        (256, False): (32, 64, 8, 2, None),
        (16, True): (64, 32, 4, 1, None),
        (32, True): (64, 32, 4, 1, None),
        (64, True): (64, 32, 4, 1, None),
        (128, True): (32, 32, 4, 1, None),
        (256, True): (16, 32, 8, 1, None),
    }
)
_OF_QUERIES = MappingProxyType(
    {
        (16, False): (64, 64, 4, 2, 128),
        (32, False): (64, 64, 4, 3, 128),
        (64, False): (64, 32, 4, 3, 128),
        (128, False): (64, 64, 4, 2, None),
        (256, False): (64, 32, 4, 1, None),
        (16, True): (64, 32, 4, 1, None),
        (32, True): (64, 32, 4, 1, None),
        (64, True): (128, 32, 8, 1, None),
        (128, True): (32, 32, 4, 1, None),
        (256, True): (16, 32, 4, 1, None),
    }
)


@triton.jit
def _philox(block, stream_low, stream_high, k0, k1):
    """Return words 0 to 3 of blocks of Philox4x32-10, as signed numbers."""
    c0 = (block & 0xFFFFFFFF).to(tl.uint32)
    c1 = ((block >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c2 = tl.zeros_like(c0) + stream_low.to(tl.uint32, bitcast=True)
    c3 = tl.zeros_like(c0) + stream_high.to(tl.uint32, bitcast=True)
    for _ in tl.static_range(10):
        # A product of 64 bits is one instruction; its high and its low word apart are two.
        left, right = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c2 = (right >> 32).to(tl.uint32) ^ c1 ^ k0, (left >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = right.to(tl.uint32), left.to(tl.uint32)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    signed: tl.constexpr = tl.int32
    return (
        c0.to(signed, bitcast=True),
        c1.to(signed, bitcast=True),
        c2.to(signed, bitcast=True),
        c3.to(signed, bitcast=True),
    )


@triton.jit
def _two(word, least, FIRST: tl.constexpr):
    """Whether the numbers in the low and the high half of a word are at least ``least``, as two bits from FIRST on."""
    return tl.where((word << 16) >= least, FIRST, 0) | tl.where(word >= least, 2 * FIRST, 0)


@triton.jit(
    do_not_specialize=["first_pair", "queries", "keys", "groups", "stream_low", "stream_high", "least"]
)
def _draw_kernel(
    draws, kept, first_pair, queries, keys, groups, stream_low, stream_high, least,
    ALIGNED: tl.constexpr, CAUSAL: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(queries, M)
    first = tl.program_id(0) % blocks * M
    group = tl.program_id(0) // blocks % groups
    pair = (tl.program_id(0) // blocks // groups).to(tl.int64)
    # What is above the diagonal as a whole is masked, however it was drawn.
    if not CAUSAL or group * 32 < first + M:
        k0 = (tl.load(draws) & 0xFFFFFFFF).to(tl.uint32)
        k1 = (tl.load(draws + 1) & 0xFFFFFFFF).to(tl.uint32)
        rows = first + tl.arange(0, M)
        number = ((first_pair + pair) * queries + rows) * keys + group * 32
        block = number >> 3  # of 8 numbers of 16 bits
        bits = tl.zeros((M,), tl.int32 if ALIGNED else tl.int64)
        for i in tl.static_range(4 if ALIGNED else 5):
            c0, c1, c2, c3 = _philox(block + i, stream_low, stream_high, k0, k1)
            byte = _two(c0, least, 1) | _two(c1, least, 4) | _two(c2, least, 16) | _two(c3, least, 64)
            bits |= byte.to(bits.dtype) << (8 * i)
        if not ALIGNED:
            bits = bits >> (number & 7)
        tl.store(kept + (pair * groups + group) * queries + rows, bits.to(tl.int32), mask=rows < queries)


def _draw(
    kept: Tensor,
    draws: Tensor,
    first_pair: int,
    pairs: int,
    keys: int,
    stream: int,
    dropped: int,
    *,
    causal: bool,
) -> None:
    """Draw the bits of some pairs: bit i of word [pair, group, query] is that of key 32 * group + i."""
    groups, queries = kept.shape[1:]
    rows, warps = _DRAW
    _draw_kernel[(triton.cdiv(queries, rows) * groups * pairs,)](
        draws.contiguous(), kept, first_pair, queries, keys, groups, signed32(stream), signed32(stream >> 32),
        signed32((dropped - 32768) << 16),
        ALIGNED=keys % 8 == 0, CAUSAL=causal, M=rows, num_warps=warps,
    )  # fmt: skip


def _parts(kept: Tensor | None, query: Tensor, keys: int) -> Iterator[tuple[int, int, Tensor]]:
    """Yield the first and the number of the pairs of batch and head to launch at once, and memory for their bits.

    Bits that are not kept for the backward take no more than twice the memory of the query, as its gradient does in
    single precision in torch's kernels, or what those of one pair take.
    """
    batch, heads, queries, _ = query.shape
    groups, pairs = triton.cdiv(keys, _WORD), batch * heads
    if kept is not None:
        yield 0, pairs, kept.view(pairs, groups, queries)
        return
    most = min(pairs, max(1, 2 * query.numel() * query.element_size() // (groups * queries * 4)))
    kept = torch.empty((most, groups, queries), dtype=torch.int32, device=query.device)
    for first in range(0, pairs, most):
        yield first, min(most, pairs - first), kept


def _kind_of(mask: Tensor | None) -> int:
    if mask is None:
        return 0
    return (1 if mask.dtype == torch.bool else 2) + (2 if mask.stride(2) == 0 else 0)


def _kinds(query: Tensor, mask: Tensor | None, *, causal: bool) -> dict[str, Any]:
    width = query.shape[-1]
    # As torch's fused kernels do, three products of TF32 stand for one of single precision.
    precision = "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"
    padded = max(16, triton.next_power_of_2(width))
    return {"CAUSAL": causal, "MASK": _kind_of(mask), "WIDTH": width, "D": padded, "PRECISION": precision}


def _blocks(table: Any, kinds: dict[str, Any], query: Tensor) -> dict[str, Any]:
    rows, columns, warps, stages, registers = table[kinds["D"], query.dtype == torch.float32]
    return {"M": rows, "N": columns, "num_warps": warps, "num_stages": stages, "maxnreg": registers}


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for tensor in tensors for stride in tensor.stride()[:3]]


def _of_mask(mask: Tensor | None) -> tuple[int, ...]:
    return (0,) * 4 if mask is None else mask.stride()


def _in_rows(*tensors: Tensor) -> Iterator[Tensor]:
    """Yield tensors whose rows are each in one piece, and no further apart than 32 bits reach."""
    for tensor in tensors:
        near = tensor.stride(-1) == 1 and tensor.shape[2] * tensor.stride(2) < 2**31
        yield tensor if near else tensor.contiguous()


def attention_cuda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    draws: Tensor,
    stream: int,
    dropped: int,
    kept_scale: float,
    causal: bool,  # noqa: FBT001
    scale: float,
    keeps: bool,  # noqa: FBT001
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the forward without a sync; the grid depends only on shapes.

    Args:
      query: [batch, heads, queries, width], bf16, f16 or f32; the width is at most 256.
      key: [batch, heads, keys, width].
      value: Likewise.
      mask: [batch, heads, queries, keys] or None: bool, or floating to be added to the scores.
      draws: i64[2], the key that dropout draws from.
      stream: Its stream.
      dropped: Of 65536 weights, how many become zero.
      kept_scale: Factor for the others.
      causal: Whether query i sees keys 0 to i alone.
      scale: Factor for the scores.
      keeps: Whether to return the bits, for the backward; else it draws them again.
    Returns:
      The result, like ``query`` but laid out [batch, queries, heads, width]; f32[2, batch, heads, queries]: of each
      query the largest score, and the logarithm of the sum of the exponentials of all others less this one, both to the
      base 2; and i32[batch, heads, keys / 32, queries], the bits of the weights that stay, or i32[0].
    """
    query, key, value = _in_rows(query, key, value)
    batch, heads, queries, width = query.shape
    keys = key.shape[2]
    groups = triton.cdiv(keys, _WORD)
    out = query.new_empty((batch, queries, heads, width)).transpose(1, 2)
    sums = torch.empty((2, batch, heads, queries), dtype=torch.float32, device=query.device)
    kept = torch.empty(
        (batch, heads, groups, queries) if keeps else 0, dtype=torch.int32, device=query.device
    )
    kinds = _kinds(query, mask, causal=causal)
    blocks = _blocks(_FORWARD, kinds, query)
    with torch.cuda.device(query.device):
        for first, pairs, bits in _parts(kept if keeps else None, query, keys):
            _draw(bits, draws, first, pairs, keys, stream, dropped, causal=causal)
            forward_kernel[(triton.cdiv(queries, blocks["M"]) * pairs,)](
                query, key, value, query if mask is None else mask, bits, out, *sums,
                *_strides(query, key, value), *_of_mask(mask), *_strides(out),
                first, heads, queries, keys, groups, scale * _LOG2_E, kept_scale, **kinds, **blocks,
            )  # fmt: skip
    return out, sums, kept


def attention_backward_cuda(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    draws: Tensor,
    out: Tensor,
    sums: Tensor,
    kept: Tensor,
    stream: int,
    dropped: int,
    kept_scale: float,
    causal: bool,  # noqa: FBT001
    scale: float,
    keeps: bool,  # noqa: FBT001
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the backward without a sync: gradients of query, key and value, laid out as the result is."""
    grad, query, key, value = _in_rows(grad, query, key, value)
    batch, heads, queries, width = query.shape
    keys = key.shape[2]
    of_query, *of_others = (
        one.new_empty((batch, one.shape[2], heads, width)).transpose(1, 2) for one in (query, key, value)
    )
    deltas = torch.empty_like(sums[0])
    kinds = _kinds(query, mask, causal=causal)
    by_queries, by_keys = _blocks(_OF_QUERIES, kinds, query), _blocks(_OF_KEYS, kinds, query)
    given = query, key, value, query if mask is None else mask
    strides = *_strides(query, key, value), *_of_mask(mask), *_strides(grad)
    with torch.cuda.device(query.device):
        for first, pairs, bits in _parts(kept if keeps else None, query, keys):
            if not keeps:
                _draw(bits, draws, first, pairs, keys, stream, dropped, causal=causal)
            numbers = (
                first, heads, queries, keys, triton.cdiv(keys, _WORD), scale * _LOG2_E, scale, kept_scale,
            )  # fmt: skip
            queries_kernel[(triton.cdiv(queries, by_queries["M"]) * pairs,)](
                *given, bits, grad, out, *sums, deltas, of_query, *strides, *_strides(out, of_query), *numbers,
                **kinds, **by_queries,
            )  # fmt: skip
            keys_kernel[(triton.cdiv(keys, by_keys["N"]) * pairs,)](
                *given, bits, grad, *sums, deltas, *of_others, *strides, *_strides(*of_others), *numbers,
                **kinds, **by_keys,
            )  # fmt: skip
    return of_query, *of_others  # type: ignore[return-value]
