"""The CUDA kernels of attention with dropout; files that import triton are named ``*_triton.py``.

Scores are never in memory as a whole: a program goes through blocks of keys with a running maximum and sum, and the
backward computes scores again. Which weights stay is drawn by a kernel of its own, one bit a weight, since its numbers
would cost each of the three others more than its arithmetic: see ``attention_launch_triton.py``.
Source: Dao 2023, "FlashAttention-2".
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["forward_kernel", "keys_kernel", "queries_kernel"]

# Kinds of masks: 0 is none, 1 bool, 2 to be added to scores, 3 and 4 likewise, but the same for all queries.
# Another size is no other kernel: it may first be met in a capture.
_SIZES = ("first_pair", "heads", "queries", "keys", "groups")


@triton.jit
def _rows_of(start, stride, rows, count, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, INSIDE: tl.constexpr):
    """Load rows of [count, WIDTH] as [rows, COLUMNS]; zeros outside, unless all rows are known to be inside.

    Products of 32 bits, where rows have 32 bits, save work in a loop.
    """
    width = tl.arange(0, COLUMNS)
    place = start + rows[:, None] * stride + width[None, :]
    if WIDTH != COLUMNS:
        return tl.load(place, mask=(rows[:, None] < count) & (width[None, :] < WIDTH), other=0.0)
    elif INSIDE:
        return tl.load(place)
    else:
        return tl.load(place, mask=rows[:, None] < count, other=0.0)


@triton.jit
def _store_rows(start, stride, rows, count, values, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    width = tl.arange(0, COLUMNS)
    place = start + rows.to(tl.int64)[:, None] * stride + width[None, :]
    inside = (rows[:, None] < count) & (width[None, :] < WIDTH)
    tl.store(place, values.to(start.dtype.element_ty), mask=inside)


@triton.jit
def _stay(kept, groups, queries, rows, start, N: tl.constexpr):
    """Return [rows, N] bool: which weights stay, of the keys from ``start`` on."""
    column = tl.arange(0, N)[None, :]
    place, group = kept + tl.minimum(rows, queries - 1), start // 32
    # A thread holds columns that differ in bits other than 1 and 2, so it shifts a word once and tests fixed bits.
    word = tl.load(place + tl.minimum(group, groups - 1) * queries)[:, None] >> (column & 6)
    for i in tl.static_range(1, N // 32):
        other = tl.load(place + tl.minimum(group + i, groups - 1) * queries)[:, None] >> (column & 6)
        word = tl.where(column >= 32 * i, other, word)
    return (word & (1 << (column & 25))) != 0


@triton.jit
def _seen(
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
    EDGE: tl.constexpr,
):
    """Scores to the base 2 after the mask, and minus infinity outside; only blocks at an edge have an outside."""
    if MASK != 0:
        place = mask + columns.to(tl.int64)[None, :] * stride_key
        inside = columns[None, :] < keys
        if MASK <= 2:
            place += rows.to(tl.int64)[:, None] * stride_query
            inside = inside & (rows[:, None] < queries)
        given = tl.load(place, mask=inside, other=0)
        if MASK % 2 == 1:
            scores = tl.where(given != 0, scores, -float("inf"))
        else:
            # What is finite stays so: a row of nothing but the least number hides no key.
            added = given.to(tl.float32)
            scaled = added * 1.4426950408889634
            overflows = (scaled == -float("inf")) & (added != -float("inf"))
            scores += tl.where(overflows, -3.4028234663852886e38, scaled)
    if EDGE:
        inside = columns[None, :] < keys
        if CAUSAL:
            inside = inside & (rows[:, None] >= columns[None, :])
        scores = tl.where(inside, scores, -float("inf"))
    return scores


@triton.jit
def _place(length, first_pair, SIZE: tl.constexpr):
    """Return the first row of this program's block, and its pair of batch and head, in this launch and in all."""
    blocks = tl.cdiv(length, SIZE)
    pair = tl.program_id(0) // blocks
    return tl.program_id(0) % blocks * SIZE, pair, (first_pair + pair).to(tl.int64)


