"""Prefetch: copy the next batches to the device while the step works on the current one.

No thread runs here. When the loop asks for a batch, the device is still busy with the previous step: the
loader is asked for its next batch, the copy is queued on a separate stream, and the loop gets a batch whose
copy was queued earlier. The position of a loader that knows it is noted with each batch, so that a checkpoint gets that
of the last batch handed over, not of what was read ahead.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from . import tree as pytree
from .call.inputs import as_input, cuts_a_graph
from .graph_step import GraphFn, GraphStep
from .messages.tracebacks import entry
from .state.arena import BufferSpec, unplaceable
from .state.leaf import Leaf

__all__ = ["Prefetched", "prefetch"]

B = TypeVar("B")
B_co = TypeVar("B_co", covariant=True)
_AT_ONCE = 2  # batches loaded for each one handed over, until the requested number is in flight


@entry("for batch in fcg.prefetch(loader, train_step):")
def prefetch(
    loader: Iterable[B], step: GraphStep[Any, Any] | GraphFn[Any, Any], *, ahead: int = 2
) -> Prefetched[B]:
    """Iterate over the batches of a loader while the next ones are copied to the device of ``step``.

    Tensors on the CPU and numpy arrays in a batch arrive as tensors on the device, with the same shapes,
    dtypes and dimension order; tensors already there, numbers and other objects pass through unchanged.
    Pageable memory goes through a ring of ``ahead + 1`` pinned buffers, and the loader may overwrite it as soon
    as it is asked for the next batch. Pinned memory is copied directly; the loader is asked for more only
    when that copy is done. The stream that is current when a batch is handed over waits for its copy: call
    the step on that stream.

    Lifetime: each batch consists of new tensors, which are neither written nor kept here once they are handed
      over. They are yours for as long as you hold them. After you drop them, their memory is reused only when
      the stream they were handed over on has finished the work queued by then. At most ``2 * ahead + 2``
      batches are
    in device memory: the host is kept from running further ahead of the device.

    The step determines the device, so batches before its first call pass through unchanged; on the CPU, and
    with ``backend="eager"``, all do. The loader runs in your thread: if it takes longer than a step, give it
    workers, ``DataLoader(..., num_workers=4)``. Up to ``ahead`` more batches than were handed over are taken
    from it. Leaving the loop early, or ``close()``, drops these; there is no thread to stop.

    A loader with ``state_dict`` and ``load_state_dict``, such as torchdata's ``StatefulDataLoader``, lends them to the
    iterator: ``state_dict()`` is the position after the last batch handed over, in the loader's own format. With
    ``saved.save(state, loader=batches)`` and ``saved.load(state, loader=batches)`` a run goes on in mid-epoch; see
    :func:`functional_cg.checkpoints`.

    Args:
      loader: Any iterable of batches (trees of tensors and arrays): a ``DataLoader``, a generator, a list.
      step: The step that the batches are for.
      ahead: Number of batches in flight besides the one handed over.
    Returns:
      An iterator over the same batches, in order. An exception of the loader is raised when the loop asks for
      the batch that failed, after all earlier batches.
    Raises:
      TypeError: If ``loader`` is not iterable, or ``step`` is not a captured step.
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
    if not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
        raise TypeError(f"prefetch: {type(loader).__name__!r} object is not iterable")
    return Prefetched(loader, lambda: _transfer_for(step, ahead), ahead)


