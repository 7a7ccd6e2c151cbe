"""The buffers that a comparison runs on, and the memory that it may take."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Self

import torch
from torch import Tensor

from ...concurrency.interrupts import uninterrupted
from ...tensors.aten import copies
from ..plan import Buffers
from .reference import Reference
from .variants import vary

__all__ = ["Space", "device_of", "free_host_memory", "free_room"]

_FOR_WORKSPACES = 8  # this part of what is free is left for the workspaces of kernels
_FOR_VALUES = 4  # copies stay on the device if so many times their bytes, and a run, are less than the rest
_OF_THE_HOST = 4  # values of the program may take this part of the host's free memory for a while
_INTEGERS = MappingProxyType({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64})


@dataclass
class Space:
    """Static buffers that a comparison writes, with copies of their values.

    Attributes:
      buffers: The buffers.
      ample: Whether the device has room for the copies and for a run of the program; if not, the host keeps the
        copies, and the outputs of the program.
      written: The tensors that may be written.
      values: Copies of their values.
      free: The tensors that may hold any value, each with a number of its own, and whether it is a leaf.
    """

    buffers: Buffers
    ample: bool
    written: Sequence[Tensor]
    values: Sequence[Tensor]
    free: Sequence[tuple[Tensor, int, bool]]

    @classmethod
    def of(cls, reference: Reference, buffers: Buffers, *, inputs: bool) -> Self:
        """Keep the values of the slots that a step writes, and of its inputs, if they will be written, too."""
        unchecked, slots = (
            reference.unchecked,
            [out.slot for out in reference.outputs if out.slot is not None],
        )
        given = [(buffers.slots[slot], unchecked.slots[slot], slot, True) for slot in slots]
        if inputs:
            staged = enumerate(zip(buffers.inputs, unchecked.inputs, strict=True))
            given += [(one, is_free, -1 - number, False) for number, (one, is_free) in staged]
        free = [(one, number, leaf) for one, is_free, number, leaf in given if is_free]
        written, room = [one for one, *_ in given], free_room(buffers)
        copied = _FOR_VALUES * sum(one.nbytes for one in written)
        ample = room is None or copied + reference.at_once < room - room // _FOR_WORKSPACES
        values = [torch.empty_like(one) if ample else _on_host(one) for one in written]
        space = cls(buffers, ample, written, values, free)
        if ample:
            space.keep()
        return space

    def keep(self) -> None:
        """Keep what the buffers hold now."""
        uninterrupted(copies(self.values, self.written))

    def reset(self) -> None:
        """Restore the values that were kept."""
        uninterrupted(copies(self.written, self.values))

    def vary(self, kind: str) -> None:
        """Put other values in the buffers, made from those of the call."""
        self.reset()
        for tensor, number, leaf in self.free:
            vary(tensor, kind, number, leaf=leaf)

    def lacks(self, reference: Reference) -> int:
        """Return the bytes that a reference lacks for a run whose outputs are kept on the host."""
        room = free_room(self.buffers)
        if room is None:
            return 0
        host = free_host_memory() // _OF_THE_HOST - reference.kept
        return max(reference.fit(room - room // _FOR_WORKSPACES, host=host), -host)


def _on_host(tensor: Tensor) -> Tensor:
    """Return a copy on the host; zeros, such as an optimizer's moments at first, take no memory. -0.0 is not 0.0."""
    integer = _INTEGERS.get(tensor.itemsize)
    if integer is not None and not tensor.view(integer).any():
        return tensor.new_zeros(()).expand_as(tensor)
    return tensor.to("cpu", copy=True)


def device_of(buffers: Buffers) -> torch.device:
    """Return where a step runs."""
    every = (*buffers.slots, *buffers.inputs)
    return next((one.device for one in every if one.is_cuda), torch.device("cpu"))


def free_room(buffers: Buffers) -> int | None:
    """Return the bytes that are free on the device; None for a host, where this counts for nothing."""
    device = device_of(buffers)
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def free_host_memory() -> int:
    """Return the free bytes of host memory that the system reports; without a report, there is enough."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return sys.maxsize
