"""The CUDA kernel of :mod:`functional_cg.stages.trial.ulps`: numbers moved by ulps in one pass, in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["move_cuda"]

_BLOCK = 1024
_ROUNDS = 7  # of Philox: the fewest that pass every test of its authors


# Every call moves another size by another number: none of them may compile a kernel of its own.
@triton.jit(do_not_specialize=["count", "seed", "most", "scale", "direction"])
def _move_kernel(
    numbers,
    root,
    count,
    seed,
    most,
    scale,
    direction,
    LAST: tl.constexpr,
    INFINITY: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    x = tl.load(numbers + place, mask=inside, other=0.0)
    if x.dtype.primitive_bitwidth == 64:
        bits = x.to(tl.int64, bitcast=True)
        magnitude = bits & 0x7FFFFFFFFFFFFFFF
    elif x.dtype.primitive_bitwidth == 32:
        bits = x.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
    else:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32)
        magnitude = bits & 0x7FFF
    moves = ((bits & LAST) != 0) & (magnitude > most) & (magnitude + most < INFINITY - 1)

    # The bits of a number say how far it is from zero: 1 and 2 are up and down, 3 and 4 outward and inward.
    # Draws repeat after 2**32 numbers: no harm.
    c0, c1, c2, _ = tl.randint4x(seed, place.to(tl.int32), n_rounds=ROUNDS)
    ulps = (c0.to(tl.uint32, bitcast=True) % (2 * most + 1).to(tl.uint32)).to(tl.int32) - most
    length = tl.abs(ulps)
    outward = ((direction == 3) | ((direction == 1) & (bits >= 0))) | ((direction == 2) & (bits < 0))
    ulps = tl.where(direction == 0, ulps, tl.where(outward, length, -length))
    moved = bits + ulps
    if x.dtype.primitive_bitwidth == 16:
        y = moved.to(tl.int16).to(x.dtype, bitcast=True)
    else:
        y = moved.to(x.dtype, bitcast=True)

    step = tl.load(root)
    step = tl.where(tl.abs(step) < float("inf"), step, 0.0) * scale  # NaN is not less either
    # Four numbers from 0 to 2**16, added up, are nearly normal.
    sums = ((c1 & 0xFFFF) + (c1 >> 16) + (c2 & 0xFFFF) + (c2 >> 16)).to(tl.float32)
    normal = (sums * (1 / 65536) - 2.0) * 1.7320508
    y = (y + normal * step).to(x.dtype)
    tl.store(numbers + place, y, mask=inside & moves)


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
      seed: Of the draws.
      direction: 0 for any; all of them up (1), down (2), away from zero (3) or towards it (4).
      last: Last bits: a number that has none of them stays.
      infinity: The bits of infinity.
    """
    count = flat.numel()
    with torch.cuda.device(flat.device):
        _move_kernel[(triton.cdiv(count, _BLOCK),)](
            flat,
            root,
            count,
            seed,
            most,
            scale,
            direction,
            LAST=last,
            INFINITY=infinity,
            BLOCK=_BLOCK,
            ROUNDS=_ROUNDS,
        )
