"""The product of fp8 matrices, ``torch._scaled_mm``: private to torch, and this file is the one door to it."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["MULTIPLE", "refuse_device", "scaled_product"]

MULTIPLE = 16  # of which all dimensions are to be: what the kernels of cuBLAS take
_CAPABILITY = (8, 9)  # of the first GPUs with products of fp8, Ada and Hopper


def refuse_device(name: str, device: torch.device) -> None:
    """Raise for a GPU without products of fp8.

    Raises:
      ValueError: Naming what it can do.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _CAPABILITY:
        got = ".".join(map(str, torch.cuda.get_device_capability(device)))
        raise ValueError(
            f"{name}: expected a GPU of compute capability 8.9 or higher, got {got} ({device}). "
            "To fix: compute in bfloat16, `torch.nn.functional.linear`."
        )


def scaled_product(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, *, fast: bool = False
) -> Tensor:
    """``(a @ b.T) / (scale_a * scale_b)``, added up in f32.

    Args:
      a: fp8[m, k].
      b: fp8[n, k], at most one of the two in e5m2.
      scale_a: f32[], a power of two by which ``a`` was multiplied.
      scale_b: f32[], likewise.
      dtype: Of the result.
      fast: Add up with fewer bits on Hopper: for a forward, where it is accurate enough.
    Returns:
      dtype[m, n].
    """
    # The second matrix has to lie column by column, the first one row by row.
    return torch._scaled_mm(
        a.contiguous(),
        b.contiguous().t(),
        scale_a=scale_a.reciprocal(),
        scale_b=scale_b.reciprocal(),
        out_dtype=dtype,
        use_fast_accum=fast,
    )
