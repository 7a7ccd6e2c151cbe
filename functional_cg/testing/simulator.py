"""Simulates CUDA graph replay on the CPU, with the graph's rules on memory, randomness and streams.

Pass it as ``graph_step(backend=Simulator())``. A capture records the plan's ATen calls, their literals, and the memory
that they read and write. After that, no Python of the step runs. A replay repeats the calls on the same memory.

- The pool: memory allocated during a capture is reused within it as soon as it is free. Between replays all of it is
  overwritten, static metrics included. To that extent all captures of one simulator share a pool.
- Owners: memory that was not allocated in the capture is known by address only. Once its owner frees it, the simulator
  finds garbage there.
- Other ranks: what a collective or a transfer makes is there once it is waited for.
- Randomness: each replay draws the same numbers from a generator as the capture did.
- Streams: :meth:`Simulator.stream` delays copies and replays until something waits for them. Host inputs pass through
  the ring of staging slots that a GPU would need.

A step that passes under the simulator is safe on the GPU with regard to memory, order and baked values.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ..concurrency.interrupts import uninterrupted
from ..concurrency.streams import current_stream
from ..stages.plan import Before, Buffers, Plan, Spare
from ..tensors.overlap import storage_key
from .lanes import SimulatedLanes
from .recorded import Address, Block, Call, Foreign, Memory
from .simulated_stream import DeviceMemory, SimulatedStream, wait_for

__all__ = ["Simulator"]

_WARM_UPS = 2
_CPU = torch.device("cpu")


class _Pool:
    """Memory allocated in one capture: one block for each live tensor; a lane reuses what was allocated on it."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.lane = 0
        self._free: dict[int, list[Block]] = {}
        self._live: dict[int, tuple[StorageWeakRef, Block, int]] = {}

    def find(self, tensor: Tensor) -> Block | None:
        """Return the block of a tensor, enlarged if the tensor has outgrown it."""
        _, block, _ = self._live.get(storage_key(tensor), (None, None, 0))
        if block is not None:
            block.grow(tensor.untyped_storage().nbytes())
        return block

    def reclaim(self) -> None:
        """Reclaim the blocks of tensors that are gone."""
        for key in [key for key, (storage, _, _) in self._live.items() if storage.expired()]:
            _, block, lane = self._live.pop(key)
            self._free.setdefault(lane, []).append(block)

    def allocate(self, tensor: Tensor) -> Block:
        """Return a block for a new tensor: the smallest free one that is large enough."""
        block = self.find(tensor)
        if block is None:
            nbytes = tensor.untyped_storage().nbytes()
            free = self._free.setdefault(self.lane, [])
            block = min((b for b in free if b.nbytes >= nbytes), key=lambda b: b.nbytes, default=None)
            if block is None:
                block = Block(nbytes)
                self.blocks.append(block)
            else:
                free.remove(block)
            self._live[storage_key(tensor)] = StorageWeakRef(tensor.untyped_storage()), block, self.lane
        return block


