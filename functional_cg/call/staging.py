"""Staging: the static input buffers of a capture, and the copies into them.

Host leaves go through pinned memory that the step owns, so the caller may overwrite its memory as soon as the
call returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..concurrency.streams import current_stream
from ..state.arena import Arena, BufferSpec, plan
from ..tensors.aten import UNGROUPED

__all__ = ["Staging"]

_RING_DEPTH = 3
_FEW = 3  # up to this many single copies cost less than one grouped copy
# Dtypes that ``torch.cat`` copies bit for bit into existing memory.
_JOINED = frozenset(
    {
        torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool,
    }
)  # fmt: skip


class Staging:
    """Static input buffers of one capture.

    Attributes:
      arena: Memory of the buffers.
      slots: One buffer per live input leaf, on the state's device.
    """

    def __init__(self, specs: Sequence[BufferSpec], device: torch.device) -> None:
        here = [BufferSpec(spec.shape, spec.stride, spec.dtype, device) for spec in specs]
        self.arena = Arena.allocate(plan(here, ["inputs"] * len(here)), device)
        self.slots = self.arena.slots
        self._ring: list[_PinnedSlot] = []
        self._turn = 0
        self._singly = any(slot.dtype in UNGROUPED for slot in self.slots)
        self._rows = _as_rows(self.arena)

    def copy_in(self, leaves: list[Tensor]) -> None:
        """Copy leaves into the static buffers; the caller may overwrite them when this returns."""
        if not leaves:
            return
        if not self.arena.on_cuda and current_stream(self.arena.device) is None:
            torch._foreach_copy_(self.slots, leaves)
            return
        host = [i for i, leaf in enumerate(leaves) if leaf.is_cpu]
        if not host and self._rows is not None:
            torch.cat(leaves, out=self._rows)
            return
        here = [i for i, leaf in enumerate(leaves) if not leaf.is_cpu]
        if self._singly or len(here) <= _FEW:
            for i in here:
                self.slots[i].copy_(leaves[i])
        else:
            torch._foreach_copy_([self.slots[i] for i in here], [leaves[i] for i in here])
        if host:
            self._pinned_slot().send(host, leaves, self.arena)

    def _pinned_slot(self) -> _PinnedSlot:
        if len(self._ring) < _RING_DEPTH:
            self._ring.append(_PinnedSlot(self.arena))
            return self._ring[-1]
        self._turn = (self._turn + 1) % _RING_DEPTH
        return self._ring[self._turn]


def _as_rows(arena: Arena) -> Tensor | None:
    """Return adjacent slots of one slab as rows of one tensor, which one launch fills; None for others.

    A grouped copy is one launch, too, but has only one thread block for a tensor of 65,536 elements: it takes
    8 us on an H100, where single copies take 1 us each.
    """
    slots = arena.slots
    if len(slots) < 2 or len(arena.slabs) != 1 or arena.slabs[0].dtype not in _JOINED:
        return None
    end, shape = 0, slots[0].shape[1:]
    for place, slot in zip(arena.plan.slots, slots, strict=True):
        if place.offset != end or not slot.dim() or slot.shape[1:] != shape or not slot.is_contiguous():
            return None
        end += slot.numel()
    return arena.slabs[0][:end].view(-1, *shape) if end else None


class _PinnedSlot:
    """Pinned host memory for one call's inputs, reused once its copy to the device is done."""

    def __init__(self, target: Arena) -> None:
        cpu = torch.device("cpu")
        specs = [BufferSpec(s.spec.shape, s.spec.stride, s.spec.dtype, cpu) for s in target.plan.slots]
        self._host = Arena.allocate(plan(specs, ["inputs"] * len(specs)), cpu, pin_memory=target.on_cuda)
        self._sent: Any = None

    def send(self, host: Sequence[int], leaves: Sequence[Tensor], target: Arena) -> None:
        if self._sent is not None:
            self._sent.synchronize()
        torch._foreach_copy_([self._host.slots[i] for i in host], [leaves[i] for i in host])
        pairs = [(target.slots[i], self._host.slots[i]) for i in host]
        if len(host) == len(leaves):  # everything comes from the host: one transfer per dtype
            pairs = list(zip(target.slabs, self._host.slabs, strict=True))
        for there, here in pairs:
            there.copy_(here, non_blocking=True)
        self._sent = current_stream(target.device).record_event(self._sent)
