"""Keys, and draws from the distributions that need few formulas; see the package for what a key is."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import LayoutError
from ..messages.tracebacks import entry
from .arguments import (
    bounds,
    check_broadcast,
    check_floating,
    check_integer,
    check_key,
    check_operand,
    check_probability,
    describe,
    numel,
)
from .masking import masked_scale
from .words import (
    MASK,
    bits,
    exponential64,
    half_words,
    multiply,
    random_bits,
    signed,
    unit64,
    words64,
)

__all__ = [
    "bernoulli",
    "categorical",
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

_INTEGERS = (
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
)
# Keys are derived on a stream that no draw may use, so a draw and a derived key never share a counter.
DERIVE = -1


@entry()
def key(seed: int, device: torch.device | str | None = None) -> Tensor:
    """Make a key from a seed: i64[2], the low and the high 32 bits.

    Args:
      seed: Any 64-bit integer, signed or not; neighbouring seeds are as good as distant ones.
      device: Where the key lives (default: torch's default device).

    Raises:
      TypeError, ValueError: If ``seed`` is not a Python int of 64 bits.

    Example:
      >>> from functional_cg.random import key
      >>> key(2**32 + 5)
      tensor([5, 1])
    """
    check_integer("seed", seed, -(2**63), 2**64 - 1)
    # Two fills, not `torch.tensor`: a copy from the host could not be captured.
    words = (seed & MASK, seed >> 32 & MASK)
    return torch.stack([torch.full((), word, dtype=torch.int64, device=device) for word in words])


@entry()
def fold_in(key: Tensor, data: int | Tensor) -> Tensor:
    """Derive a key, i64[2], from a key and a number.

    Args:
      key: i64[2].
      data: A Python int of 64 bits, or an integer tensor i*[] on the key's device, such as ``state.step``.

    Raises:
      LayoutError: If ``key`` is not an i64[2], or the tensor ``data`` is not an i*[] on its device.
      TypeError, ValueError: If ``data`` is neither a tensor nor a Python int of 64 bits.

    Example:
      >>> import torch
      >>> from functional_cg.random import fold_in, key
      >>> torch.equal(fold_in(key(0), 7), fold_in(key(0), torch.tensor(7)))
      True
    """
    check_key(key, data)
    if not isinstance(data, Tensor):
        check_integer("data", data, -(2**63), 2**64 - 1)
        first = torch.full((1,), signed(data, 64), dtype=torch.int64, device=key.device)
    elif data.ndim or data.device != key.device or data.dtype not in _INTEGERS:
        rows = [f"data  expected an integer tensor [] on {key.device}   got {describe(data)}"]
        fix = "pass a Python int, or one integer such as `state.step`."
        raise LayoutError.of("", "a key folds in one integer.", rows=rows, fix=fix)
    else:
        first = data.to(torch.int64).reshape(1)
    return random_bits(torch.cat([key, first]), DERIVE, 2).to(torch.int64) & MASK


@entry()
def split(key: Tensor, n: int = 2) -> Tensor:
    """Derive ``n`` keys, i64[n, 2]; ``split(key, n)[i]`` is ``fold_in(key, i)``.

    Raises:
      LayoutError: If ``key`` is not an i64[2].
      TypeError, ValueError: If ``n`` is not a Python int of at least 0.

    Example:
      >>> import torch
      >>> from functional_cg.random import fold_in, key, split
      >>> first, second = split(key(0))
      >>> torch.equal(second, fold_in(key(0), 1))
      True
    """
    check_key(key)
    check_integer("n", n, 0, 2**61)
    return random_bits(key, DERIVE, 4 * n).view(n, 4)[:, :2].to(torch.int64) & MASK


@entry()
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

    Each element takes 24 random bits (53 for float64), scaled in float32 (float64), rounded to ``dtype`` and
    clamped: in no dtype is a result below ``low`` or equal to ``high``. In compiled code, results with bounds
    other than 0 and 1 may differ in the last bit.

    Raises:
      LayoutError: If ``key`` is not an i64[2].
      TypeError: If ``shape`` is not a tuple of Python ints, or ``dtype`` is not floating.
      ValueError: If [low, high) is empty, infinite, or holds no number of ``dtype``.

    Example:
      >>> import torch
      >>> from functional_cg.random import key, uniform
      >>> bool((uniform(key(0), (1000,), dtype=torch.bfloat16) < 1).all())
      True
    """
    check_floating(dtype)
    n, (smallest, largest) = numel(shape), bounds(low, high, dtype)
    if dtype == torch.float64:
        unit = unit64(key, n, stream)
    else:
        unit = ((bits(key, n, stream=stream) >> 8) & 0xFFFFFF).to(torch.float32) * 2.0**-24
    if (low, high) != (0.0, 1.0):
        # The clamp changes no value, but keeps most compilers from rounding product and sum only once.
        unit = (unit * (high - low)).clamp(max=high - low) + low
    return unit.to(dtype).clamp(smallest, largest).view(shape)


@entry()
def normal(
    key: Tensor,
    shape: Sequence[int],
    *,
    mean: float = 0.0,
    std: float = 1.0,
    dtype: torch.dtype = torch.float32,
    stream: int = 0,
) -> Tensor:
    """Draw from the normal distribution, by the Box-Muller method in float64, rounded to ``dtype``.

    The bits are the same everywhere, but logarithm, sine and cosine are not: between CPU and CUDA, or eager
    and compiled code, the float64 value differs by at most ``1e-13 * (|mean| + |std|)``, and the rounded
    result by that plus one unit in the last place. Values lie within 8.6 standard deviations.

    Raises:
      LayoutError: If ``key`` is not an i64[2].
      TypeError: If ``shape`` is not a tuple of Python ints, or ``dtype`` is not floating.

    Example:
      >>> from functional_cg.random import key, normal
      >>> normal(key(0), (2, 3)).shape
      torch.Size([2, 3])
    """
    check_floating(dtype)
    n = numel(shape)
    half = (n + 1) // 2
    unit = unit64(key, 2 * half, stream)
    radius = (torch.log1p(-unit[:half]) * -2.0).sqrt()
    angle = unit[half:] * math.tau
    draws = torch.cat([radius * angle.cos(), radius * angle.sin()])[:n]
    return (draws * std + mean).to(dtype).view(shape)


@entry()
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
      >>> from functional_cg.random import bernoulli, key
      >>> bernoulli(key(0), 1.0, (3,))
      tensor([True, True, True])
    """
    check_key(key)
    if isinstance(p, Tensor):
        check_operand("p", p, key)
        check_broadcast("p", p, shape)
        p = p.detach().to(torch.float64)
    else:
        check_probability(p)
    words = bits(key, numel(shape), stream=stream).view(shape)
    if isinstance(p, Tensor):
        return (words.to(torch.float64) + 2.0**31) * 2.0**-32 < p
    return words <= math.ceil(p * 2**32) - 2**31 - 1 if p else torch.zeros_like(words, dtype=torch.bool)


@entry()
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

    Multiplies a 64-bit number by the range and keeps the high half of the 128-bit product, without rejection.
    Each probability is off by less than 2**-64, a relative error of (high - low) * 2**-64.

    Raises:
      LayoutError: If ``key`` is not an i64[2].
      TypeError: If ``low`` or ``high`` is not a Python int, or ``dtype`` not an integer dtype.
      ValueError: If the range is empty, longer than 2**63, or does not fit ``dtype`` and int64.

    Example:
      >>> from functional_cg.random import key, randint
      >>> randint(key(0), (100,), 0, 6).max()
      tensor(5)
    """
    if dtype not in _INTEGERS:
        raise TypeError(f"`dtype`: expected an integer dtype, got {dtype}.\nTo fix: `dtype=torch.int64`.")
    limits = torch.iinfo(dtype)
    check_integer("low", low, limits.min, min(limits.max, 2**63 - 1))
    check_integer("high", high, low + 1, min(limits.max + 1, 2**63, low + 2**63))
    words = words64(key, numel(shape), stream)
    word_low, word_high = words & MASK, (words >> 32) & MASK
    range_low, range_high = (high - low) & MASK, (high - low) >> 32
    high0, low0 = multiply(word_high, range_low)
    high1, low1 = multiply(word_low, range_high)
    carry = (multiply(word_low, range_low)[0] + low0 + low1) >> 32
    draws: Tensor = word_high * range_high + high0 + high1 + carry + low
    return draws.to(dtype).view(shape)


@entry()
def permutation(key: Tensor, n: int, *, stream: int = 0) -> Tensor:
    """Draw a permutation of 0 to n - 1, i64[n], by a stable sort of 64-bit numbers.

    Two of them are equal with a probability below n**2 / 2**65; only then is the order biased.

    Raises:
      LayoutError: If ``key`` is not an i64[2].
      TypeError, ValueError: If ``n`` is not a Python int of at least 0.

    Example:
      >>> from functional_cg.random import key, permutation
      >>> permutation(key(0), 5).sort().values
      tensor([0, 1, 2, 3, 4])
    """
    check_integer("n", n, 0, 2**61)
    return torch.argsort(words64(key, n, stream), stable=True)


@entry()
def dropout(key: Tensor, x: Tensor, p: float, *, stream: int = 0) -> Tensor:
    """Set each element of ``x`` to zero with probability ``p``, and scale the others to preserve the mean.

    Each decision takes 16 bits: the probability is p' = round(p * 65536) / 65536, the scale 1 / (1 - p').
    Which elements are dropped depends on the key and on ``p``, not on the values; a dropped NaN stays NaN, as
    in torch. ``p = 0`` returns ``x`` itself, ``p = 1`` zeros. Differentiable in ``x``.

    Raises:
      LayoutError: If ``key`` is not an i64[2], or ``x`` is on another device.
      TypeError: If ``x`` is not a floating tensor.
      ValueError: If ``p`` is not a Python number from 0 to 1.

    Example:
      >>> import torch
      >>> from functional_cg.random import dropout, key
      >>> dropout(key(0), torch.ones(6), 0.5).unique()
      tensor([0., 2.])
    """
    check_probability(p)
    check_key(key)
    check_operand("x", x, key)
    dropped = round(p * 65536)
    if dropped == 0:
        return x
    mask = keep_mask(key, p, x.shape, stream=stream)
    return masked_scale(x, mask, 65536 / max(65536 - dropped, 1))


@entry()
def keep_mask(key: Tensor, p: float, shape: Sequence[int], *, stream: int = 0) -> Tensor:
    """Draw the mask of :func:`dropout`: booleans that are false with probability round(p * 65536) / 65536.

    Takes half the work of :func:`bernoulli`, which is exact to 2**-32.

    Example:
      >>> from functional_cg.random import keep_mask, key
      >>> keep_mask(key(0), 0.0, (3,))
      tensor([True, True, True])
    """
    halves = half_words(key, numel(shape), stream).view(shape)
    dropped = round(p * 65536)
    return halves > dropped - 1 - 32768 if dropped else torch.ones_like(halves, dtype=torch.bool)


@entry()
def categorical(key: Tensor, logits: Tensor, axis: int = -1, *, stream: int = 0) -> Tensor:
    """Draw indices, i64, with probabilities ``softmax(logits, axis)``, by the Gumbel-max trick in float64.

    A logit of minus infinity is never drawn if another one is finite. CPU and CUDA agree unless the two best
    sums of logit and noise are within 1e-13 of each other.

    Raises:
      LayoutError: If ``key`` is not an i64[2], or ``logits`` is on another device.
      TypeError: If ``logits`` is not a floating tensor.

    Example:
      >>> import torch
      >>> from functional_cg.random import categorical, key
      >>> categorical(key(0), torch.tensor([[0.0, -torch.inf], [-torch.inf, 0.0]]))
      tensor([0, 1])
    """
    check_key(key)
    check_operand("logits", logits, key)
    # Never zero, so the noise is finite: infinite noise and a logit of minus infinity would give NaN.
    noise = exponential64(key, logits.numel(), stream).log().view(logits.shape)
    return torch.argmax(logits.detach().to(torch.float64) - noise, dim=axis)