class _Recorder(TorchDispatchMode):
    """Records the calls of one run on buffers, and the memory that it allocates."""

    def __init__(self, buffers: Buffers) -> None:
        super().__init__()
        everything = [*buffers.slots, *buffers.inputs, *buffers.constants]
        self._of_others = {storage_key(tensor): Foreign(tensor) for tensor in everything}
        self.lanes = SimulatedLanes(self.kernel)
        self.tail = 0
        self.pool = _Pool()
        self.slots = [Address(slot, self.locate(slot)) for slot in buffers.slots]

    def begin_tail(self) -> None:
        self.tail = len(self.lanes.calls)

    def locate(self, tensor: Tensor) -> Memory:
        """Return the memory of a tensor: a static buffer, the pool, or memory that the bound plan holds."""
        return self._of_others.get(storage_key(tensor)) or self.pool.find(tensor) or Block.of(tensor)

    def kernel(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        """Return what records a kernel."""
        return partial(self._record, launch)

    def _record(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        self.pool.reclaim()
        self.pool.lane = self.lanes.lane
        call, out = Call.run(op, args, kwargs, locate=self.locate, allocate=self.pool.allocate)
        self.lanes.append(call)
        return out

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._record(func, *args, **kwargs or {})


class _SimulatedReplay:
    """Repeats recorded calls. Its metrics lie in the pool, and the next replay overwrites them."""

    fresh = False

    def __init__(self, recorder: _Recorder, static: Sequence[Tensor], simulator: Simulator) -> None:
        self._lanes, self._in_head, self._number = recorder.lanes, recorder.tail, 0
        self._slots = recorder.slots
        self._static = [Address(tensor, recorder.locate(tensor)) for tensor in static]
        self.blocks = recorder.pool.blocks
        self._simulator = simulator

    def __call__(self, before: Before, /) -> Sequence[Tensor]:
        stream = current_stream(_CPU)
        if stream is None:
            self._run(before)
        else:
            uninterrupted((*before, partial(stream.queue.append, partial(self._run, ()))))
        return [address.tensor() for address in self._static]

    def _run(self, before: Before) -> None:
        # Nothing here requires grad. Without a context manager, Ctrl-C cannot leave a mode half set.
        self._simulator.overwrite()
        for block in self.blocks:
            block.revive()
        if self._lanes.one:
            self._run_in_line(before)
        else:
            self._run_on_lanes(before)
        metrics = [address.memory for address in self._static]
        for block in self.blocks:
            if block not in metrics:
                block.poison()

    def _run_in_line(self, before: Before) -> None:
        for call in self._lanes.calls[: self._in_head]:
            call.repeat()
        # Committing a lazy view, such as a conjugate, computes before it writes.
        tail = [call.repeat if call.fresh else call.bound() for call in self._lanes.calls[self._in_head :]]
        uninterrupted((*before, *tail))

    def _run_on_lanes(self, before: Before) -> None:
        """Run calls that write slots while others compute; on a GPU none of them raises, nor can Ctrl-C part them."""
        slots = [slot.tensor() for slot in self._slots]
        kept = [slot.clone() for slot in slots]
        done: list[bool] = []
        self._number += 1
        try:
            for call in self._lanes.order(self._number):
                call.repeat()
            uninterrupted((*before, partial(done.append, True)))
        except BaseException:
            if not done:
                uninterrupted([partial(slot.copy_, value) for slot, value in zip(slots, kept, strict=True)])
            raise

    def close(self) -> None:
        self._simulator.synchronize()  # a replay may be in flight
        for block in self.blocks:
            block.poison()
        self._lanes, self._slots, self._static, self.blocks = SimulatedLanes(), [], [], []


class Simulator:
    """An adversarial CPU backend for tests: ``graph_step(backend=Simulator())``.

    One object may serve several steps, which then share a pool, as CUDA graphs may. It needs ``lowering="aten"``, the
    default on a CPU, or a compiled step with ``branches``, whose lanes it runs in any order.

    Example:
      >>> import torch, functional_cg as fcg
      >>> from functional_cg.testing import Simulator
      >>> step = fcg.graph_step(lambda s, x: ({"w": s["w"] + x}, {"sum": x.sum()}), backend=Simulator())
      >>> state, metrics = step({"w": torch.zeros(2)}, torch.ones(2))
      >>> state["w"] + 0, metrics["sum"]
      (tensor([1., 1.]), tensor(2.))
    """

    name = "simulator"
    has_lanes = True

    def __init__(self) -> None:
        self._replays: weakref.WeakSet[_SimulatedReplay] = weakref.WeakSet()
        self._device = DeviceMemory()
        self._streams: dict[str, SimulatedStream] = {}

    def capture(self, plan: Plan, buffers: Buffers, scratch: Callable[[], Spare]) -> _SimulatedReplay:
        """Warm up on scratch memory, then record one run on the static buffers, which are restored."""
        if plan.compiled and plan.timeline.lanes == 1 and not plan.timeline.estimated:
            raise TypeError('the simulator records ATen calls; it needs `lowering="aten"`, or branches')
        if not all(tensor.is_cpu for tensor in buffers.slots):
            raise TypeError("the simulator replays on the CPU; place the state there")
        stream = current_stream(_CPU)
        if stream is not None:
            stream.synchronize()  # warm-up waits for the caller's stream
        with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
            replay = self._record(plan, buffers, scratch)
        self._replays.add(replay)
        return replay

    def _record(self, plan: Plan, buffers: Buffers, scratch: Callable[[], Spare]) -> _SimulatedReplay:
        spare = scratch()
        warm = plan.bind(spare)
        for _ in range(_WARM_UPS):
            spare.reset()
            warm(())
        spare.reset()
        if plan.compiled and plan.timeline.lanes == 1:
            raise TypeError(f'the simulator records ATen calls; it needs `lowering="aten"` ({plan.branches})')
        recorder = _Recorder(buffers)
        plan.rehearse(spare)
        on_lanes = plan.compiled or plan.timeline.lanes > 1
        run = plan.bind_to(buffers, recorder.lanes) if on_lanes else plan.bind(buffers)
        del warm, spare
        before = [slot.clone() for slot in buffers.slots]  # a real capture executes nothing
        try:
            with recorder:
                static = run((recorder.begin_tail,))
        finally:
            uninterrupted(
                [partial(slot.copy_, value) for slot, value in zip(buffers.slots, before, strict=True)]
            )
        replay = _SimulatedReplay(recorder, static, self)
        pool = [torch.empty(0).set_(block.storage(torch.float32)) for block in replay.blocks]
        self._device.add([*buffers.slots, *buffers.inputs, *buffers.constants, *pool])
        return replay

    def stream(self, name: str) -> SimulatedStream:
        """Return the stream of a name; under ``with simulator.stream("a"):`` copies and replays are queued.

        Queued work runs only when it must: when the host reads a value with ``item()``, when the library orders
        streams, or at :meth:`synchronize`. Call :meth:`synchronize` before reading values in any other way.

        Example:
          >>> import torch, functional_cg as fcg
          >>> simulator = fcg.testing.Simulator()
          >>> step = fcg.graph_step(lambda s, x: ({"w": s["w"] + x}, {"w": s["w"] * 1}), backend=simulator)
          >>> state = {"w": torch.zeros(2)}
          >>> for name in ("a", "b"):
          ...     with simulator.stream(name):
          ...         state, metrics = step(state, torch.ones(2))
          >>> metrics["w"].tolist()
          [nan, nan]
          >>> simulator.synchronize()
          >>> metrics["w"].tolist()
          [1.0, 1.0]
        """
        return self._streams.setdefault(name, SimulatedStream(self._device))

    def synchronize(self) -> None:
        """Run all work of all streams, the last stream first, so that unordered work runs in the wrong order."""
        wait_for(list(self._streams.values()))

    def poison(self) -> None:
        """Overwrite the pool: everything that captures hold between two calls, static metrics included."""
        self.synchronize()
        self.overwrite()

    def overwrite(self) -> None:
        """Overwrite the pool at this point of a stream's work."""
        for replay in self._replays:
            for block in replay.blocks:
                block.poison()
