"""The simulator: a replay on the CPU that is as unforgiving as a CUDA graph.

Pass it as ``graph_step(backend=Simulator())``. A capture records the ATen calls of the plan with the memory that they
read and write and the literals that they were given; from then on no Python of the step runs. A replay repeats the
calls on the same memory. Between replays everything that would lie in the graph's private pool is overwritten, static
metrics included, and all captures of one simulator share that pool. What was not born in the capture is known by its
address only: once its owner lets go of it, the simulator finds garbage there.

A step that survives this is safe on the GPU as far as memory and baked values go. Streams are not simulated.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ..arena import storage_key
from ..ops import tensors_in
from ..stages.lower import AtenPlan, Before, Buffers, ExecutionPlan
from ..stages.poison import poison
from ..state import uninterrupted

__all__ = ["Simulator"]

_WARM_UPS = 2


class _Address:
    """Memory that somebody else owns, as a graph knows it: an address, and how to read it."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._nbytes = tensor.untyped_storage().nbytes()
        self._dtype = tensor.dtype
        self._view = (tensor.storage_offset(), tensor.shape, tensor.stride())
        self._bits = (tensor.is_conj(), tensor.is_neg())

    def tensor(self) -> Tensor:
        """What lies there now: garbage if the owner has freed it."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            storage = torch.UntypedStorage(self._nbytes)
            poison(torch.empty(0, dtype=self._dtype).set_(storage))
        tensor: Tensor = torch.empty(0, dtype=self._dtype).set_(storage, *self._view)
        conjugated, negated = self._bits
        tensor = tensor.conj() if conjugated else tensor
        return torch._neg_view(tensor) if negated else tensor


def _resolve(value: Any) -> Any:
    """An argument as it was recorded, with addresses looked up."""
    if isinstance(value, _Address):
        return value.tensor()
    if isinstance(value, (list, tuple)):
        return type(value)(_resolve(item) for item in value)
    return value


@dataclass(frozen=True, slots=True)
class _Call:
    """One recorded call: the op, arguments with literals as they were, and results in the memory that they had.

    Attributes:
      fresh: Results that are not memory of an argument, with their positions among all results.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    fresh: tuple[tuple[int, Tensor], ...]

    def bound(self) -> Callable[[], Any]:
        """The call on what lies at the recorded addresses now, as a function that runs in C."""
        kwargs = {name: _resolve(value) for name, value in self.kwargs.items()}
        return partial(getattr(self.op, "_op", self.op), *_resolve(self.args), **kwargs)

    def repeat(self) -> None:
        """Run the call, and put its results where they lay when it was recorded."""
        results = list(tensors_in([self.bound()()]))
        for position, memory in self.fresh:
            memory.untyped_storage().copy_(results[position].untyped_storage(), non_blocking=False)


class _Recorder(TorchDispatchMode):
    """Records the calls of one run on buffers, and which memory is born in it."""

    def __init__(self, buffers: Buffers) -> None:
        super().__init__()
        everything = [*buffers.slots, *buffers.inputs, *buffers.constants]
        self._of_others = frozenset(storage_key(tensor) for tensor in everything)
        self.calls: list[_Call] = []
        self.tail = 0
        self.pool: dict[int, Tensor] = {}

    def begin_tail(self) -> None:
        self.tail = len(self.calls)

    def address(self, value: Any) -> Any:
        """A value as the record may keep it: the static buffers by address only."""
        if isinstance(value, Tensor):
            return _Address(value) if storage_key(value) in self._of_others else value
        if isinstance(value, (list, tuple)):
            return type(value)(self.address(item) for item in value)
        return value

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = {storage_key(tensor) for tensor in tensors_in([*args, *kwargs.values()])}
        fresh = [(i, t) for i, t in enumerate(tensors_in([out])) if storage_key(t) not in given]
        arguments = self.address(args)
        named = {name: self.address(value) for name, value in kwargs.items()}
        for _, tensor in fresh:  # the recorded tensors stay alive, so no storage is ever used twice
            self.pool.setdefault(storage_key(tensor), tensor)
        self.calls.append(_Call(func, arguments, named, tuple(fresh)))
        return out


class _SimulatedReplay:
    """Repeats recorded calls; its metrics lie in the pool and are overwritten by the next replay."""

    fresh = False

    def __init__(self, recorder: _Recorder, static: Sequence[Tensor], simulator: Simulator) -> None:
        self._head = recorder.calls[: recorder.tail]
        self._tail = recorder.calls[recorder.tail :]
        self._pool = recorder.pool
        self._static = [recorder.address(tensor) for tensor in static]
        self._simulator = simulator

    def __call__(self, before: Before, /) -> Sequence[Tensor]:
        # Nothing here requires grad; without a context manager Ctrl-C finds no mode to leave half set.
        self._simulator.poison()
        for call in self._head:
            call.repeat()
        uninterrupted((*before, *[call.bound() for call in self._tail]))
        metrics = [_resolve(tensor) for tensor in self._static]
        self.poison({storage_key(tensor) for tensor in metrics})
        return metrics

    def poison(self, spared: set[int] | None = None) -> None:
        """Overwrite the memory that was born in the capture."""
        for key, tensor in self._pool.items():
            if key not in (spared or ()):
                poison(tensor)

    def close(self) -> None:
        self.poison()
        self._head, self._tail, self._static, self._pool = [], [], [], {}


class Simulator:
    """An adversarial CPU backend, for tests: ``graph_step(backend=Simulator())``.

    One object may serve several steps; they share a pool then, as CUDA graphs may. It needs ``lowering="aten"``, the
    default on CPU.

    Example:
      >>> import torch, functional_cg as fcg
      >>> from functional_cg.testing import Simulator
      >>> step = fcg.graph_step(lambda s, x: ({"w": s["w"] + x}, {"sum": x.sum()}), backend=Simulator())
      >>> state, metrics = step({"w": torch.zeros(2)}, torch.ones(2))
      >>> state["w"] + 0, metrics["sum"]
      (tensor([1., 1.]), tensor(2.))
    """

    name = "simulator"

    def __init__(self) -> None:
        self._replays: weakref.WeakSet[_SimulatedReplay] = weakref.WeakSet()

    def capture(
        self, plan: ExecutionPlan, buffers: Buffers, scratch: Callable[[], Buffers]
    ) -> _SimulatedReplay:
        """Warm up on scratch memory, then record one run on the static buffers, which end as they were."""
        if not isinstance(plan, AtenPlan):
            raise TypeError('the simulator records ATen calls; it needs `lowering="aten"`')
        if not all(tensor.is_cpu for tensor in buffers.slots):
            raise TypeError("the simulator replays on the CPU; place the state there")
        with torch.inference_mode(False), torch.no_grad():
            warm = plan.bind(scratch())
            for _ in range(_WARM_UPS):
                warm(())
            del warm
            run = plan.bind(buffers)
            before = [slot.clone() for slot in buffers.slots]  # a real capture runs nothing
            recorder = _Recorder(buffers)
            try:
                with recorder:
                    static = run((recorder.begin_tail,))
            finally:
                uninterrupted(
                    [partial(slot.copy_, value) for slot, value in zip(buffers.slots, before, strict=True)]
                )
        replay = _SimulatedReplay(recorder, static, self)
        self._replays.add(replay)
        return replay

    def poison(self) -> None:
        """Overwrite the pool: all that lives in captures between two calls, static metrics included."""
        for replay in self._replays:
            replay.poison()
