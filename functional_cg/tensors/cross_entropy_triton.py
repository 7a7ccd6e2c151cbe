"""The CUDA kernel of ``fcg::cross_entropy_``.

One program per row. The first pass finds the maximum and the sum of exponentials block by block, rescaling
the sum once per block; the second reads the row again, backwards and mostly from the cache, and overwrites it
with the gradient.
Source of the first pass: Milakov & Gimelshein 2018, "Online normalizer calculation for softmax".
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["cross_entropy_cuda"]

_BLOCK = 8192
_ELEMENTS_PER_WARP, _MOST_WARPS = 1024, 8


@triton.jit(do_not_specialize=["ignored"])
def _cross_entropy_kernel(rows, target, scale, losses, classes, stride, each, ignored, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    right = tl.load(target + row)
    counts = right != ignored
    right = tl.where(counts, right, 0)
    tl.device_assert((right >= 0) & (right < classes), "a target is no class")
    first = rows + row * stride
    block = tl.arange(0, BLOCK)
    top = -float("inf")
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, classes, BLOCK):
        inside = start + block < classes
        x = tl.load(first + start + block, mask=inside, other=-float("inf"), eviction_policy="evict_last").to(
            tl.float32
        )
        new = tl.maximum(top, tl.max(x, 0))
        finite = tl.where(new == -float("inf"), 0.0, new)
        sums = sums * tl.exp(top - finite) + tl.exp(x - finite)
        top = new
    total = tl.log(tl.sum(sums, 0))
    found = tl.load(first + right).to(tl.float32) - top - total
    tl.store(losses + row, tl.where(counts, -found, 0.0))
    factor = tl.where(counts, tl.load(scale + row * each), 0.0)
    tl.debug_barrier()  # all threads have read the target's logit before one overwrites it
    last = (stride - 1) // BLOCK
    for back in range(last + 1):
        index = (last - back) * BLOCK + block
        x = tl.load(first + index, mask=index < classes, eviction_policy="evict_first").to(tl.float32)
        slope = tl.exp(x - top - total) * factor - tl.where(index == right, factor, 0.0)
        slope = tl.where(index < classes, slope, 0.0)
        tl.store(first + index, slope.to(rows.dtype.element_ty), mask=index < stride)


def cross_entropy_cuda(
    rows: torch.Tensor, target: torch.Tensor, scale: torch.Tensor, ignored: int, classes: int
) -> torch.Tensor:
    """Launch the kernel without a sync; the grid depends only on shapes.

    Args:
      rows: f[n, classes + padding], contiguous, bf16, f16 or f32; overwritten with the gradient, padding with zeros.
      target: i64[n].
      scale: f32[] or f32[n], the gradient of a row's loss.
      ignored: Target of rows that have neither loss nor gradient.
      classes: How many elements of a row are logits.
    Returns:
      f32[n], the loss of each row.
    """
    count, stride = rows.shape
    losses = torch.empty(count, dtype=torch.float32, device=rows.device)
    block = min(_BLOCK, triton.next_power_of_2(classes))
    warps = max(1, min(_MOST_WARPS, block // _ELEMENTS_PER_WARP))
    with torch.cuda.device(rows.device):
        _cross_entropy_kernel[(count,)](
            rows,
            target.contiguous(),
            scale,
            losses,
            classes,
            stride,
            scale.stride(0) if scale.ndim else 0,
            ignored,
            BLOCK=block,
            num_warps=warps,
            debug=True,  # keeps the assertion
            sanitize_overflow=False,  # which would add others
        )
    return losses
