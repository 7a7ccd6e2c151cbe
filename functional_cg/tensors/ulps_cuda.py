"""The CUDA kernel of :mod:`functional_cg.stages.trial.ulps`: numbers moved by ulps in one pass, in place.

NVRTC compiles it in a few hundredths of a second, Triton takes half a second: here that counts, since a kernel of the
first call runs a few hundred times and never again.
"""

from __future__ import annotations

from functools import cache
from types import MappingProxyType
from typing import Any

import torch

__all__ = ["move_cuda"]

_THREADS = 256
_FORMATS = MappingProxyType(
    {
        torch.float64: "Float64",
        torch.float32: "Float32",
        torch.bfloat16: "BFloat16",
        torch.float16: "Float16",
    }
)
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

template <typename Format, long long LAST, long long INFINITE>
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
  const unsigned long long place = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (place >= count) return;
  const Bits bits = numbers[place];
  const long long magnitude = (long long)bits & ~(-1LL << (8 * sizeof(Bits) - 1));
  if ((bits & LAST) == 0 || magnitude <= most || magnitude + most >= INFINITE - 1) return;

  const unsigned long long GOLDEN = 0x9E3779B97F4A7C15ULL;
  const unsigned long long state = mixed(seed * GOLDEN) + 2 * place * GOLDEN;
  const unsigned first = (unsigned)(mixed(state) >> 32);
  const unsigned long long second = mixed(state + GOLDEN);

  int ulps = (int)(first % (2u * most + 1)) - most;
  if (direction) {  // the bits of a number say how far it is from zero: 3 is outward, 4 inward, 1 and 2 up and down
    const bool outward = direction == 3 || (direction == 1 && bits >= 0) || (direction == 2 && bits < 0);
    ulps = (ulps < 0) == outward ? -ulps : ulps;
  }
  const Number size = *root;
  const Number step = size - size == 0 ? (Number)(size * scale) : (Number)0;  // neither infinite nor NaN
  // Four numbers from 0 to 2**16, added up, are nearly normal.
  const unsigned sums =
      (second & 0xFFFF) + (second >> 16 & 0xFFFF) + (second >> 32 & 0xFFFF) + (second >> 48 & 0xFFFF);
  const float normal = (sums * (1.0f / 65536) - 2.0f) * 1.7320508f;
  numbers[place] = Format::bits(Format::number((Bits)(bits + ulps)) + (Number)(normal * step));
}
"""


def move_cuda(
    flat: torch.Tensor,
    most: int,
    root: torch.Tensor,
    scale: float,
    seed: int,
    direction: int,
    last: int,
    infinity: int,
) -> None:
    """Move the numbers of a tensor by up to ``most`` ulps, and by a normal number of a standard deviation.

    Args:
      flat: [n], f16, bf16, f32 or f64, contiguous, on a CUDA device; written.
      most: Ulps.
      root: 0-d, f32 or f64: times ``scale`` it is the standard deviation; what is not finite counts as zero.
      scale: A number.
      seed: Of the draws, fewer than 32 bits.
      direction: 0 for any; all of them up (1), down (2), away from zero (3) or towards it (4).
      last: Last bits: a number that has none of them stays.
      infinity: The bits of infinity.
    """
    with torch.cuda.device(flat.device):
        kernel = _compiled(f"move<{_FORMATS[flat.dtype]}, {last}LL, {infinity}LL>", flat.device)
        blocks = -(-flat.numel() // _THREADS)
        kernel(
            (blocks, 1, 1),
            (_THREADS, 1, 1),
            (flat, root, float(flat.numel()), seed, most, float(scale), direction),
        )


@cache
def _compiled(name: str, _device: torch.device) -> Any:
    """Return a kernel, loaded on the current device."""
    return torch.cuda._compile_kernel(_SOURCE, name)
