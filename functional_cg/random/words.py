"""The op ``fcg::random_bits``: words of Philox4x32-10 for a key, with its kernels and its decomposition.

Source: Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3" (SC).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..tensors.aten import is_batched
from .arguments import check_integer, check_key

__all__ = [
    "MASK",
    "SMALLEST",
    "bits",
    "decompose_random_bits",
    "exponential64",
    "half_words",
    "multiply",
    "random_bits",
    "signed",
    "unit64",
    "words64",
]

MASK = 0xFFFFFFFF
SMALLEST = 2.0**-54  # stands for a uniform number of zero
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
# 65,536 blocks are 3 MB of scratch: within the L2 cache, and enough for torch to use two threads for one op.
_CHUNK_BLOCKS = 65_536
# Below this a hundred ops on tiny tensors cost more than the arithmetic in Python integers.
_FEW_BLOCKS = 8


# ``Any``: the arithmetic of the next three functions is the same for Python integers and for tensors.
def _product(word: Any, factor: int) -> tuple[Any, Any]:
    """Return the high word of the product of two words, and what has its low word in the low 32 bits; no overflow.

    A C++ compiler may assume that an int64 never overflows, and drop the masks that would repair it.
    """
    if factor < 2**31:
        product = word * factor
        return product >> 32, product
    product = word * (factor - 2**32)
    return (product >> 32) + word, product


def multiply(word: Any, factor: int) -> tuple[Any, Any]:
    """Return the high and the low word of the product of two words, without overflow."""
    high, product = _product(word, factor)
    return high, product & MASK


def _philox(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> tuple[Any, Any, Any, Any]:
    for _ in range(_ROUNDS):
        (high0, low0), (high1, low1) = _product(c0, _MULTIPLIERS[0]), _product(c2, _MULTIPLIERS[1])
        # c1, c3 and the keys have more than a word: the mask on the words that they are xored into removes it.
        c0, c1, c2, c3 = (high1 ^ c1 ^ k0) & MASK, low1, (high0 ^ c3 ^ k1) & MASK, low0
        k0, k1 = k0 + _WEYL[0], k1 + _WEYL[1]
    return c0, c1 & MASK, c2, c3 & MASK


def _philox_chunk(out: Tensor, first: int, stream: int, k0: int, k1: int) -> None:
    """Fill ``out`` (i64[blocks, 2], two words per element) from block ``first`` on, in place."""
    block = torch.arange(len(out), device="cpu").add_(first)
    c0, c1, c2, c3, p0, p1 = torch.empty((6, len(out)), dtype=torch.int64, device="cpu").unbind()
    torch.bitwise_and(block, MASK, out=c0)
    torch.bitwise_right_shift(block, 32, out=c1).bitwise_and_(MASK)
    c2.fill_(stream & MASK)
    c3.fill_(stream >> 32 & MASK)
    for _ in range(_ROUNDS):
        # A single torch op wraps on overflow; the mask then undoes the arithmetic shift.
        torch.mul(c0, _MULTIPLIERS[0], out=p0)
        torch.mul(c2, _MULTIPLIERS[1], out=p1)
        # c1 and c3 keep garbage above bit 31: the mask on the words that they are xored into removes it.
        torch.bitwise_right_shift(p1, 32, out=c0).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(MASK)
        torch.bitwise_right_shift(p0, 32, out=c2).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(MASK)
        c1, c3, p0, p1 = p1, p0, c1, c3
        k0, k1 = (k0 + _WEYL[0]) & MASK, (k1 + _WEYL[1]) & MASK
    torch.bitwise_or(c0, c1.bitwise_left_shift_(32), out=out[:, 0])
    torch.bitwise_or(c2, c3.bitwise_left_shift_(32), out=out[:, 1])


def signed(word: int, bits: int) -> int:
    """Return the low ``bits`` bits of ``word`` as a signed number."""
    half = 1 << (bits - 1)
    return (word + half) % (2 * half) - half


def _random_bits_cpu(key: Tensor, stream: int, n: int) -> Tensor:
    # This is the kernel: it reads the key when it runs, as a CUDA kernel does. A trace never comes here.
    k0, k1, first = (*key.tolist(), 0)[:3]
    k0, k1, blocks = k0 & MASK, k1 & MASK, -(-n // 4)
    if blocks <= _FEW_BLOCKS:
        low = (((first + i) & MASK, (first + i) >> 32 & MASK) for i in range(blocks))
        high = (stream & MASK, stream >> 32 & MASK)
        words = [signed(word, 32) for pair in low for word in _philox(*pair, *high, k0, k1)]
        return torch.tensor(words[:n], dtype=torch.int32, device="cpu")
    out = torch.empty(4 * blocks, dtype=torch.int32, device="cpu")
    pairs = out.view(torch.int64).view(blocks, 2)
    for start in range(0, blocks, _CHUNK_BLOCKS):
        _philox_chunk(pairs[start : start + _CHUNK_BLOCKS], signed(first + start, 64), stream, k0, k1)
    return out if n == 4 * blocks else out[:n].clone()


def _random_bits_cuda(key: Tensor, stream: int, n: int) -> Tensor:
    # Imported at the first draw on CUDA: CPU builds of torch come without triton.
    from functional_cg.tensors.philox_triton import random_bits_cuda

    return random_bits_cuda(key, stream, n)


def decompose_random_bits(key: Tensor, stream: int, n: int) -> Tensor:
    """Compute ``fcg::random_bits`` from plain ATen ops, bit for bit, so that compilers can fuse it.

    Args:
      key: i64[..., 2], or i64[..., 3] whose third number is the first block; leading axes are batched.
      stream: The two upper counter words, as one 64-bit integer.
      n: Number of 32-bit words.

    Returns:
      i32[..., n].

    Example:
      >>> import torch
      >>> from functional_cg.random.words import decompose_random_bits
      >>> from functional_cg.random import bits, key
      >>> torch.equal(decompose_random_bits(key(0), 5, 7), bits(key(0), 7, stream=5))
      True
    """
    block = torch.arange(-(-n // 4), device=key.device)
    if key.shape[-1] == 3:
        block = block + key[..., 2:3]
    low, high = block & MASK, (block >> 32) & MASK
    k0, k1 = key[..., 0:1] & MASK, key[..., 1:2] & MASK
    words = torch.stack(_philox(low, high, stream & MASK, stream >> 32 & MASK, k0, k1), dim=-1)
    return words.flatten(-2)[..., :n].to(torch.int32)


def _random_bits_vmap(info: Any, in_dims: Any, key: Tensor, stream: int, n: int) -> tuple[Tensor, int]:
    return decompose_random_bits(key.movedim(in_dims[0], 0), stream, n), 0


# A draw is a function of its arguments, so no tag calls it nondeterministic. Words are int32: half the memory
# of int64, and free to view as int16 or int64 where a draw needs 16 or 64 bits. `torch.library.custom_op`
# would make each call three times as expensive.
_LIBRARY = torch.library.Library("fcg", "FRAGMENT")
_LIBRARY.define("random_bits(Tensor key, int stream, int n) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.impl("random_bits", _random_bits_cpu, "CPU")
_LIBRARY.impl("random_bits", _random_bits_cuda, "CUDA")
torch.library.register_fake(
    "fcg::random_bits", lambda key, stream, n: key.new_empty((n,), dtype=torch.int32), lib=_LIBRARY
)
torch.library.register_vmap("fcg::random_bits", _random_bits_vmap, lib=_LIBRARY)
random_bits: Callable[[Tensor, int, int], Tensor] = torch.ops.fcg.random_bits.default


def bits(key: Tensor, n: int, *, stream: int = 0, start: int | None = None) -> Tensor:
    """Draw ``n`` words of 32 random bits, i32[n]; with ``start``, from that word on.

    Word ``4 * i + j`` is output ``j`` of Philox for the counter ``(i, stream)``, two words each, low word
    first. So a longer draw begins with the shorter one, a draw with a ``start`` is a part of it, and two
    streams share no counter.

    Raises:
      LayoutError: If ``key`` is not an i64[2].
      TypeError, ValueError: If ``n``, ``stream`` or ``start`` is not a Python int of at least 0.

    Example:
      >>> from functional_cg.random import bits, key
      >>> [f"{word & 0xFFFFFFFF:08x}" for word in bits(key(0), 4).tolist()]
      ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    check_key(key)
    check_integer("n", n, 0, 2**63 - 1)
    check_integer("stream", stream, 0, 2**63 - 1)
    if start is not None:
        check_integer("start", start, 0, 2**63 - 1)
        # The same calls on the same shapes for every start: ranks that draw parts of one leaf run one program.
        first = torch.full((1,), start // 4, dtype=torch.int64, device=key.device)
        return random_bits(torch.cat([key, first]), stream, n + 3).narrow(0, start % 4, n)
    return random_bits(key, stream, n)


def words64(key: Tensor, n: int, stream: int) -> Tensor:
    """Draw i64[n] of 64 random bits each; the first of two words is the low half."""
    words = bits(key, 2 * n, stream=stream)
    if not is_batched(words):
        return words.view(torch.int64)
    low, high = words.unflatten(-1, (n, 2)).to(torch.int64).unbind(-1)  # torch 2.11 cannot view under vmap
    both: Tensor = (low & 0xFFFFFFFF) | (high << 32)
    return both


def half_words(key: Tensor, n: int, stream: int = 0, start: int | None = None) -> Tensor:
    """Draw i16[n] of 16 random bits each, from number ``start`` on; the low half of a word comes first."""
    if start is not None:
        both = bits(key, n // 2 + 1, stream=stream, start=start // 2).view(torch.int16)
        return both.narrow(0, start % 2, n)
    words = bits(key, (n + 1) // 2, stream=stream)
    if not is_batched(words):
        return words.view(torch.int16)[:n]
    return torch.stack([(words << 16) >> 16, words >> 16], dim=-1).flatten(-2)[..., :n].to(torch.int16)


def unit64(key: Tensor, n: int, stream: int) -> Tensor:
    """Draw f64[n], uniform on the multiples of 2**-53 in [0, 1)."""
    return ((words64(key, n, stream) >> 11) & (2**53 - 1)).to(torch.float64) * 2.0**-53


def exponential64(key: Tensor, n: int, stream: int) -> Tensor:
    """Draw f64[n] from the exponential distribution of mean 1; no number is zero."""
    return (-torch.log1p(-unit64(key, n, stream))).clamp(min=SMALLEST)
