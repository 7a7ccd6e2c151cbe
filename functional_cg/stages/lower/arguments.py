"""The tensors that a compiled function gets."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..plan import Buffers
from ..program import Program, Var

__all__ = ["by_itself", "like", "tensors_of"]


def by_itself(tensor: Tensor) -> Tensor:
    """Return a tensor on the same memory, with a storage that starts at its first element.

    Slots lie in one slab. Some of torch's passes ignore the storage offset of an argument, and all of them look for
    pairs of arguments that overlap.
    """
    if not tensor.numel():
        return tensor
    span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.storage_offset() * tensor.itemsize
    memory = tensor.untyped_storage()[start : start + span * tensor.itemsize]  # keeps the slab alive
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        memory, 0, tensor.shape, tensor.stride()
    )


def like(var: Var) -> Tensor:
    """Return a tensor with the layout of a variable, of any values."""
    spec = var.spec
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)


def tensors_of(program: Program, buffers: Buffers, device: torch.device) -> dict[Var, Tensor]:
    """Return the tensors of a program's slots, inputs, constants and ranges, as compiled functions get them."""
    # A compiled kernel may take a CPU scalar as if it were on the device.
    return replace(buffers, constants=[one.to(device) for one in buffers.constants]).tensors(program)
