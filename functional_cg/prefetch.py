"""Prefetch: the next batches travel to the device while the step works on this one.

No thread runs here. The loader is asked for the next batch when the loop asks for one, while the device is busy with
the step before; its copy is queued on a stream of its own, and the loop gets a batch whose copy was queued earlier.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from . import tree as pytree
from .call.inputs import as_input, cuts_a_graph
from .graph_step import GraphFn, GraphStep
from .state.arena import BufferSpec, unplaceable
from .state.leaf import Leaf

__all__ = ["prefetch"]

B = TypeVar("B")
B_co = TypeVar("B_co", covariant=True)
_AT_ONCE = 2  # batches loaded for one that is handed over, until as many as asked for are on their way


def prefetch(
    loader: Iterable[B], step: GraphStep[Any, Any] | GraphFn[Any, Any], *, ahead: int = 2
) -> Iterator[B]:
    """Iterate over the batches of a loader, the next ones already on their way to the device of ``step``.

    Tensors on the CPU and numpy arrays in a batch arrive as tensors on the device, of the same shapes, dtypes and
    dimension order; what is there already, numbers and other objects come as they are. Pageable memory goes through a
    ring of ``ahead + 1`` pinned slots and may be overwritten by the loader as soon as it is asked for the next batch.
    Pinned memory is copied from where it lies; the loader is asked for more only when that copy is done. Whichever
    stream is current when a batch is handed over waits for its copy: call the step on that one.

    Lifetime: each batch consists of new tensors that nothing here writes again or keeps once they are handed over. They
    are yours for as long as you hold them, and their memory is used again only when the stream that they were handed
    over on has done what was queued on it until you dropped them. At most ``2 * ahead + 2`` batches are in device
    memory: the host is kept from running further ahead of the device.

    The step says where the batches go, so those before its first call come as they are; on the CPU, and with
    ``backend="eager"``, all do. The loader runs in your thread: where it takes longer than a step, give it workers,
    ``DataLoader(..., num_workers=4)``. Up to ``ahead`` batches more than were handed over are taken from it. Leaving
    the loop early, or ``close()``, drops these; there is no thread to be stopped.

    Args:
      loader: Any iterable of batches (trees of tensors and arrays): a ``DataLoader``, a generator, a list.
      step: The step that the batches are for.
      ahead: How many batches are on their way beside the one handed over.
    Returns:
      An iterator over as many batches, in order. An exception of the loader is raised when the loop asks for the batch
      that failed, after all the batches before it.
    Raises:
      TypeError: If ``loader`` is not iterable, or ``step`` is no captured step.
      ValueError: If ``ahead`` is not a positive integer; in the loop, if the step was called on several devices.

    Example:
      >>> import torch, functional_cg as fcg
      >>> step = fcg.graph_step(lambda state, x: ({"sum": state["sum"] + x.sum()}, {}))
      >>> state = fcg.place({"sum": torch.zeros(())})
      >>> for x in fcg.prefetch([torch.ones(3), torch.ones(3)], step):
      ...     state, _ = step(state, x)
      >>> state["sum"].item()
      6.0
    """
    if not isinstance(step, (GraphStep, GraphFn)):
        raise TypeError(
            f"prefetch: expected a step, got {type(step).__name__}. "
            "To fix: pass what `graph_step` or `graph_fn` returned, `fcg.prefetch(loader, train_step)`."
        )
    if isinstance(ahead, bool) or not isinstance(ahead, int) or ahead < 1:
        raise ValueError(f"prefetch: ahead must be a positive integer, got {ahead!r}")
    return _batches(iter(loader), lambda: _transfer_for(step, ahead), ahead)


class _Sent(Protocol[B_co]):
    """A batch on its way."""

    def arrive(self) -> B_co:
        """The batch; the current stream waits for its copy."""
        ...


class _Transfer(Protocol):
    """The way to one device."""

    def settle(self) -> None:
        """Wait on the host until nothing is read from memory of the loader."""
        ...

    def send(self, batch: B) -> _Sent[B]:
        """Queue the copy of a batch."""
        ...

    def launched(self) -> None:
        """The batch that was handed over last is in use: wait on the host while too many of them are not done."""
        ...


def _batches(source: Iterator[B], transfer_for: Callable[[], _Transfer | None], ahead: int) -> Iterator[B]:
    transfer: _Transfer | None = None
    while transfer is None:
        transfer = transfer_for()
        if transfer is None:
            try:
                batch = next(source)
            except StopIteration:
                return
            yield batch
    waiting: deque[_Sent[B]] = deque()
    failure: Exception | None = None
    ended = False
    while True:
        for _ in range(_AT_ONCE):
            if ended or len(waiting) > ahead:
                break
            transfer.settle()
            try:
                waiting.append(transfer.send(next(source)))
            except StopIteration:
                ended = True
            except Exception as error:  # it belongs to a batch that the loop has not asked for yet
                failure, ended = error, True
        if not waiting:
            break
        yield waiting.popleft().arrive()
        transfer.launched()
    if failure is not None:
        raise failure


def _transfer_for(step: GraphStep[Any, Any] | GraphFn[Any, Any], ahead: int) -> _Transfer | None:
    """The way to where a step runs; None if that is the CPU, or not known yet."""
    devices = {spec.device for lowered, _ in step._plans() for spec in lowered.layout.specs}
    if len(devices) > 1:
        raise ValueError(
            f"prefetch: `{step._name}` was called on {' and '.join(sorted(map(str, devices)))}. "
            "To fix: make a step for each device, `graph_step(fn)`."
        )
    device = next(iter(devices), torch.device("cpu"))
    return _CudaTransfer(device, ahead) if device.type == "cuda" else None


class _CudaTransfer:
    """Copies on a stream of its own; see :class:`_Transfer`."""

    def __init__(self, device: torch.device, ahead: int) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._ring = PinnedRing(ahead + 1, pin_memory=True)
        self._reading: Any = None
        self._used: deque[Any] = deque()
        self._ahead = ahead

    def settle(self) -> None:
        if self._reading is not None:
            self._reading.synchronize()
            self._reading = None

    def send(self, batch: B) -> _OnItsWay[B]:
        flat, treedef = pytree.flatten(batch)
        found = [(i, tensor) for i, leaf in enumerate(flat) if (tensor := on_host(leaf)) is not None]
        pageable = [(i, tensor) for i, tensor in found if not tensor.is_pinned()]
        slot = self._ring.fill([tensor for _, tensor in pageable]) if pageable else None
        sources = {i: tensor for i, tensor in found if tensor.is_pinned()}
        borrows = bool(sources)
        if slot is not None:
            sources |= {i: pinned for (i, _), pinned in zip(pageable, slot.buffers, strict=True)}
        fresh = []
        with torch.cuda.stream(self._stream):
            for i, pinned in sources.items():
                spec = BufferSpec.of(pinned)
                there = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=self._device)
                flat[i] = there.copy_(pinned, non_blocking=True)
                fresh.append(there)
            copied = self._stream.record_event()
        if slot is not None:
            slot.sent = copied
        if borrows:
            self._reading = copied
        return _OnItsWay(pytree.unflatten(treedef, flat), fresh, copied, self._device)

    def launched(self) -> None:
        self._used.append(torch.cuda.current_stream(self._device).record_event())
        if len(self._used) > self._ahead:
            self._used.popleft().synchronize()


@dataclass(eq=False)
class _OnItsWay(Generic[B]):
    batch: B
    fresh: list[Tensor]
    copied: Any
    device: torch.device

    def arrive(self) -> B:
        current = torch.cuda.current_stream(self.device)
        current.wait_event(self.copied)
        for tensor in self.fresh:
            tensor.record_stream(current)  # what is dropped is used again only after the work queued there
        return self.batch


@dataclass(eq=False)
class _Slot:
    specs: list[BufferSpec]
    buffers: list[Tensor]
    sent: Any = None


class PinnedRing:
    """Host memory that copies to the device start from, one slot per batch on its way.

    Args:
      depth: Number of slots.
      pin_memory: Whether it is pinned.
    """

    def __init__(self, depth: int, *, pin_memory: bool) -> None:
        self._slots: list[_Slot | None] = [None] * depth
        self._pin_memory = pin_memory
        self._turn = 0

    def fill(self, leaves: Sequence[Tensor]) -> _Slot:
        """Copy leaves into the next slot, once the copy that started from it is done."""
        slot = self._slots[self._turn]
        if slot is not None and slot.sent is not None:
            slot.sent.synchronize()
        specs = [BufferSpec.of(leaf) for leaf in leaves]
        if slot is None or slot.specs != specs:
            slot = _Slot(specs, [self._buffer(spec) for spec in specs])
            self._slots[self._turn] = slot
        self._turn = (self._turn + 1) % len(self._slots)
        torch._foreach_copy_(slot.buffers, list(leaves))
        return slot

    def _buffer(self, spec: BufferSpec) -> Tensor:
        return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, pin_memory=self._pin_memory)


def on_host(leaf: Any) -> Tensor | None:
    """A leaf whose memory is on the host and can be copied from there; None for what is handed over as it is.

    Among the latter are numbers, which may be static arguments, and what the step refuses: its message names the leaf.
    """
    if isinstance(leaf, Leaf) or not (isinstance(leaf, Tensor) or getattr(leaf, "shape", None)):
        return None
    tensor = as_input(leaf)
    if tensor is None or not tensor.is_cpu or unplaceable(tensor) or cuts_a_graph(leaf):
        return None
    return tensor
