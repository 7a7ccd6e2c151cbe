"""Memory beside that of a capture: slots for its warm-up, and copies of its metrics."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...tensors.aten import copies
from ..plan import Buffers, Spare

__all__ = ["copy_out", "scratch"]

_FEW = 3  # up to this many clones cost less than one grouped copy


def scratch(buffers: Buffers, unchecked: Sequence[bool]) -> Spare:
    """Make slots for warm-up: floating leaves that may hold any value share one buffer per dtype, others are copied."""
    slots = buffers.slots
    shares = [slot.is_floating_point() and free for slot, free in zip(slots, unchecked, strict=True)]
    largest: dict[torch.dtype, int] = {}
    for slot, one in zip(slots, shares, strict=True):
        if one:
            largest[slot.dtype] = max(largest.get(slot.dtype, 0), slot.numel())
    shared = {
        dtype: torch.zeros(numel, dtype=dtype, device=slots[0].device) for dtype, numel in largest.items()
    }
    spare = [
        torch.as_strided(shared[slot.dtype], slot.shape, slot.stride()) if one else slot.clone()
        for slot, one in zip(slots, shares, strict=True)
    ]
    own = [number for number, one in enumerate(shares) if not one]
    copied, originals = [spare[number] for number in own], [slots[number] for number in own]
    return Spare(spare, buffers.inputs, buffers.constants, copied, originals)


def copy_out(static: Sequence[Tensor]) -> list[Tensor]:
    """Copy static metrics to fresh tensors with separate storages; many of them in one grouped copy per dtype."""
    if len(static) <= _FEW:
        return [metric.clone() for metric in static]
    fresh = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in static]
    for call in copies(fresh, static):
        call()
    return fresh
