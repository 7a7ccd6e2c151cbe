"""Simulated streams: queued work does not run until something waits for it.

Under ``with simulator.stream("a"):`` replays are queued, and so is each ATen call that touches the memory of a step:
its slots, static inputs and metrics, and results of queued calls. Calls on host memory alone run at once. A stream runs
its work in order. Two streams are not ordered unless one waits for the other.

Not simulated: memory freed while a queued call still reads it (the record of a call keeps it alive).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ..state.handle import Leaf
from ..tensors.aten import sync_reason, tensors_in, written_arguments
from ..tensors.overlap import storage_key
from .recorded import Block, Call

__all__ = ["DeviceMemory", "SimulatedStream"]


class DeviceMemory:
    """The set of storages that stand for device memory: work on them is queued."""

    def __init__(self) -> None:
        # A weak reference keeps the storage's identity from being reused.
        self._storages: dict[int, StorageWeakRef] = {}

    def add(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self._storages[storage_key(tensor)] = StorageWeakRef(tensor.untyped_storage())

    def holds(self, tensor: Tensor) -> bool:
        return storage_key(tensor) in self._storages


@dataclass(frozen=True)
class _Event:
    """A point in a stream: reached once ``number`` work items are done."""

    stream: SimulatedStream
    number: int

    def synchronize(self) -> None:
        self.stream.run_until(self.number)


class SimulatedStream(TorchDispatchMode):
    """A queue that delays device work as long as possible; see :meth:`functional_cg.testing.Simulator.stream`."""

    def __init__(self, device: DeviceMemory) -> None:
        super().__init__()
        self._device = device
        self._done = 0
        self.queue: deque[Callable[[], Any]] = deque()

    def wait_stream(self, stream: SimulatedStream) -> None:
        self.queue.append(stream.record_event().synchronize)

    def record_event(self, event: Any = None) -> _Event:
        return _Event(self, self._done + len(self.queue))

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def run_until(self, number: int) -> None:
        """Run work in order until ``number`` items are done, counted from the beginning."""
        with _disable_current_modes(), torch.no_grad():
            while self._done < number:
                self._done += 1  # first, since the work may wait for a stream that waits for this one
                self.queue.popleft()()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if Leaf in types:
            return NotImplemented  # it dispatches again with the memory of its slot
        if types or not any(map(self._device.holds, tensors_in([*args, *kwargs.values()]))):
            return func(*args, **kwargs)
        if sync_reason(func, args, kwargs):
            self.synchronize()
            return func(*args, **kwargs)
        return self._queued(func, args, kwargs)

    def _queued(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Queue a call. To find the shapes of its results, it also runs at once, and its writes are undone."""
        written = written_arguments(func, args, kwargs)
        before = [tensor.clone() for tensor in written]
        call, out = Call.run(func, args, kwargs, locate=Block.of, allocate=Block.of)
        for tensor, value in zip(written, before, strict=True):
            tensor.copy_(value)
        for _, block in call.fresh:
            block.poison()
        self._device.add([*written, *tensors_in([out])])
        self.queue.append(call.repeat)
        return out


def wait_for(streams: Sequence[SimulatedStream]) -> None:
    """Run all work of the streams, the last stream first, so that unordered work runs in the wrong order."""
    for stream in reversed(streams):
        stream.synchronize()
