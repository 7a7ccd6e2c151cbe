"""The CUDA kernels of attention with dropout; files that import triton are named ``*_triton.py``.

Scores are never in memory as a whole: a program goes through blocks of keys with a running maximum and sum, and the
backward computes scores and dropout's mask again. The mask is that of :func:`functional_cg.random.keep_mask` over the
weights, bit for bit.
Source: Dao 2023, "FlashAttention-2".
"""

from __future__ import annotations

from types import MappingProxyType

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..tensors.philox_triton import signed32

__all__ = ["attention_backward_cuda", "attention_cuda"]

_ROUNDS = 10
_PER_BLOCK = 8  # numbers of 16 bits in a block of Philox
_LOG2_E = 1.4426950408889634
# By width: rows and columns of a block, warps, stages.
_FORWARD = MappingProxyType(
    {16: (128, 64, 4, 3), 32: (128, 64, 4, 3), 64: (128, 64, 4, 3), 128: (128, 64, 8, 2)}
)
_OF_KEYS = MappingProxyType({16: (64, 64, 4, 3), 32: (64, 64, 4, 3), 64: (64, 64, 4, 3), 128: (64, 64, 8, 2)})
_OF_QUERIES = MappingProxyType(
    {16: (64, 64, 4, 2), 32: (64, 64, 4, 2), 64: (64, 64, 4, 2), 128: (64, 64, 8, 2)}
)


@triton.jit
def _stays(word, dropped):
    """Whether the number in the low half of a word keeps its weight, as a byte."""
    return (((word & 0xFFFF).to(tl.int32) ^ 0x8000) >= dropped).to(tl.int8)


