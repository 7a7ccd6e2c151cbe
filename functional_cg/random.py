"""Stateless random numbers: a draw is a pure function of a key.

The generator is Philox4x32-10: ten rounds of a keyed bijection turn a 128-bit counter into four 32-bit words
(Salmon, Moraes, Dror, Shaw: *Parallel random numbers: as easy as 1, 2, 3*, SC 2011). Nothing is stored
between draws, so a replayed graph draws new numbers exactly when its key is new.

A key is an ``i64[2]`` tensor of two 32-bit words. Never draw twice from one key: `split` it, `fold_in` a
number, or give each draw its own ``stream``, a number from 0 to 2**63 - 1 that is part of the counter and
costs nothing; a step that draws twice from one key is warned of. Results live on the key's device. Shapes and
numbers are Python values, checked at the call; no function reads a tensor on the host. All draws come from one
registered op, ``fcg::random_bits``: one node in a trace, and the same bits on CPU and CUDA, in eager and compiled
code. Only `normal` and `categorical` compute logarithms, whose last bits may differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import LayoutError
from .masking import masked_scale
from .ops import is_batched
from .tree import leaves

__all__ = [
    "bernoulli",
    "bits",
    "categorical",
    "decompose_random_bits",
    "dropout",
    "fold_in",
    "keep_mask",
    "key",
    "normal",
    "permutation",
    "randint",
    "split",
    "uniform",
]

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_INTEGERS = (
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
)
# Keys are derived on a stream that no draw may use: a draw and a derived key never share a counter.
DERIVE = -1
# 65,536 blocks are 3 MB of scratch: within the L2 cache, and enough for torch to use two threads for one op.
_CHUNK_BLOCKS = 65_536
# Below this a hundred ops on tiny tensors cost more than the arithmetic in Python integers.
_FEW_BLOCKS = 8


# ``Any``: the arithmetic of the next two functions is the same for Python integers and for tensors.
def _multiply(word: Any, factor: int) -> tuple[Any, Any]:
    """The high and the low word of the product of two words, without overflow.

    A C++ compiler may assume that an int64 never overflows, and then drop the masks that repair it.
    """
    if factor < 2**31:
        product = word * factor
        return product >> 32, product & _MASK
    product = word * (factor - 2**32)
    return (product >> 32) + word, product & _MASK


def _philox(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> tuple[Any, Any, Any, Any]:
    for _ in range(_ROUNDS):
        (high0, low0), (high1, low1) = _multiply(c0, _MULTIPLIERS[0]), _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def _philox_chunk(out: Tensor, first: int, stream: int, k0: int, k1: int) -> None:
    """Fill ``out`` (i64[blocks, 2], two words in each) from block ``first`` on, in place."""
    block = torch.arange(len(out), device="cpu").add_(first)
    c0, c1, c2, c3, p0, p1 = torch.empty((6, len(out)), dtype=torch.int64, device="cpu").unbind()
    torch.bitwise_and(block, _MASK, out=c0)
    torch.bitwise_right_shift(block, 32, out=c1).bitwise_and_(_MASK)
    c2.fill_(stream & _MASK)
    c3.fill_(stream >> 32 & _MASK)
    for _ in range(_ROUNDS):
        # A single op of torch wraps; the mask then undoes the arithmetic shift.
        torch.mul(c0, _MULTIPLIERS[0], out=p0)
        torch.mul(c2, _MULTIPLIERS[1], out=p1)
        # c1 and c3 keep garbage above bit 31: the mask on the words that they are xored into removes it.
        torch.bitwise_right_shift(p1, 32, out=c0).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(_MASK)
        torch.bitwise_right_shift(p0, 32, out=c2).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(_MASK)
        c1, c3, p0, p1 = p1, p0, c1, c3
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    torch.bitwise_or(c0, c1.bitwise_left_shift_(32), out=out[:, 0])
    torch.bitwise_or(c2, c3.bitwise_left_shift_(32), out=out[:, 1])


def _signed(word: int, bits: int) -> int:
    """The low ``bits`` bits of ``word`` as a signed number."""
    half = 1 << (bits - 1)
    return (word + half) % (2 * half) - half


def _random_bits_cpu(key: Tensor, stream: int, n: int) -> Tensor:
    # This is the kernel: it reads the key when it runs, as a CUDA kernel does. A trace never comes here.
    k0, k1, first = (*key.tolist(), 0)[:3]
    k0, k1, blocks = k0 & _MASK, k1 & _MASK, -(-n // 4)
    if blocks <= _FEW_BLOCKS:
        low = (((first + i) & _MASK, (first + i) >> 32 & _MASK) for i in range(blocks))
        high = (stream & _MASK, stream >> 32 & _MASK)
        words = [_signed(word, 32) for pair in low for word in _philox(*pair, *high, k0, k1)]
        return torch.tensor(words[:n], dtype=torch.int32, device="cpu")
    out = torch.empty(4 * blocks, dtype=torch.int32, device="cpu")
    pairs = out.view(torch.int64).view(blocks, 2)
    for start in range(0, blocks, _CHUNK_BLOCKS):
        _philox_chunk(pairs[start : start + _CHUNK_BLOCKS], _signed(first + start, 64), stream, k0, k1)
    return out if n == 4 * blocks else out[:n].clone()


def _random_bits_cuda(key: Tensor, stream: int, n: int) -> Tensor:
    # Imported at the first draw on CUDA: builds of torch for the CPU come without triton.
    from functional_cg._philox_triton import random_bits_cuda

    return random_bits_cuda(key, stream, n)


def _random_bits_fake(key: Tensor, stream: int, n: int) -> Tensor:
    return key.new_empty((n,), dtype=torch.int32)


def decompose_random_bits(key: Tensor, stream: int, n: int) -> Tensor:
    """Compute ``fcg::random_bits`` from plain ATen ops, bit for bit: for compilers that fuse.

    Args:
      key: i64[..., 2], or i64[..., 3] whose third number is the first block; leading axes are batched.
      stream: The two upper counter words, as one 64-bit integer.
      n: Number of 32-bit words.

    Returns:
      i32[..., n].

    Example:
      >>> torch.equal(decompose_random_bits(key(0), 5, 7), bits(key(0), 7, stream=5))
      True
    """
    block = torch.arange(-(-n // 4), device=key.device)
    if key.shape[-1] == 3:
        block = block + key[..., 2:3]
    low, high = block & _MASK, (block >> 32) & _MASK
    k0, k1 = key[..., 0:1] & _MASK, key[..., 1:2] & _MASK
    words = torch.stack(_philox(low, high, stream & _MASK, stream >> 32 & _MASK, k0, k1), dim=-1)
    return words.flatten(-2)[..., :n].to(torch.int32)


def _random_bits_vmap(info: Any, in_dims: Any, key: Tensor, stream: int, n: int) -> tuple[Tensor, int]:
    return decompose_random_bits(key.movedim(in_dims[0], 0), stream, n), 0


# A draw is a function of its arguments: no tag calls it nondeterministic. Words are int32: half the memory of
# int64, and viewed as int16 or int64 for free where a draw needs 16 or 64 bits. `torch.library.custom_op`
# would cost three times as much a call.
_LIBRARY = torch.library.Library("fcg", "FRAGMENT")
_LIBRARY.define("random_bits(Tensor key, int stream, int n) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.impl("random_bits", _random_bits_cpu, "CPU")
_LIBRARY.impl("random_bits", _random_bits_cuda, "CUDA")
torch.library.register_fake("fcg::random_bits", _random_bits_fake, lib=_LIBRARY)
torch.library.register_vmap("fcg::random_bits", _random_bits_vmap, lib=_LIBRARY)
_random_bits: Callable[[Tensor, int, int], Tensor] = torch.ops.fcg.random_bits.default


def _describe(value: object) -> str:
    if not isinstance(value, Tensor):
        # The repr of a whole state would read its values, which a step refuses with another error.
        reads = any(isinstance(leaf, Tensor) for leaf in leaves(value))
        return type(value).__name__ if reads else f"{type(value).__name__} {value!r}"
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}@{value.device}"


def check_key(key: object) -> None:
    if not isinstance(key, Tensor):
        raise TypeError(f"`key`: expected a key, got {_describe(key)}. To fix: make one with `key(seed)`.")
    if key.dtype != torch.int64 or key.shape != (2,):
        rows = [f"key  expected int64[2]   got {_describe(key)}"]
        fix = "pass one key, from `key(seed)`, or one row of `split(key, n)`."
        raise LayoutError.of("", "this is not a random key.", rows=rows, fix=fix)


def _check_operand(name: str, value: object, key: Tensor) -> None:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        raise TypeError(f"`{name}`: expected a floating tensor, got {_describe(value)}.")
    if value.device != key.device:
        rows = [f"{name}  expected a tensor on {key.device}, like the key   got {_describe(value)}"]
        fix = "move one of them outside of the step; a copy between devices cannot be captured."
        raise LayoutError.of("", "key and operand are on two devices.", rows=rows, fix=fix)


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    # A tensor is refused before it is compared: the comparison would read it on the host.
    if not isinstance(value, int):
        raise TypeError(f"`{name}`: expected a Python int, got {_describe(value)}.")
    if not low <= value <= high:
        raise ValueError(f"`{name}`: expected an integer from {low} to {high}, got {value}.")


def _check_floating(dtype: object) -> None:
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"`dtype`: expected a floating dtype, got {dtype}.")


def _check_probability(p: object) -> None:
    if not isinstance(p, float | int) or not 0 <= p <= 1:
        raise ValueError(f"`p`: expected a Python number from 0 to 1, got {_describe(p)}.")


def _check_broadcast(p: Tensor, shape: Sequence[int]) -> None:
    # A longer `p` would broadcast the draw instead: all its rows would share one.
    sizes = zip(reversed(p.shape), reversed(shape), strict=False)
    if p.ndim > len(shape) or any(size not in (1, wanted) for size, wanted in sizes):
        rows = [f"p  expected a shape that broadcasts to {list(shape)}   got {_describe(p)}"]
        raise LayoutError.of("", "`p` does not broadcast to `shape`.", rows=rows, fix="pass `p.shape`.")


def _numel(shape: object) -> int:
    if not isinstance(shape, Sequence):
        raise TypeError(f"`shape`: expected a tuple of integers, got {_describe(shape)}.")
    for size in shape:
        _check_integer("shape", size, 0, 2**63 - 1)
    return math.prod(shape)


def _words64(key: Tensor, n: int, stream: int) -> Tensor:
    """i64[n] of 64 random bits each; the first of two words is the low half."""
    words = bits(key, 2 * n, stream=stream)
    if not is_batched(words):
        return words.view(torch.int64)
    low, high = words.unflatten(-1, (n, 2)).to(torch.int64).unbind(-1)  # torch 2.11 cannot view under vmap
    both: Tensor = (low & 0xFFFFFFFF) | (high << 32)
    return both


def half_words(key: Tensor, n: int, stream: int = 0, start: int | None = None) -> Tensor:
    """i16[n] of 16 random bits each, from number ``start`` on; the first of two is the low half of a word."""
    if start is not None:
        both = bits(key, n // 2 + 1, stream=stream, start=start // 2).view(torch.int16)
        return both.narrow(0, start % 2, n)
    words = bits(key, (n + 1) // 2, stream=stream)
    if not is_batched(words):
        return words.view(torch.int16)[:n]
    return torch.stack([(words << 16) >> 16, words >> 16], dim=-1).flatten(-2)[..., :n].to(torch.int16)


def _unit64(key: Tensor, n: int, stream: int) -> Tensor:
    """f64[n], uniform on the multiples of 2**-53 in [0, 1)."""
    return ((_words64(key, n, stream) >> 11) & (2**53 - 1)).to(torch.float64) * 2.0**-53


def key(seed: int, device: torch.device | str | None = None) -> Tensor:
    """Make a key from a seed: i64[2], the low and the high 32 bits.

    Args:
      seed: Any 64-bit integer, signed or not; neighbouring seeds are as good as distant ones.
      device: Where the key lives (default: torch's default device).

    Raises:
      TypeError, ValueError: If ``seed`` is not a Python int of 64 bits.

    Example:
      >>> key(2**32 + 5)
      tensor([5, 1])
    """
    _check_integer("seed", seed, -(2**63), 2**64 - 1)
    # Two fills, not `torch.tensor`: a copy from the host could not be captured.
    words = (seed & _MASK, seed >> 32 & _MASK)
    return torch.stack([torch.full((), word, dtype=torch.int64, device=device) for word in words])


def fold_in(key: Tensor, data: int | Tensor) -> Tensor:
    """Derive a key, i64[2], from a key and a number.

    Args:
      key: i64[2].
      data: A Python int of 64 bits, or an integer tensor i*[] on the key's device, such as ``state.step``.

    Raises:
      LayoutError: If ``key`` is not an i64[2], or the tensor ``data`` is not an i*[] on its device.
      TypeError, ValueError: If ``data`` is neither a tensor nor a Python int of 64 bits.

    Example:
      >>> torch.equal(fold_in(key(0), 7), fold_in(key(0), torch.tensor(7)))
      True
    """
    check_key(key)
    if not isinstance(data, Tensor):
        _check_integer("data", data, -(2**63), 2**64 - 1)
        first = torch.full((1,), _signed(data, 64), dtype=torch.int64, device=key.device)
    elif data.ndim or data.device != key.device or data.dtype not in _INTEGERS:
        rows = [f"data  expected an integer tensor [] on {key.device}   got {_describe(data)}"]
        fix = "pass a Python int, or one integer such as `state.step`."
        raise LayoutError.of("", "a key folds in one integer.", rows=rows, fix=fix)
    else:
        first = data.to(torch.int64).reshape(1)
    return _random_bits(torch.cat([key, first]), DERIVE, 2).to(torch.int64) & _MASK


def split(key: Tensor, n: int = 2) -> Tensor:
    """Derive ``n`` keys, i64[n, 2]; ``split(key, n)[i]`` is ``fold_in(key, i)``.

    Raises:
      LayoutError: If ``key`` is not an i64[2].
      TypeError, ValueError: If ``n`` is not a Python int of at least 0.

    Example:
      >>> first, second = split(key(0))
      >>> torch.equal(second, fold_in(key(0), 1))
      True
    """
    check_key(key)
    _check_integer("n", n, 0, 2**61)
    return _random_bits(key, DERIVE, 4 * n).view(n, 4)[:, :2].to(torch.int64) & _MASK


def bits(key: Tensor, n: int, *, stream: int = 0, start: int | None = None) -> Tensor:
    """Draw ``n`` words of 32 random bits, i32[n]; with ``start``, from that word on.

    Word ``4 * i + j`` is output ``j`` of Philox for the counter ``(i, stream)``, two words each, low word first:
    a longer draw begins with the shorter one, one with a ``start`` is a part of it, and two streams share no counter.

    Raises:
      LayoutError: If ``key`` is not an i64[2].
      TypeError, ValueError: If ``n``, ``stream`` or ``start`` is not a Python int of at least 0.

    Example:
      >>> [f"{word & 0xFFFFFFFF:08x}" for word in bits(key(0), 4).tolist()]
      ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    check_key(key)
    _check_integer("n", n, 0, 2**63 - 1)
    _check_integer("stream", stream, 0, 2**63 - 1)
    if start is not None:
        _check_integer("start", start, 0, 2**63 - 1)
        # One program for each start: ranks that draw parts of one leaf run the same calls on the same shapes.
        first = torch.full((1,), start // 4, dtype=torch.int64, device=key.device)
        return _random_bits(torch.cat([key, first]), stream, n + 3).narrow(0, start % 4, n)
    return _random_bits(key, stream, n)


def _round_down(value: float, dtype: torch.dtype, *, strict: bool) -> float:
    """The largest number of ``dtype`` that is at most ``value``, or below it if ``strict``."""
    info = torch.finfo(dtype)
    mantissa, exponent = math.frexp(value)
    # Just below a power of two the numbers lie twice as dense; near zero, as dense as the subnormal ones.
    spacing = math.ldexp(info.eps, exponent - (2 if mantissa == 0.5 else 1)) if value else 0.0
    spacing = max(spacing, info.tiny * info.eps)
    return (math.ceil(value / spacing) - 1 if strict else math.floor(value / spacing)) * spacing


def _bounds(low: float, high: float, dtype: torch.dtype) -> tuple[float, float]:
    """The smallest and the largest number of ``dtype`` in [low, high)."""
    limit = torch.finfo(dtype).max
    if not (low < high and max(-low, high, high - low) <= limit):
        raise ValueError(f"expected low < high, at most {limit:.4g} apart ({dtype}), got [{low}, {high}).")
    smallest = -_round_down(-low, dtype, strict=False)
    largest = _round_down(high, dtype, strict=True)
    if smallest > largest:
        raise ValueError(f"[{low}, {high}) holds no number of {dtype}. To fix: use a wider range or dtype.")
    return smallest, largest


def uniform(
    key: Tensor,
    shape: Sequence[int],
    *,
    low: float = 0.0,
    high: float = 1.0,
    dtype: torch.dtype = torch.float32,
    stream: int = 0,
) -> Tensor:
    """Draw uniformly from [low, high).

    24 random bits an element (53 for float64), scaled in float32 (float64), rounded to ``dtype`` and kept
    inside: no result is below ``low``, and none is ``high``, in any dtype. Compiled, a result that is scaled to other
    bounds than 0 and 1 may differ in its last bit.

    Raises:
      LayoutError: If ``key`` is not an i64[2].
      TypeError: If ``shape`` is not a tuple of Python ints, or ``dtype`` is not floating.
      ValueError: If [low, high) is empty, infinite, or holds no number of ``dtype``.

    Example:
      >>> bool((uniform(key(0), (1000,), dtype=torch.bfloat16) < 1).all())
      True
    """
    _check_floating(dtype)
    n, (smallest, largest) = _numel(shape), _bounds(low, high, dtype)
    if dtype == torch.float64:
        unit = _unit64(key, n, stream)
    else:
        unit = ((bits(key, n, stream=stream) >> 8) & 0xFFFFFF).to(torch.float32) * 2.0**-24
    if (low, high) != (0.0, 1.0):
        # The clamp changes no value: it keeps most compilers from rounding product and sum only once.
        unit = (unit * (high - low)).clamp(max=high - low) + low
    return unit.to(dtype).clamp(smallest, largest).view(shape)


def normal(
    key: Tensor,
    shape: Sequence[int],
    *,
    mean: float = 0.0,
    std: float = 1.0,
    dtype: torch.dtype = torch.float32,
    stream: int = 0,
) -> Tensor:
    """Draw from the normal distribution, by the method of Box and Muller in float64, rounded to ``dtype``.

    The bits are the same everywhere, but logarithm, sine and cosine are not: between CPU and CUDA, or eager
    and compiled, the value in float64 differs by at most ``1e-13 * (|mean| + |std|)``, and the rounded result
    by that and one unit in the last place. Values lie within 8.6 standard deviations.

    Raises:
      LayoutError: If ``key`` is not an i64[2].
      TypeError: If ``shape`` is not a tuple of Python ints, or ``dtype`` is not floating.

    Example:
      >>> normal(key(0), (2, 3)).shape
      torch.Size([2, 3])
    """
    _check_floating(dtype)
    n = _numel(shape)
    half = (n + 1) // 2
    unit = _unit64(key, 2 * half, stream)
    radius = (torch.log1p(-unit[:half]) * -2.0).sqrt()
    angle = unit[half:] * math.tau
    draws = torch.cat([radius * angle.cos(), radius * angle.sin()])[:n]
    return (draws * std + mean).to(dtype).view(shape)


def bernoulli(key: Tensor, p: float | Tensor, shape: Sequence[int], *, stream: int = 0) -> Tensor:
    """Draw booleans that are true with probability ``p``, to within 2**-32.

    Args:
      key: i64[2].
      p: A Python number from 0 to 1, or a floating tensor on the key's device that broadcasts to ``shape``,
        whose values are not checked: below 0 means never, above 1 always.
      shape: Shape of the result.
      stream: Part of the counter.

    Raises:
      LayoutError: If ``key`` is not an i64[2], or ``p`` is on another device or does not broadcast.
      TypeError: If ``p`` is a tensor but not floating, or ``shape`` is not a tuple of Python ints.
      ValueError: If ``p`` is not a tensor and not a Python number from 0 to 1.

    Example:
      >>> bernoulli(key(0), 1.0, (3,))
      tensor([True, True, True])
    """
    check_key(key)
    if isinstance(p, Tensor):
        _check_operand("p", p, key)
        _check_broadcast(p, shape)
        p = p.detach().to(torch.float64)
    else:
        _check_probability(p)
    words = bits(key, _numel(shape), stream=stream).view(shape)
    if isinstance(p, Tensor):
        return (words.to(torch.float64) + 2.0**31) * 2.0**-32 < p
    return words <= math.ceil(p * 2**32) - 2**31 - 1 if p else torch.zeros_like(words, dtype=torch.bool)


def randint(
    key: Tensor,
    shape: Sequence[int],
    low: int,
    high: int,
    *,
    dtype: torch.dtype = torch.int64,
    stream: int = 0,
) -> Tensor:
    """Draw integers from low to high - 1, at most 2**63 of them.

    A 64-bit number times the range, keeping the high half of the 128-bit product; nothing is rejected. A
    probability is off by less than 2**-64, that is by (high - low) * 2**-64 of itself.

    Raises:
      LayoutError: If ``key`` is not an i64[2].
      TypeError: If ``low`` or ``high`` is not a Python int, or ``dtype`` not an integer dtype.
      ValueError: If the range is empty, longer than 2**63, or does not fit ``dtype`` and int64.

    Example:
      >>> randint(key(0), (100,), 0, 6).max()
      tensor(5)
    """
    if dtype not in _INTEGERS:
        raise TypeError(f"`dtype`: expected an integer dtype, got {dtype}.")
    limits = torch.iinfo(dtype)
    _check_integer("low", low, limits.min, min(limits.max, 2**63 - 1))
    _check_integer("high", high, low + 1, min(limits.max + 1, 2**63, low + 2**63))
    words = _words64(key, _numel(shape), stream)
    word_low, word_high = words & _MASK, (words >> 32) & _MASK
    range_low, range_high = (high - low) & _MASK, (high - low) >> 32
    high0, low0 = _multiply(word_high, range_low)
    high1, low1 = _multiply(word_low, range_high)
    carry = (_multiply(word_low, range_low)[0] + low0 + low1) >> 32
    draws: Tensor = word_high * range_high + high0 + high1 + carry + low
    return draws.to(dtype).view(shape)


def permutation(key: Tensor, n: int, *, stream: int = 0) -> Tensor:
    """Draw a permutation of 0 to n - 1, i64[n], by a stable sort of 64-bit numbers.

    Two of these are equal with a probability below n**2 / 2**65; only then is the order biased.

    Raises:
      LayoutError: If ``key`` is not an i64[2].
      TypeError, ValueError: If ``n`` is not a Python int of at least 0.

    Example:
      >>> permutation(key(0), 5).sort().values
      tensor([0, 1, 2, 3, 4])
    """
    _check_integer("n", n, 0, 2**61)
    return torch.argsort(_words64(key, n, stream), stable=True)


def dropout(key: Tensor, x: Tensor, p: float, *, stream: int = 0) -> Tensor:
    """Set each element of ``x`` to zero with probability ``p``, and scale the others so that the mean stays.

    A decision takes 16 bits: the probability is p' = round(p * 65536) / 65536 and the scale 1 / (1 - p').
    Which elements are dropped depends on the key and on ``p``, not on the values; a dropped NaN stays NaN, as
    in torch. ``p = 0`` gives ``x`` itself, ``p = 1`` zeros. Differentiable in ``x``.

    Raises:
      LayoutError: If ``key`` is not an i64[2], or ``x`` is on another device.
      TypeError: If ``x`` is not a floating tensor.
      ValueError: If ``p`` is not a Python number from 0 to 1.

    Example:
      >>> dropout(key(0), torch.ones(6), 0.5).unique()
      tensor([0., 2.])
    """
    _check_probability(p)
    check_key(key)
    _check_operand("x", x, key)
    dropped = round(p * 65536)
    if dropped == 0:
        return x
    mask = keep_mask(key, p, x.shape, stream=stream)
    return masked_scale(x, mask, 65536 / max(65536 - dropped, 1))


def keep_mask(key: Tensor, p: float, shape: Sequence[int], *, stream: int = 0) -> Tensor:
    """What :func:`dropout` keeps: booleans that are false with probability round(p * 65536) / 65536.

    Half the work of :func:`bernoulli`, which is exact to 2**-32.

    Example:
      >>> keep_mask(key(0), 0.0, (3,))
      tensor([True, True, True])
    """
    halves = half_words(key, _numel(shape), stream).view(shape)
    dropped = round(p * 65536)
    return halves > dropped - 1 - 32768 if dropped else torch.ones_like(halves, dtype=torch.bool)


def categorical(key: Tensor, logits: Tensor, axis: int = -1, *, stream: int = 0) -> Tensor:
    """Draw indices, i64, with probabilities ``softmax(logits, axis)``, by the Gumbel-max trick in float64.

    A logit of minus infinity is never drawn if another one is finite. CPU and CUDA agree unless the two best
    sums of logit and noise are within 1e-13 of each other.

    Raises:
      LayoutError: If ``key`` is not an i64[2], or ``logits`` is on another device.
      TypeError: If ``logits`` is not a floating tensor.

    Example:
      >>> categorical(key(0), torch.tensor([[0.0, -torch.inf], [-torch.inf, 0.0]]))
      tensor([0, 1])
    """
    check_key(key)
    _check_operand("logits", logits, key)
    # The bound keeps the noise finite: an infinite one would meet a logit of minus infinity as NaN.
    exponential = (-torch.log1p(-_unit64(key, logits.numel(), stream))).clamp(min=2.0**-54)
    return torch.argmax(logits.detach().to(torch.float64) - exponential.log().view(logits.shape), dim=axis)