@triton.jit
def _attend(
    q, key, value, mask, kept, kt, vt, mq, mk, rows, start, top, total, acc, queries, keys, groups, scale, zero,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
    PRECISION: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Go on to the next block of keys."""
    columns = start + tl.arange(0, N)
    k = _rows_of(key, kt, columns, keys, WIDTH, D, not EDGE)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if MASK == 0:  # the factor is positive, so the largest score stays it, and the product is part of a sum
        scores = _seen(scores, mask, mq, mk, rows, columns, queries, keys, CAUSAL, MASK, EDGE)
        new = tl.maximum(top, tl.max(scores, 1) * scale)
        scores *= scale
    else:
        scores = _seen(scores * scale, mask, mq, mk, rows, columns, queries, keys, CAUSAL, MASK, EDGE)
        new = tl.maximum(top, tl.max(scores, 1))
    finite = tl.where(new == -float("inf"), 0.0, new)
    weights = tl.exp2(scores - finite[:, None])
    shrink = tl.exp2(top - finite)
    total = total * shrink + tl.sum(weights, 1)
    weights = tl.where(_stay(kept, groups, queries, rows, start, N), weights, zero)
    v = _rows_of(value, vt, columns, keys, WIDTH, D, not EDGE)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return new, total, acc


@triton.jit(do_not_specialize=_SIZES)
def forward_kernel(
    query, key, value, mask, kept, out, tops, logs,
    qb, qh, qt, kb, kh, kt, vb, vh, vt, mb, mh, mq, mk, ob, oh, ot,
    first_pair, heads, queries, keys, groups, scale, kept_scale,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Attend; also store, of each query, the largest score and the logarithm of the sum of all exponentials less it."""
    first, place, pair = _place(queries, first_pair, M)
    batch, head = pair // heads, pair % heads
    rows = first + tl.arange(0, M)
    q = _rows_of(query + batch * qb + head * qh, qt, rows.to(tl.int64), queries, WIDTH, D, False)
    q = q * tl.where(scale < 0, -1.0, 1.0).to(q.dtype)
    scale = tl.abs(scale)
    key, value = key + batch * kb + head * kh, value + batch * vb + head * vh
    mask, kept = mask + batch * mb + head * mh, kept + place.to(tl.int64) * groups * queries
    zero = (
        kept_scale - kept_scale
    )  # known, it would be chosen after rounding, two numbers of 16 bits one by one
    top = tl.full((M,), -float("inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, D), tl.float32)
    end = tl.minimum(keys, first + M) if CAUSAL else keys
    inner = (tl.minimum(keys, first) if CAUSAL else keys) // N * N
    for start in range(0, inner, N):
        top, total, acc = _attend(
            q, key, value, mask, kept, kt, vt, mq, mk, rows, start, top, total, acc, queries, keys, groups, scale,
            zero, CAUSAL, MASK, WIDTH, D, N, PRECISION, False,
        )  # fmt: skip
    for start in range(inner, end, N):
        top, total, acc = _attend(
            q, key, value, mask, kept, kt, vt, mq, mk, rows, start, top, total, acc, queries, keys, groups, scale,
            zero, CAUSAL, MASK, WIDTH, D, N, PRECISION, True,
        )  # fmt: skip
    empty = total == 0.0  # all keys are masked: the result is zero
    acc = acc * (kept_scale / tl.where(empty, 1.0, total))[:, None]
    numbers = pair * queries + rows
    tl.store(tops + numbers, tl.where(empty, 0.0, top), mask=rows < queries)
    tl.store(logs + numbers, tl.where(empty, float("inf"), tl.log2(total)), mask=rows < queries)
    _store_rows(out + batch * ob + head * oh, ot, rows, queries, acc, WIDTH, D)


# Below, slopes are the gradients of the scores over `kept_scale`: sums of them are multiplied by it, not each one.
@triton.jit
def _slopes(
    q, k, v, g, mask, kept, mq, mk, rows, start, top, log, delta, queries, keys, groups, scale, zero,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Weights after dropout, but for the scale, and slopes, of one block."""
    columns = start + tl.arange(0, N)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    toward = tl.dot(g, tl.trans(v), input_precision=PRECISION)
    scores = _seen(scores, mask, mq, mk, rows, columns, queries, keys, CAUSAL, MASK, EDGE)
    if MASK != 0 and MASK % 2 == 0:  # a large maximum, as of a row of -1e9, would swallow the logarithm
        weights = tl.exp2((scores - top[:, None]) - log[:, None])
    else:
        weights = tl.exp2(scores - (top + log)[:, None])
    left = tl.where(_stay(kept, groups, queries, rows, start, N), weights, zero)
    return left, left * toward - weights * delta[:, None]


@triton.jit
def _next_queries(
    k, v, query, grad, mask, kept, tops, logs, deltas, qt, gt, mq, mk, first, start, of_key, of_value, queries, keys,
    groups, scale, zero,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    PRECISION: tl.constexpr, EDGE: tl.constexpr, INSIDE: tl.constexpr,
):  # fmt: skip
    """Add what a block of queries gives the gradients of a block of keys and values."""
    rows = first + tl.arange(0, M)
    q = _rows_of(query, qt, rows, queries, WIDTH, D, INSIDE)
    g = _rows_of(grad, gt, rows, queries, WIDTH, D, INSIDE)
    top = tl.load(tops + rows, mask=rows < queries, other=0.0)
    log = tl.load(logs + rows, mask=rows < queries, other=float("inf"))
    delta = tl.load(deltas + rows, mask=rows < queries, other=0.0)
    weights, slopes = _slopes(
        q, k, v, g, mask, kept, mq, mk, rows, start, top, log, delta, queries, keys, groups, scale, zero,
        CAUSAL, MASK, N, PRECISION, EDGE,
    )  # fmt: skip
    of_value = tl.dot(tl.trans(weights.to(g.dtype)), g, of_value, input_precision=PRECISION)
    of_key = tl.dot(tl.trans(slopes.to(q.dtype)), q, of_key, input_precision=PRECISION)
    return of_key, of_value


@triton.jit(do_not_specialize=_SIZES)
def keys_kernel(
    query, key, value, mask, kept, grad, tops, logs, deltas, key_grad, value_grad,
    qb, qh, qt, kb, kh, kt, vb, vh, vt, mb, mh, mq, mk, gb, gh, gt, kgb, kgh, kgt, vgb, vgh, vgt,
    first_pair, heads, queries, keys, groups, scale, plain_scale, kept_scale,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Gradients of keys and values."""
    start, place, pair = _place(keys, first_pair, N)
    batch, head = pair // heads, pair % heads
    columns = start + tl.arange(0, N)
    k = _rows_of(key + batch * kb + head * kh, kt, columns, keys, WIDTH, D, False)
    v = _rows_of(value + batch * vb + head * vh, vt, columns, keys, WIDTH, D, False)
    query, grad = query + batch * qb + head * qh, grad + batch * gb + head * gh
    mask, kept = mask + batch * mb + head * mh, kept + place.to(tl.int64) * groups * queries
    tops, logs, deltas = tops + pair * queries, logs + pair * queries, deltas + pair * queries
    zero = kept_scale - kept_scale  # as in the forward
    of_key = tl.zeros((N, D), tl.float32)
    of_value = tl.zeros((N, D), tl.float32)
    begin, inside = 0, queries // M * M
    if CAUSAL:
        begin = tl.minimum(tl.cdiv(start + N, M) * M, queries)
        for first in range(start // M * M, begin, M):
            of_key, of_value = _next_queries(
                k, v, query, grad, mask, kept, tops, logs, deltas, qt, gt, mq, mk, first, start, of_key, of_value,
                queries, keys, groups, scale, zero, CAUSAL, MASK, WIDTH, D, M, N, PRECISION, True, False,
            )  # fmt: skip
    # Keys behind the last one need no mask: nobody reads their gradients.
    for first in range(begin, inside, M):
        of_key, of_value = _next_queries(
            k, v, query, grad, mask, kept, tops, logs, deltas, qt, gt, mq, mk, first, start, of_key, of_value,
            queries, keys, groups, scale, zero, CAUSAL, MASK, WIDTH, D, M, N, PRECISION, False, True,
        )  # fmt: skip
    for first in range(tl.maximum(begin, inside), queries, M):
        of_key, of_value = _next_queries(
            k, v, query, grad, mask, kept, tops, logs, deltas, qt, gt, mq, mk, first, start, of_key, of_value,
            queries, keys, groups, scale, zero, CAUSAL, MASK, WIDTH, D, M, N, PRECISION, False, False,
        )  # fmt: skip
    of_key *= plain_scale * kept_scale
    _store_rows(key_grad + batch * kgb + head * kgh, kgt, columns, keys, of_key, WIDTH, D)
    _store_rows(value_grad + batch * vgb + head * vgh, vgt, columns, keys, of_value * kept_scale, WIDTH, D)


@triton.jit
def _next_keys(
    q, g, key, value, mask, kept, kt, vt, mq, mk, rows, start, top, log, delta, acc, queries, keys, groups, scale, zero,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
    PRECISION: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Add what a block of keys gives the gradients of a block of queries."""
    columns = start + tl.arange(0, N)
    k = _rows_of(key, kt, columns, keys, WIDTH, D, not EDGE)
    v = _rows_of(value, vt, columns, keys, WIDTH, D, not EDGE)
    _, slopes = _slopes(
        q, k, v, g, mask, kept, mq, mk, rows, start, top, log, delta, queries, keys, groups, scale, zero,
        CAUSAL, MASK, N, PRECISION, EDGE,
    )  # fmt: skip
    return tl.dot(slopes.to(k.dtype), k, acc, input_precision=PRECISION)


@triton.jit(do_not_specialize=_SIZES)
def queries_kernel(
    query, key, value, mask, kept, grad, out, tops, logs, deltas, query_grad,
    qb, qh, qt, kb, kh, kt, vb, vh, vt, mb, mh, mq, mk, gb, gh, gt, ob, oh, ot, qgb, qgh, qgt,
    first_pair, heads, queries, keys, groups, scale, plain_scale, kept_scale,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Gradients of queries; also store, for ``keys_kernel``, products of the rows of the result and of its gradient."""
    first, place, pair = _place(queries, first_pair, M)
    batch, head = pair // heads, pair % heads
    rows = first + tl.arange(0, M)
    numbers = pair * queries + rows
    q = _rows_of(query + batch * qb + head * qh, qt, rows.to(tl.int64), queries, WIDTH, D, False)
    g = _rows_of(grad + batch * gb + head * gh, gt, rows.to(tl.int64), queries, WIDTH, D, False)
    o = _rows_of(out + batch * ob + head * oh, ot, rows.to(tl.int64), queries, WIDTH, D, False)
    delta = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1) / kept_scale
    tl.store(deltas + numbers, delta, mask=rows < queries)
    top = tl.load(tops + numbers, mask=rows < queries, other=0.0)
    log = tl.load(logs + numbers, mask=rows < queries, other=float("inf"))
    key, value = key + batch * kb + head * kh, value + batch * vb + head * vh
    mask, kept = mask + batch * mb + head * mh, kept + place.to(tl.int64) * groups * queries
    zero = kept_scale - kept_scale  # as in the forward
    acc = tl.zeros((M, D), tl.float32)
    end = tl.minimum(keys, first + M) if CAUSAL else keys
    inner = (tl.minimum(keys, first) if CAUSAL else keys) // N * N
    for start in range(0, inner, N):
        acc = _next_keys(
            q, g, key, value, mask, kept, kt, vt, mq, mk, rows, start, top, log, delta, acc, queries, keys, groups,
            scale, zero, CAUSAL, MASK, WIDTH, D, N, PRECISION, False,
        )  # fmt: skip
    for start in range(inner, end, N):
        acc = _next_keys(
            q, g, key, value, mask, kept, kt, vt, mq, mk, rows, start, top, log, delta, acc, queries, keys, groups,
            scale, zero, CAUSAL, MASK, WIDTH, D, N, PRECISION, True,
        )  # fmt: skip
    acc *= plain_scale * kept_scale
    _store_rows(query_grad + batch * qgb + head * qgh, qgt, rows, queries, acc, WIDTH, D)
