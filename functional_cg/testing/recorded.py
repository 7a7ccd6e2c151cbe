"""Records ATen calls on memory addresses, so that they can be repeated without running the step's Python.

A tensor is recorded as its address and view at the time of the call. A call that changes the shape or the memory of its
argument (``t_``, ``resize_``, ``set_``, ``out=``) therefore finds it unchanged at each repetition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..shards.collectives import WAIT
from ..shards.transfers import WAITS, is_between_ranks
from ..stages.run.poison import poison
from ..tensors.aten import can_draw, tensors_in
from ..tensors.overlap import storage_key

__all__ = ["Address", "Block", "Call", "Foreign", "Memory", "resolve"]


class Memory(Protocol):
    """The memory in which a tensor lies."""

    def storage(self, dtype: torch.dtype) -> torch.UntypedStorage:
        """Return the bytes that are there now, to be read as ``dtype``."""
        ...


class Block:
    """Memory that is owned by whoever holds the record.

    Attributes:
      dtype: Of what it holds.
      expected: What a collective or a transfer will have written there, once somebody waits for it.
    """

    def __init__(self, nbytes: int) -> None:
        self._storage = torch.UntypedStorage(nbytes)
        self._poisoned = False
        self.dtype = torch.uint8
        self.expected: Tensor | None = None

    @classmethod
    def of(cls, tensor: Tensor) -> Block:
        """Return the memory of a tensor, and keep it alive."""
        block = cls(0)
        block._storage, block.dtype = tensor.untyped_storage(), tensor.dtype
        return block

    @property
    def nbytes(self) -> int:
        return int(self._storage.nbytes())

    def storage(self, dtype: torch.dtype) -> torch.UntypedStorage:
        return self._storage

    def grow(self, nbytes: int) -> None:
        """Enlarge the block, as for a tensor that is resized."""
        if nbytes > self.nbytes:
            self._storage.resize_(nbytes)

    def put(self, value: Tensor) -> None:
        """Copy the bytes of a result into the block."""
        source = _bytes(value.untyped_storage())
        _bytes(self._storage)[: source.numel()].copy_(source)
        self.dtype = value.dtype

    def arrive(self) -> None:
        """Wait for what is expected."""
        if self.expected is not None:
            self.put(WAIT(self.expected))
            self.expected = None

    def revive(self) -> None:
        """Mark the block as about to be written."""
        self._poisoned = False

    def poison(self) -> None:
        """Overwrite the block, unless nothing was written since the last time."""
        if not self._poisoned:
            poison(torch.empty(0, dtype=self.dtype).set_(self._storage))
            self._poisoned = True


class Foreign:
    """Memory owned by others, as a graph sees it: after it is freed, it holds garbage."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._nbytes = tensor.untyped_storage().nbytes()

    def storage(self, dtype: torch.dtype) -> torch.UntypedStorage:
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            storage = torch.UntypedStorage(self._nbytes).fill_(0)
            poison(torch.empty(0, dtype=dtype).set_(storage))
        return storage


class Address:
    """The place of a tensor when it was recorded: its memory, dtype and view. What has no memory stands for itself."""

    def __init__(self, tensor: Tensor, memory: Memory) -> None:
        self.memory = memory
        self._itself = None if _has_memory(tensor) else tensor
        self._dtype = tensor.dtype
        self._view = (tensor.storage_offset(), tensor.shape, tensor.stride())
        self._bits = (tensor.is_conj(), tensor.is_neg())

    def tensor(self) -> Tensor:
        """Return the tensor that is there now."""
        if self._itself is not None:
            return self._itself
        storage = self.memory.storage(self._dtype)
        tensor: Tensor = torch.empty(0, dtype=self._dtype).set_(storage, *self._view)
        conjugated, negated = self._bits
        tensor = tensor.conj() if conjugated else tensor
        return torch._neg_view(tensor) if negated else tensor


