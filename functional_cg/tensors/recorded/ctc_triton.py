"""The CUDA kernel of ``fcg::ctc_scan``; files that import triton are named ``*_triton.py``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["scan"]


@triton.jit(do_not_specialize=["times", "examples", "states"])
def _scan_kernel(values, skip, first, begin, out, times, examples, states, BLOCK: tl.constexpr):
    example = tl.program_id(0).to(tl.int64)
    state = tl.arange(0, BLOCK)
    inside = state < states
    may_skip = tl.load(skip + example * states + state, mask=inside & (state >= 2), other=0) != 0
    start_time = tl.load(first + example)
    start = tl.load(begin + example)
    starts = (state == start) | (state == start + 1)
    nothing = tl.full((BLOCK,), float("-inf"), values.dtype.element_ty)
    stay, row, size = nothing, example * states, examples.to(tl.int64) * states
    for time in range(times):
        later = time > 0
        # The row before was stored by other threads of this program, before the barrier.
        one = tl.load(out + row - size + state - 1, mask=inside & (state >= 1) & later, other=float("-inf"))
        two = tl.load(out + row - size + state - 2, mask=may_skip & later, other=float("-inf"))
        enter = tl.where(starts & (start_time == time), 0.0, nothing)
        largest = tl.maximum(tl.maximum(stay, one), tl.maximum(two, enter))
        shift = tl.where(largest == float("-inf"), 0.0, largest)
        total = tl.exp(stay - shift) + tl.exp(one - shift) + tl.exp(two - shift) + tl.exp(enter - shift)
        stay = tl.log(total) + shift + tl.load(values + row + state, mask=inside, other=float("-inf"))
        tl.store(out + row + state, stay, mask=inside)
        tl.debug_barrier()
        row += size


def scan(values: torch.Tensor, skip: torch.Tensor, first: torch.Tensor, begin: torch.Tensor) -> torch.Tensor:
    """Launch one program per example, which goes through time; nothing is read on the host.

    Args:
      values: f32 or f64[T, N, L], contiguous.
      skip: bool[N, L].
      first: i64[N].
      begin: i64[N].
    Returns:
      The recursion's values, like ``values``.
    """
    times, examples, states = values.shape
    out = torch.empty_like(values)
    block = max(triton.next_power_of_2(states), 32)
    _scan_kernel[(examples,)](
        values,
        skip.contiguous(),
        first.contiguous(),
        begin.contiguous(),
        out,
        times,
        examples,
        states,
        BLOCK=block,
    )
    return out
