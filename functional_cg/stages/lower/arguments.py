"""The tensors that a compiled function gets."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from ..program import Var

__all__ = ["by_itself", "like"]


def by_itself(tensor: Tensor) -> Tensor:
    """Return a tensor on the same memory, with a storage that starts at its first element.

    Slots lie in one slab. Some of torch's passes ignore the storage offset of an argument, and all of them look for
    pairs of arguments that overlap.
    """
    if not tensor.numel():
        return tensor
    span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    memory = from_dlpack(tensor.as_strided((span,), (1,)).view(torch.uint8))
    return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


def like(var: Var) -> Tensor:
    """Return a tensor with the layout of a variable, of any values."""
    spec = var.spec
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