@triton.jit
def _kept(key, stream_low, stream_high, dropped, rows, start, groups, N: tl.constexpr, ROUNDS: tl.constexpr):
    """Which weights stay, for rows (numbered through the batch) and N keys from ``start`` on."""
    k0 = (tl.load(key) & 0xFFFFFFFF).to(tl.uint32)
    k1 = (tl.load(key + 1) & 0xFFFFFFFF).to(tl.uint32)
    block = rows[:, None] * groups + (start // 8 + tl.arange(0, N // 8))[None, :]
    c0 = (block & 0xFFFFFFFF).to(tl.uint32)
    c1 = ((block >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c2 = tl.zeros_like(c0) + stream_low.to(tl.uint32, bitcast=True)
    c3 = tl.zeros_like(c0) + stream_high.to(tl.uint32, bitcast=True)
    c0, c1, c2, c3 = tl.philox_impl(c0, c1, c2, c3, k0, k1, ROUNDS)
    # Numbers 0 to 7 of a block are the halves of its words, the low one first. They are compared before they are put
    # in their places: a byte moves between threads, not a word.
    even = tl.interleave(
        tl.interleave(_stays(c0, dropped), _stays(c2, dropped)),
        tl.interleave(_stays(c1, dropped), _stays(c3, dropped)),
    )
    odd = tl.interleave(
        tl.interleave(_stays(c0 >> 16, dropped), _stays(c2 >> 16, dropped)),
        tl.interleave(_stays(c1 >> 16, dropped), _stays(c3 >> 16, dropped)),
    )
    return tl.interleave(even, odd) != 0


@triton.jit
def _masked(
    scores,
    mask,
    stride_query,
    stride_key,
    rows,
    columns,
    queries,
    keys,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
):
    """Scores to the base 2 after the mask, and minus infinity outside."""
    inside = (rows[:, None] < queries) & (columns[None, :] < keys)
    if MASK != 0:
        place = mask + rows.to(tl.int64)[:, None] * stride_query + columns.to(tl.int64)[None, :] * stride_key
        if MASK == 1:
            inside = inside & (tl.load(place, mask=inside, other=0) != 0)
        else:
            # What is finite stays so: a row of nothing but the least number hides no key.
            added = tl.load(place, mask=inside, other=0.0).to(tl.float32)
            scaled = added * 1.4426950408889634
            overflows = (scaled == -float("inf")) & (added != -float("inf"))
            scores += tl.where(overflows, -3.4028234663852886e38, scaled)
    if CAUSAL:
        inside = inside & (rows[:, None] >= columns[None, :])
    return tl.where(inside, scores, -float("inf"))


@triton.jit
def _place(length, SIZE: tl.constexpr):
    """Return the first row of this program's block, and its pair of batch and head, of which there may be many."""
    blocks = tl.cdiv(length, SIZE)
    return tl.program_id(0) % blocks * SIZE, tl.program_id(0) // blocks


@triton.jit
def _rows_of(start, sb, sh, st, rows, count, batch, head, WIDTH: tl.constexpr):
    """Load rows of a tensor of [batch, heads, rows, WIDTH]; zeros behind the last one."""
    place = start + batch.to(tl.int64) * sb + head.to(tl.int64) * sh
    place += rows.to(tl.int64)[:, None] * st + tl.arange(0, WIDTH)[None, :]
    return tl.load(place, mask=rows[:, None] < count, other=0.0)


@triton.jit(do_not_specialize=["stream_low", "stream_high", "dropped"])
def _forward_kernel(
    query, key, value, mask, draws, out, tops, logs,
    qb, qh, qt, kb, kh, kt, vb, vh, vt, mb, mh, mq, mk, ob, oh, ot,
    heads, queries, keys, groups, scale, kept_scale, stream_low, stream_high, dropped,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    ROUNDS: tl.constexpr,
):  # fmt: skip
    first, pair = _place(queries, M)
    batch, head = pair // heads, pair % heads
    rows = first + tl.arange(0, M)
    numbers = pair.to(tl.int64) * queries + rows
    q = _rows_of(query, qb, qh, qt, rows, queries, batch, head, WIDTH)
    mask += batch.to(tl.int64) * mb + head.to(tl.int64) * mh
    top = tl.full((M,), -float("inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, WIDTH), tl.float32)
    end = tl.minimum(keys, first + M) if CAUSAL else keys
    for start in range(0, end, N):
        columns = start + tl.arange(0, N)
        k = _rows_of(key, kb, kh, kt, columns, keys, batch, head, WIDTH)
        scores = tl.dot(q, tl.trans(k)) * scale
        scores = _masked(scores, mask, mq, mk, rows, columns, queries, keys, CAUSAL, MASK)
        new = tl.maximum(top, tl.max(scores, 1))
        finite = tl.where(new == -float("inf"), 0.0, new)
        weights = tl.exp2(scores - finite[:, None])
        shrink = tl.exp2(top - finite)
        total = total * shrink + tl.sum(weights, 1)
        stays = _kept(draws, stream_low, stream_high, dropped, numbers, start, groups, N, ROUNDS)
        weights = tl.where(stays, weights, 0.0)
        v = _rows_of(value, vb, vh, vt, columns, keys, batch, head, WIDTH)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
        top = new
    empty = total == 0.0  # all keys are masked: the result is zero
    acc = acc * (kept_scale / tl.where(empty, 1.0, total))[:, None]
    # Apart: a large maximum, as of a row of -1e9, would swallow the logarithm.
    tl.store(tops + numbers, tl.where(empty, 0.0, top), mask=rows < queries)
    tl.store(logs + numbers, tl.where(empty, float("inf"), tl.log2(total)), mask=rows < queries)
    place = out + batch.to(tl.int64) * ob + head.to(tl.int64) * oh
    place += rows.to(tl.int64)[:, None] * ot + tl.arange(0, WIDTH)[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=rows[:, None] < queries)


@triton.jit
def _delta_kernel(
    grad, out, delta, gb, gh, gt, ob, oh, ot, heads, queries, WIDTH: tl.constexpr, M: tl.constexpr
):
    """Dot products of the rows of the result and of its gradient."""
    first, pair = _place(queries, M)
    batch, head = pair // heads, pair % heads
    rows = first + tl.arange(0, M)
    g = _rows_of(grad, gb, gh, gt, rows, queries, batch, head, WIDTH).to(tl.float32)
    o = _rows_of(out, ob, oh, ot, rows, queries, batch, head, WIDTH).to(tl.float32)
    tl.store(delta + pair.to(tl.int64) * queries + rows, tl.sum(g * o, 1), mask=rows < queries)


@triton.jit
def _slopes(
    q, k, v, g, mask, mq, mk, draws, tops, logs, delta, rows, numbers, start, queries, keys, groups, scale, kept_scale,
    stream_low, stream_high, dropped, CAUSAL: tl.constexpr, MASK: tl.constexpr, N: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Weights after dropout, and gradients of the scores, of one block."""
    columns = start + tl.arange(0, N)
    scores = _masked(tl.dot(q, tl.trans(k)) * scale, mask, mq, mk, rows, columns, queries, keys, CAUSAL, MASK)
    inside = rows < queries
    scores -= tl.load(tops + numbers, mask=inside, other=0.0)[:, None]
    weights = tl.exp2(scores - tl.load(logs + numbers, mask=inside, other=float("inf"))[:, None])
    stays = _kept(draws, stream_low, stream_high, dropped, numbers, start, groups, N, ROUNDS)
    toward = tl.where(stays, tl.dot(g, tl.trans(v)) * kept_scale, 0.0)
    slopes = weights * (toward - tl.load(delta + numbers, mask=inside, other=0.0)[:, None])
    return tl.where(stays, weights * kept_scale, 0.0), slopes


@triton.jit(do_not_specialize=["stream_low", "stream_high", "dropped"])
def _keys_kernel(
    query, key, value, mask, draws, grad, tops, logs, delta, key_grad, value_grad,
    qb, qh, qt, kb, kh, kt, vb, vh, vt, mb, mh, mq, mk, gb, gh, gt, kgb, kgh, kgt, vgb, vgh, vgt,
    heads, queries, keys, groups, scale, plain_scale, kept_scale, stream_low, stream_high, dropped,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    ROUNDS: tl.constexpr,
):  # fmt: skip
    start, pair = _place(keys, N)
    batch, head = pair // heads, pair % heads
    columns = start + tl.arange(0, N)
    k = _rows_of(key, kb, kh, kt, columns, keys, batch, head, WIDTH)
    v = _rows_of(value, vb, vh, vt, columns, keys, batch, head, WIDTH)
    mask += batch.to(tl.int64) * mb + head.to(tl.int64) * mh
    of_key = tl.zeros((N, WIDTH), tl.float32)
    of_value = tl.zeros((N, WIDTH), tl.float32)
    begin = start // M * M if CAUSAL else 0
    for first in range(begin, queries, M):
        rows = first + tl.arange(0, M)
        numbers = pair.to(tl.int64) * queries + rows
        q = _rows_of(query, qb, qh, qt, rows, queries, batch, head, WIDTH)
        g = _rows_of(grad, gb, gh, gt, rows, queries, batch, head, WIDTH)
        weights, slopes = _slopes(
            q, k, v, g, mask, mq, mk, draws, tops, logs, delta, rows, numbers, start, queries, keys, groups, scale,
            kept_scale, stream_low, stream_high, dropped, CAUSAL, MASK, N, ROUNDS,
        )  # fmt: skip
        of_value += tl.dot(tl.trans(weights.to(g.dtype)), g)
        of_key += tl.dot(tl.trans(slopes.to(q.dtype)), q)
    inside = columns[:, None] < keys
    width = tl.arange(0, WIDTH)[None, :]
    place = columns.to(tl.int64)[:, None] * kgt + width + batch.to(tl.int64) * kgb + head.to(tl.int64) * kgh
    tl.store(key_grad + place, (of_key * plain_scale).to(key_grad.dtype.element_ty), mask=inside)
    place = columns.to(tl.int64)[:, None] * vgt + width + batch.to(tl.int64) * vgb + head.to(tl.int64) * vgh
    tl.store(value_grad + place, of_value.to(value_grad.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["stream_low", "stream_high", "dropped"])
def _queries_kernel(
    query, key, value, mask, draws, grad, tops, logs, delta, query_grad,
    qb, qh, qt, kb, kh, kt, vb, vh, vt, mb, mh, mq, mk, gb, gh, gt, qgb, qgh, qgt,
    heads, queries, keys, groups, scale, plain_scale, kept_scale, stream_low, stream_high, dropped,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    ROUNDS: tl.constexpr,
):  # fmt: skip
    first, pair = _place(queries, M)
    batch, head = pair // heads, pair % heads
    rows = first + tl.arange(0, M)
    numbers = pair.to(tl.int64) * queries + rows
    q = _rows_of(query, qb, qh, qt, rows, queries, batch, head, WIDTH)
    g = _rows_of(grad, gb, gh, gt, rows, queries, batch, head, WIDTH)
    mask += batch.to(tl.int64) * mb + head.to(tl.int64) * mh
    acc = tl.zeros((M, WIDTH), tl.float32)
    end = tl.minimum(keys, first + M) if CAUSAL else keys
    for start in range(0, end, N):
        columns = start + tl.arange(0, N)
        k = _rows_of(key, kb, kh, kt, columns, keys, batch, head, WIDTH)
        v = _rows_of(value, vb, vh, vt, columns, keys, batch, head, WIDTH)
        _, slopes = _slopes(
            q, k, v, g, mask, mq, mk, draws, tops, logs, delta, rows, numbers, start, queries, keys, groups, scale,
            kept_scale, stream_low, stream_high, dropped, CAUSAL, MASK, N, ROUNDS,
        )  # fmt: skip
        acc += tl.dot(slopes.to(k.dtype), k)
    place = query_grad + batch.to(tl.int64) * qgb + head.to(tl.int64) * qgh
    place += rows.to(tl.int64)[:, None] * qgt + tl.arange(0, WIDTH)[None, :]
    tl.store(place, (acc * plain_scale).to(query_grad.dtype.element_ty), mask=rows[:, None] < queries)


def _kind_of(mask: Tensor | None) -> int:
    if mask is None:
        return 0
    return 1 if mask.dtype == torch.bool else 2


def _strides(tensor: Tensor | None, count: int) -> tuple[int, ...]:
    return (0,) * count if tensor is None else tensor.stride()[:count]


def _in_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


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
) -> tuple[Tensor, Tensor]:
    """Launch the forward without a sync; the grid depends only on shapes.

    Args:
      query: [batch, heads, queries, width], bf16 or f16; the width is 16, 32, 64 or 128.
      key: [batch, heads, keys, width]; the number of keys is a multiple of 8.
      value: Likewise.
      mask: [batch, heads, queries, keys] or None: bool, or floating to be added to the scores.
      draws: i64[2], the key that dropout draws from.
      stream: Its stream.
      dropped: Of 65536 weights, how many become zero.
      kept_scale: Factor for the others.
      causal: Whether query i sees keys 0 to i alone.
      scale: Factor for the scores.
    Returns:
      The result, like ``query`` but laid out [batch, queries, heads, width], and f32[2, batch, heads, queries]: of each
      query the largest score, and the logarithm of the sum of the exponentials of all others less this one, both to the
      base 2.
    """
    query, key, value, draws = map(_in_rows, (query, key, value, draws))
    batch, heads, queries, width = query.shape
    keys = key.shape[2]
    out = query.new_empty((batch, queries, heads, width)).transpose(1, 2)
    sums = torch.empty((2, batch, heads, queries), dtype=torch.float32, device=query.device)
    rows, columns, warps, stages = _FORWARD[width]
    with torch.cuda.device(query.device):
        _forward_kernel[(triton.cdiv(queries, rows) * batch * heads,)](
            query, key, value, query if mask is None else mask, draws, out, *sums,
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *_strides(mask, 4), *out.stride()[:3],
            heads, queries, keys, keys // _PER_BLOCK, scale * _LOG2_E, kept_scale,
            signed32(stream), signed32(stream >> 32), dropped,
            CAUSAL=causal, MASK=_kind_of(mask), WIDTH=width, M=rows, N=columns, ROUNDS=_ROUNDS,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return out, sums


def attention_backward_cuda(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    draws: Tensor,
    out: Tensor,
    sums: Tensor,
    stream: int,
    dropped: int,
    kept_scale: float,
    causal: bool,  # noqa: FBT001
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the backward without a sync: gradients of query, key and value, laid out as the result is."""
    grad, query, key, value, draws = map(_in_rows, (grad, query, key, value, draws))
    batch, heads, queries, width = query.shape
    keys = key.shape[2]
    grads = tuple(
        one.new_empty((batch, one.shape[2], heads, width)).transpose(1, 2) for one in (query, key, value)
    )
    delta = torch.empty_like(sums[0])
    given = (query, key, value, query if mask is None else mask, draws, grad, *sums, delta)
    strides = (
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        *_strides(mask, 4),
        *grad.stride()[:3],
    )
    numbers = (
        heads, queries, keys, keys // _PER_BLOCK, scale * _LOG2_E, scale, kept_scale,
        signed32(stream), signed32(stream >> 32), dropped,
    )  # fmt: skip
    kinds = {"CAUSAL": causal, "MASK": _kind_of(mask), "WIDTH": width, "ROUNDS": _ROUNDS}
    with torch.cuda.device(query.device):
        _delta_kernel[(triton.cdiv(queries, 64) * batch * heads,)](
            grad, out, delta, *grad.stride()[:3], *out.stride()[:3], heads, queries, WIDTH=width, M=64
        )
        rows, columns, warps, stages = _OF_KEYS[width]
        _keys_kernel[(triton.cdiv(keys, columns) * batch * heads,)](
            *given, *grads[1:], *strides, *grads[1].stride()[:3], *grads[2].stride()[:3], *numbers,
            M=rows, N=columns, num_warps=warps, num_stages=stages, **kinds,
        )  # fmt: skip
        rows, columns, warps, stages = _OF_QUERIES[width]
        _queries_kernel[(triton.cdiv(queries, rows) * batch * heads,)](
            *given, grads[0], *strides, *grads[0].stride()[:3], *numbers,
            M=rows, N=columns, num_warps=warps, num_stages=stages, **kinds,
        )  # fmt: skip
    return grads  # type: ignore[return-value]
