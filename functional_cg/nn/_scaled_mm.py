"""Multiplies fp8 matrices with ``torch._scaled_mm``, a private op that only this file calls."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["MULTIPLE", "refuse_device", "scaled_product"]

MULTIPLE = 16  # cuBLAS requires all dimensions to be multiples of this
_CAPABILITY = (8, 9)  # of Ada, the first with fp8 products; Hopper has 9.0


def refuse_device(name: str, device: torch.device) -> None:
    """Raise for a GPU without fp8 matrix products.

    Raises:
      ValueError: Names its compute capability.
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
    """Compute ``(a @ b.T) / (scale_a * scale_b)``, accumulated in f32.

    Args:
      a: fp8[m, k].
      b: fp8[n, k], at most one of the two in e5m2.
      scale_a: f32[], a power of two by which ``a`` was multiplied.
      scale_b: f32[], likewise.
      dtype: Dtype of the result.
      fast: Accumulate with fewer bits on Hopper: accurate enough for a forward.
    Returns:
      dtype[m, n].
    """
    # The first matrix must be row-major, the second column-major.
    return torch._scaled_mm(
        a.contiguous(),
        b.contiguous().t(),
        scale_a=scale_a.reciprocal(),
        scale_b=scale_b.reciprocal(),
        out_dtype=dtype,
        use_fast_accum=fast,
    )
