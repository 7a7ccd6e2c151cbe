"""Staging: the static input buffers of a capture, and the way into them.

Host leaves go through pinned slots that the step owns, so the caller may overwrite its own memory as soon as the call
returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .arena import Arena, BufferSpec, plan
from .ops import UNGROUPED
from .streams import current_stream

__all__ = ["Staging"]

_RING_DEPTH = 3


class Staging:
    """Static input buffers of one capture, and the way into them.

    Attributes:
      arena: Their memory.
      slots: One buffer per live input leaf, on the state's device.
    """

    def __init__(self, specs: Sequence[BufferSpec], device: torch.device) -> None:
        here = [BufferSpec(spec.shape, spec.stride, spec.dtype, device) for spec in specs]
        self.arena = Arena.allocate(plan(here, ["inputs"] * len(here)), device)
        self.slots = self.arena.slots
        self._ring: list[_PinnedSlot] = []
        self._turn = 0
        self._singly = any(slot.dtype in UNGROUPED for slot in self.slots)

    def copy_in(self, leaves: list[Tensor]) -> None:
        """Copy leaves into the static buffers; the caller's memory is free again when this returns."""
        if not leaves:
            return
        if not self.arena.on_cuda and current_stream(self.arena.device) is None:
            self.fill(leaves)
            return
        host = [i for i, leaf in enumerate(leaves) if leaf.is_cpu]
        if not host:
            self._copy(self.slots, leaves)
            return
        here = [i for i, leaf in enumerate(leaves) if not leaf.is_cpu]
        if here:
            self._copy(tuple(self.slots[i] for i in here), [leaves[i] for i in here])
        self._pinned_slot().send(host, leaves, self.arena)

    def _copy(self, slots: tuple[Tensor, ...], leaves: list[Tensor]) -> None:
        """Copy on the device: two leaves in one launch take half as long as one by one."""
        if self._singly:
            for slot, leaf in zip(slots, leaves, strict=True):
                slot.copy_(leaf)
        else:
            torch._foreach_copy_(slots, leaves)

    def fill(self, leaves: list[Tensor]) -> None:
        """Copy leaves into the static buffers at once, where work is never queued."""
        torch._foreach_copy_(self.slots, leaves)

    def _pinned_slot(self) -> _PinnedSlot:
        if len(self._ring) < _RING_DEPTH:
            self._ring.append(_PinnedSlot(self.arena))
            return self._ring[-1]
        self._turn = (self._turn + 1) % _RING_DEPTH
        return self._ring[self._turn]


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