class Prefetched(Iterator[B]):
    """The batches of a loader, copied ahead; made by :func:`prefetch`. It asks for the first one when the loop does."""

    def __init__(self, loader: Iterable[B], transfer_for: Callable[[], _Transfer | None], ahead: int) -> None:
        self._loader, self._transfer_for, self._ahead = loader, transfer_for, ahead
        self._stateful = callable(getattr(loader, "state_dict", None))
        self._begin()

    def _begin(self) -> None:
        # Positions of the loader: that of the last batch handed over, then those of the batches read ahead.
        self._positions: deque[Any] = deque()
        self._batches = _batches(self._drawn(), self._transfer_for, self._ahead)

    def _drawn(self) -> Iterator[B]:
        """Yield the loader's batches, and note its position before the first, after each, and at the end."""
        source = iter(self._loader)
        self._note()
        for batch in source:
            self._note()
            yield batch
        self._note()

    def _note(self) -> None:
        if self._stateful:
            self._positions.append(copy.deepcopy(self._loader.state_dict()))  # type: ignore[attr-defined]

    def __iter__(self) -> Prefetched[B]:
        return self

    def __next__(self) -> B:
        try:
            batch = next(self._batches)
        except StopIteration:
            self._forget()
            raise
        self._forget()
        return batch

    def _forget(self) -> None:
        if len(self._positions) > 1:
            self._positions.popleft()

    def close(self) -> None:
        """Drop the batches that were read ahead, and end."""
        self._batches.close()
        while len(self._positions) > 1:
            self._positions.pop()

    def state_dict(self) -> Any:
        """Return the loader's position after the last batch handed over, as its own ``state_dict`` gives it.

        Raises:
          TypeError: If the loader has none.
        """
        loader = self._knowing("state_dict")
        return copy.deepcopy(self._positions[0]) if self._positions else loader.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Set the loader's position; batches that were read ahead are dropped, and iteration begins there.

        Raises:
          TypeError: If the loader has none.
        """
        loader = self._knowing("load_state_dict")
        self._batches.close()
        loader.load_state_dict(state_dict)
        self._begin()

    def _knowing(self, name: str) -> Any:
        if not callable(getattr(self._loader, name, None)):
            raise TypeError(
                f"prefetch: {type(self._loader).__name__} has no `{name}`: it does not know its position. To fix: "
                "`torchdata.stateful_dataloader.StatefulDataLoader` (`pip install torchdata`), which takes what a "
                "`DataLoader` takes."
            )
        return self._loader


class _Sent(Protocol[B_co]):
    """A batch in flight."""

    def arrive(self) -> B_co:
        """Return the batch; the current stream waits for its copy."""
        ...


class _Transfer(Protocol):
    """Sends batches to one device."""

    def settle(self) -> None:
        """Wait on the host until no copy reads the loader's memory."""
        ...

    def send(self, batch: B) -> _Sent[B]:
        """Queue the copy of a batch."""
        ...

    def launched(self) -> None:
        """Note that the last batch handed over is in use; wait on the host while too many are unfinished."""
        ...


def _batches(
    source: Iterator[B], transfer_for: Callable[[], _Transfer | None], ahead: int
) -> Generator[B, None, None]:
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
    """Return the transfer to the device of a step; None if that is the CPU, or not known yet."""
    devices = {spec.device for lowered, _ in step._plans() for spec in lowered.layout.specs}
    if len(devices) > 1:
        raise ValueError(
            f"prefetch: `{step._name}` was called on {' and '.join(sorted(map(str, devices)))}. "
            "To fix: make a step for each device, `graph_step(fn)`."
        )
    device = next(iter(devices), torch.device("cpu"))
    return _CudaTransfer(device, ahead) if device.type == "cuda" else None


class _CudaTransfer:
    """Copies on a separate stream; see :class:`_Transfer`."""

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
            tensor.record_stream(current)  # after a drop, memory is reused only after the work queued there
        return self.batch


@dataclass(eq=False)
class _Slot:
    specs: list[BufferSpec]
    buffers: list[Tensor]
    sent: Any = None


class PinnedRing:
    """Host buffers from which batches are copied to the device, one slot per batch in flight.

    Args:
      depth: Number of slots.
      pin_memory: Whether to pin them.
    """

    def __init__(self, depth: int, *, pin_memory: bool) -> None:
        self._slots: list[_Slot | None] = [None] * depth
        self._pin_memory = pin_memory
        self._turn = 0

    def fill(self, leaves: Sequence[Tensor]) -> _Slot:
        """Copy leaves into the next slot, once the previous copy out of it is done."""
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
    """Return a leaf as a host tensor to copy from; None for leaves that pass through unchanged.

    These include numbers, which may be static arguments and never change, unlike an array of one; and what the step
    refuses: its message names the leaf.
    """
    if isinstance(leaf, Leaf) or not hasattr(leaf, "__setitem__"):
        return None
    tensor = as_input(leaf)
    if tensor is None or not tensor.is_cpu or unplaceable(tensor) or cuts_a_graph(leaf):
        return None
    return tensor
