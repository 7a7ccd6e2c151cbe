"""Perturb numbers by ulps, in place: on the CPU, or with a CUDA kernel in one pass.

NVRTC compiles the kernel in a few hundredths of a second, while Triton would take half a second. This matters
because the kernel runs only in the first call.
"""

from __future__ import annotations

from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

__all__ = ["AWAY_FROM_ZERO", "DOWN", "MOVABLE", "TO_ZERO", "UP", "move"]

UP, DOWN, AWAY_FROM_ZERO, TO_ZERO = 1, 2, 3, 4  # 0 is any direction
_CHUNK = 2**22  # elements to perturb at a time on the CPU
_THREADS, _PER_THREAD = 256, 4
# dtype -> integer dtype of its size; mask of the last bits, which are zero in most exact and few rounded
# numbers; bits of infinity; its name in the kernel.
_FORMATS = MappingProxyType(
    {
        torch.float64: (torch.int64, 2**20 - 1, 0x7FF0_0000_0000_0000, "Float64"),
        torch.float32: (torch.int32, 2**10 - 1, 0x7F80_0000, "Float32"),
        torch.bfloat16: (torch.int16, 2**3 - 1, 0x7F80, "BFloat16"),
        torch.float16: (torch.int16, 2**4 - 1, 0x7C00, "Float16"),
    }
)
MOVABLE = frozenset(_FORMATS)
_SOURCE = r"""
struct Float64 {
  typedef long long Bits;
  typedef double Number;
  static __device__ Number number(Bits bits) { return __longlong_as_double(bits); }
  static __device__ Bits bits(Number x) { return __double_as_longlong(x); }
};

struct Float32 {
  typedef int Bits;
  typedef float Number;
  static __device__ Number number(Bits bits) { return __int_as_float(bits); }
  static __device__ Bits bits(Number x) { return __float_as_int(x); }
};

struct BFloat16 {
  typedef short Bits;
  typedef float Number;
  static __device__ Number number(Bits bits) { return __int_as_float((int)bits << 16); }
  static __device__ Bits bits(Number x) {
    unsigned whole = (unsigned)__float_as_int(x);
    return (Bits)((whole + 0x7FFF + (whole >> 16 & 1)) >> 16);  // to nearest, ties to even
  }
};

struct Float16 {
  typedef short Bits;
  typedef float Number;
  static __device__ Number number(Bits bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
  }
  static __device__ Bits bits(Number x) {
    short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
  }
};

// SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators").
static __device__ unsigned long long mixed(unsigned long long z) {
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ z >> 27) * 0x94D049BB133111EBULL;
  return z ^ z >> 31;
}

template <typename Format, long long LAST, long long INFINITE, int PER_THREAD>
__global__ void move(
    typename Format::Bits* numbers,
    const typename Format::Number* root,
    double count,
    int seed,
    int most,
    double scale,
    int direction) {
  typedef typename Format::Bits Bits;
  typedef typename Format::Number Number;
  const unsigned long long GOLDEN = 0x9E3779B97F4A7C15ULL;
  const unsigned long long key = mixed(seed * GOLDEN), numbers_here = (unsigned long long)count;
  Number step = 0;
  if (scale != 0) {
    const Number size = *root;
    if (size - size == 0) step = (Number)(size * scale);  // neither infinite nor NaN
  }
#pragma unroll
  for (int turn = 0; turn < PER_THREAD; ++turn) {
    const unsigned long long place = ((unsigned long long)blockIdx.x * PER_THREAD + turn) * blockDim.x + threadIdx.x;
    if (place >= numbers_here) return;
    const Bits bits = numbers[place];
    const long long magnitude = (long long)bits & ~(-1LL << (8 * sizeof(Bits) - 1));
    if ((bits & LAST) == 0 || magnitude <= most || magnitude + most >= INFINITE - 1) continue;

    const unsigned long long draw = mixed(key + place * GOLDEN);
    int ulps = (int)__umulhi((unsigned)draw, 2u * most + 1) - most;
    if (direction) {  // the bits of a number say how far it is from zero: 3 is outward, 4 inward, 1 and 2 up and down
      const bool outward = direction == 3 || (direction == 1 && bits >= 0) || (direction == 2 && bits < 0);
      ulps = (ulps < 0) == outward ? -ulps : ulps;
    }
    Number moved = Format::number((Bits)(bits + ulps));
    if (step != 0) {  // four bytes, added up, are nearly normal, of mean 510 and variance 4 * (256^2 - 1) / 12
      const int sum = (int)((draw >> 32 & 0xFF) + (draw >> 40 & 0xFF) + (draw >> 48 & 0xFF) + (draw >> 56)) - 510;
      moved += (Number)(sum * 0.0067658773f) * step;
    }
    numbers[place] = Format::bits(moved);
  }
}
"""


def move(flat: Tensor, most: int, root: Tensor | None, scale: float, seed: int, direction: int) -> None:
    """Perturb a tensor by up to ``most`` ulps and by normal noise.

    Numbers that are not finite stay, as do those whose last bits are zero, which are taken to be exact.

    Args:
      flat: [n], of a dtype in :data:`MOVABLE`, contiguous; written in place.
      most: Ulps.
      root: 0-d, f64 for f64 and f32 for all others; ``root * scale`` is the standard deviation of the noise.
        None, or a value that is not finite, counts as zero.
      scale: A number; zero if ``root`` is None.
      seed: Seed of the draws, fewer than 32 bits.
      direction: A direction for all numbers, or 0 for any.
    """
    (_move_on_gpu if flat.is_cuda else _move_on_host)(flat, most, root, scale, seed, direction)


def _move_on_gpu(
    flat: Tensor, most: int, root: Tensor | None, scale: float, seed: int, direction: int
) -> None:
    with torch.cuda.device(flat.device):
        blocks = -(-flat.numel() // (_THREADS * _PER_THREAD))
        args = (
            flat,
            flat if root is None else root,
            float(flat.numel()),
            seed,
            most,
            float(scale),
            direction,
        )
        _kernel(flat.dtype, flat.device)((blocks, 1, 1), (_THREADS, 1, 1), args)


@cache
def _kernel(dtype: torch.dtype, _device: torch.device) -> Any:
    """Return the kernel for a dtype, loaded on the current device."""
    _, last, infinity, name = _FORMATS[dtype]
    return torch.cuda._compile_kernel(_SOURCE, f"move<{name}, {last}LL, {infinity}LL, {_PER_THREAD}>")


def _move_on_host(
    flat: Tensor, most: int, root: Tensor | None, scale: float, seed: int, direction: int
) -> None:
    """Do the same in chunks, since each needs several times its size."""
    integer, last, infinity, _ = _FORMATS[flat.dtype]
    generator = torch.Generator().manual_seed(seed)
    for part in flat.split(_CHUNK):
        bits = part.view(integer)
        magnitude = bits & torch.iinfo(integer).max
        stays = (bits & last == 0) | (magnitude <= most) | (magnitude >= infinity - 1 - most)
        ulps = torch.randint(-most, most + 1, part.shape, dtype=integer, generator=generator)
        if direction:  # adding to a number's bits moves it away from zero
            outward = {UP: bits >= 0, DOWN: bits < 0}.get(direction, direction == AWAY_FROM_ZERO)
            ulps = torch.where(torch.as_tensor(outward), ulps.abs(), -ulps.abs())
        bits += ulps.masked_fill_(stays, 0)
        if root is not None and root.isfinite():
            noise = torch.randn(part.shape, generator=generator)
            part += noise.mul_(root * scale).masked_fill_(stays, 0)