def resolve(value: Any) -> Any:
    """Return a recorded argument with its addresses resolved to tensors."""
    if isinstance(value, Address):
        return value.tensor()
    if isinstance(value, (list, tuple)):
        return type(value)(resolve(item) for item in value)
    return value


def _addressed(value: Any, locate: Callable[[Tensor], Memory]) -> Any:
    if isinstance(value, Tensor):
        return Address(value, locate(value))
    if isinstance(value, (list, tuple)):
        return type(value)(_addressed(item, locate) for item in value)
    return value


def _has_memory(tensor: Tensor) -> bool:
    """Whether a tensor's values lie anywhere: not those of a zero tangent, nor of what torch asks for its shape."""
    return not (tensor.is_meta or torch._is_zerotensor(tensor))


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


@dataclass(frozen=True, slots=True)
class Draw:
    """A generator and its state when a call drew from it: a replay does not advance the captured offset."""

    generator: torch.Generator
    state: Tensor

    def rewound(self, call: Callable[[], Any]) -> Any:
        """Run a call so that it draws the recorded numbers again; the generator's state is restored."""
        now = self.generator.get_state()
        self.generator.set_state(self.state)
        try:
            return call()
        finally:
            self.generator.set_state(now)


def _drawn(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Draw | None:
    if not isinstance(op, torch._ops.OpOverload) or not can_draw(op, args, kwargs):
        return None
    generator = kwargs.get("generator") or torch.default_generator
    return Draw(generator, generator.get_state())


@dataclass(slots=True)
class Call:
    """One recorded ATen call.

    Attributes:
      op: The op, or a compiled kernel, which draws no numbers.
      args: Its arguments: addresses in place of tensors, literals unchanged.
      kwargs: The same, by name.
      draw: The generator and its state, if it draws random numbers.
      fresh: Results in memory of their own, not an argument's: their positions among all results, and their memory.
    """

    op: Any
    args: Any
    kwargs: dict[str, Any]
    draw: Draw | None
    fresh: Sequence[tuple[int, Block]] = ()

    @classmethod
    def run(
        cls,
        op: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        locate: Callable[[Tensor], Memory],
        allocate: Callable[[Tensor], Block],
    ) -> tuple[Call, Any]:
        """Make a call and record it.

        Args:
          op: The op.
          args: Its arguments.
          kwargs: The same, by name.
          locate: Returns the memory of an argument.
          allocate: Returns the memory for a new tensor.
        Returns:
          The record, and the result of the call.
        """
        named = {name: _addressed(value, locate) for name, value in kwargs.items()}
        record = cls(op, _addressed(tuple(args), locate), named, _drawn(op, args, kwargs))
        given = {storage_key(tensor) for tensor in tensors_in([*args, *kwargs.values()])}
        out = op(*args, **kwargs)
        new = [(i, tensor) for i, tensor in enumerate(tensors_in([out])) if storage_key(tensor) not in given]
        record.fresh = [(i, allocate(tensor)) for i, tensor in new if _has_memory(tensor)]
        return record, out

    def bound(self) -> Callable[[], Any]:
        """Bind the call to the tensors now at the recorded addresses, as a function that runs in C."""
        kwargs = {name: resolve(value) for name, value in self.kwargs.items()}
        return partial(getattr(self.op, "_op", self.op), *resolve(self.args), **kwargs)

    def repeat(self) -> None:
        """Run the call, and write its results to their recorded memory; what ranks send, when it is waited for."""
        waits = self.op in WAITS
        if waits and isinstance(self.args[0].memory, Block):
            self.args[0].memory.arrive()
        call = self.bound()
        results = list(tensors_in([call() if self.draw is None else self.draw.rewound(call)]))
        for position, block in self.fresh:
            if not waits and isinstance(self.op, torch._ops.OpOverload) and is_between_ranks(self.op):
                block.expected = results[position]
            else:
                block.put(results[position])
