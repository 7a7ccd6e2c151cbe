"""Recorded ATen calls: ops on addresses, with their literals, that can be repeated without any Python of a step.

A tensor is recorded as the address that it was when the call was made, so a call that changes its argument's shape or
memory (``t_``, ``resize_``, ``set_``, ``out=``) finds it as it was at each repetition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..stages.run.poison import poison
from ..tensors.aten import can_draw, tensors_in
from ..tensors.overlap import storage_key

__all__ = ["Address", "Block", "Call", "Foreign", "Memory", "resolve"]


class Memory(Protocol):
    """Where a tensor lies."""

    def storage(self, dtype: torch.dtype) -> torch.UntypedStorage:
        """The bytes that lie there now, in which numbers of ``dtype`` are looked for."""
        ...


class Block:
    """Memory that the holder of the record owns."""

    def __init__(self, nbytes: int) -> None:
        self._storage = torch.UntypedStorage(nbytes)
        self._poisoned = False
        self.dtype = torch.uint8

    @classmethod
    def of(cls, tensor: Tensor) -> Block:
        """The memory of a tensor, held."""
        block = cls(0)
        block._storage, block.dtype = tensor.untyped_storage(), tensor.dtype
        return block

    @property
    def nbytes(self) -> int:
        return int(self._storage.nbytes())

    def storage(self, dtype: torch.dtype) -> torch.UntypedStorage:
        return self._storage

    def grow(self, nbytes: int) -> None:
        """Make room, as for a tensor that is resized."""
        if nbytes > self.nbytes:
            self._storage.resize_(nbytes)

    def put(self, value: Tensor) -> None:
        """Fill with the memory of a result."""
        source = _bytes(value.untyped_storage())
        _bytes(self._storage)[: source.numel()].copy_(source)
        self.dtype = value.dtype

    def revive(self) -> None:
        """Note that values are to be written."""
        self._poisoned = False

    def poison(self) -> None:
        """Overwrite what was written since the last time."""
        if not self._poisoned:
            poison(torch.empty(0, dtype=self.dtype).set_(self._storage))
            self._poisoned = True


class Foreign:
    """Memory that somebody else owns, as a graph knows it: garbage lies there once it was freed."""

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
    """Where a tensor was when it was recorded, and how to read it."""

    def __init__(self, tensor: Tensor, memory: Memory) -> None:
        self.memory = memory
        self._dtype = tensor.dtype
        self._view = (tensor.storage_offset(), tensor.shape, tensor.stride())
        self._bits = (tensor.is_conj(), tensor.is_neg())

    def tensor(self) -> Tensor:
        """What lies there now."""
        storage = self.memory.storage(self._dtype)
        tensor: Tensor = torch.empty(0, dtype=self._dtype).set_(storage, *self._view)
        conjugated, negated = self._bits
        tensor = tensor.conj() if conjugated else tensor
        return torch._neg_view(tensor) if negated else tensor


def resolve(value: Any) -> Any:
    """An argument as it was recorded, with addresses looked up."""
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


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


@dataclass(frozen=True, slots=True)
class Draw:
    """A generator and its state when a call drew from it: nobody moves the offset that a graph was captured with."""

    generator: torch.Generator
    state: Tensor

    def rewound(self, call: Callable[[], Any]) -> Any:
        """Run a call that draws the recorded numbers again; the generator is left as it was."""
        now = self.generator.get_state()
        self.generator.set_state(self.state)
        try:
            return call()
        finally:
            self.generator.set_state(now)


def _drawn(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Draw | None:
    if not can_draw(op, args, kwargs):
        return None
    generator = kwargs.get("generator") or torch.default_generator
    return Draw(generator, generator.get_state())


@dataclass(slots=True)
class Call:
    """One recorded call.

    Attributes:
      op: The op.
      args: Its arguments, with addresses in place of tensors and literals as they were.
      kwargs: The same, by name.
      draw: What it drew from, if it draws random numbers.
      fresh: Results that are not memory of an argument: their positions among all results, and where they lie.
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
          locate: Says in which memory an argument lies.
          allocate: Says in which memory a new tensor lies.
        Returns:
          The record, and what the call returned.
        """
        named = {name: _addressed(value, locate) for name, value in kwargs.items()}
        record = cls(op, _addressed(tuple(args), locate), named, _drawn(op, args, kwargs))
        given = {storage_key(tensor) for tensor in tensors_in([*args, *kwargs.values()])}
        out = op(*args, **kwargs)
        results = enumerate(tensors_in([out]))
        record.fresh = [(i, allocate(tensor)) for i, tensor in results if storage_key(tensor) not in given]
        return record, out

    def bound(self) -> Callable[[], Any]:
        """The call on what lies at the recorded addresses now, as a function that runs in C."""
        kwargs = {name: resolve(value) for name, value in self.kwargs.items()}
        return partial(getattr(self.op, "_op", self.op), *resolve(self.args), **kwargs)

    def repeat(self) -> None:
        """Run the call, and put its results where they lay when it was recorded."""
        call = self.bound()
        results = list(tensors_in([call() if self.draw is None else self.draw.rewound(call)]))
        for position, block in self.fresh:
            block.put(results[position])
