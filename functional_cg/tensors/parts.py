"""Complex tensors as real ones, which is what optimizers compute with."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["as_complex", "as_real"]


def as_real(tensor: Tensor) -> Tensor:
    """Lay real and imaginary parts side by side along the last axis; a real tensor stays as it is.

    The number of axes stays, so that what chooses parameters by it still does; for a single number it is one more.
    """
    if not tensor.is_complex():
        return tensor
    parts = torch.view_as_real(tensor.resolve_conj())
    return parts.flatten(-2) if tensor.dim() else parts


def as_complex(parts: Tensor, like: Tensor) -> Tensor:
    """Undo :func:`as_real` for a tensor of the shape of ``like``; what was left as it is stays so."""
    if not like.is_complex() or parts.is_complex():
        return parts
    return torch.view_as_complex(parts.reshape(*like.shape, 2).contiguous())
