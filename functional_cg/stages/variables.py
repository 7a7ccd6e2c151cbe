"""The variables of a trace, and the fake tensors that stand for them.

A variable gets a tensor when one is asked for. The calls of a block that is recorded again, for example, make variables
that nobody looks at.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Set

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..shards.transfers import is_between_ranks
from ..state.arena import BufferSpec
from ..tensors.fake_mode import FakeMode
from ..tensors.overlap import storage_key
from .program import Program, Var

__all__ = ["History", "Reference", "Variables"]

# To a tensor, held weakly.
Reference = Callable[[], Tensor | None]


class Variables:
    """The variables of one run of a function.

    Attributes:
      count: How many there are.
      storages: How many storages they have.
      standing: Those that tensors stand for, in the order of the tensors.
      declared: By id of a constant, the tensor that stands for it.
    """

    def __init__(self, mode: FakeMode) -> None:
        self._mode = mode
        self.count = self.storages = 0
        self.standing: list[Var] = []
        self.declared: dict[int, Tensor] = {}
        self._tensors: list[Tensor] = []  # keeps ids and storages unique while the trace lasts
        self._references: list[Reference] = []
        self._of: dict[int, Var] = {}
        self._numbers: dict[int, int] = {}
        self._memory: dict[int, Tensor] = {}  # by number of the storage, a tensor in it
        self._sizes: dict[int, int] = {}  # by number of the storage, its bytes
        self._made: dict[Var, Tensor] = {}

    def get(self, tensor: Tensor) -> Var | None:
        return self._of.get(id(tensor))

    def of(self, tensor: Tensor) -> Var | None:
        """Return the variable of a tensor, or of the one that stands for it; None if there is none."""
        return self.get(self.declared.get(id(tensor), tensor))

    def __getitem__(self, tensor: Tensor) -> Var:
        return self._of[id(tensor)]

    def new(self, tensor: Tensor) -> Var:
        """Make the variable of a tensor."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._numbers:
            self._numbers[storage._cdata], self.storages = self.storages, self.storages + 1
        number = self._numbers[storage._cdata]
        self._memory.setdefault(number, tensor)
        self._sizes.setdefault(number, storage.nbytes())
        spec = BufferSpec(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)
        fills = storage.nbytes() == spec.nbytes
        var = Var(self.count, spec, number, int(tensor.storage_offset()), fills)
        self.count += 1
        self._stands(tensor, var)
        return var

    def reserve(self, count: int, storages: range) -> tuple[int, int]:
        """Reserve numbers for variables without tensors, and for storages as large as those in a range.

        Returns:
          The first of the variables' numbers, and the first of the storages'.
        """
        first = self.count, self.storages
        for number, alike in enumerate(storages, self.storages):
            self._sizes[number] = self._sizes[alike]
        self.count, self.storages = self.count + count, self.storages + len(storages)
        return first

    def tensor(self, value: Tensor | Var) -> Tensor:
        """Return a tensor that stands for a variable that came without one; a tensor as it is."""
        if isinstance(value, Tensor):
            return value
        if value not in self._made:
            with _disable_current_modes(), torch._C.DisableTorchFunction(), self._mode, torch.no_grad():
                self._made[value] = tensor = self._in_memory(value)
            self._numbers[storage_key(tensor)] = value.storage
            self._memory.setdefault(value.storage, tensor)
            self._stands(tensor, value)
        return self._made[value]

    def _in_memory(self, var: Var) -> Tensor:
        spec, memory = var.spec, self._memory.get(var.storage)
        if memory is None:
            memory = torch.empty(self._sizes[var.storage], dtype=torch.uint8, device=spec.device)
        empty = torch.empty(0, dtype=spec.dtype, device=spec.device)
        return empty.set_(memory.untyped_storage(), var.offset, spec.shape, spec.stride)

    def _stands(self, tensor: Tensor, var: Var) -> None:
        self._tensors.append(tensor)
        self.standing.append(var)
        self._of[id(tensor)] = var

    def tensors(self) -> dict[Var, Tensor]:
        """Return the tensors that stand for variables."""
        return dict(zip(self.standing, self._tensors, strict=True))

    def describes(self, var: Var, tensor: Tensor) -> bool:
        """Whether a tensor still has the layout and storage that it had when its variable was made."""
        spec = var.spec
        return (
            tensor.shape == spec.shape
            and tensor.dtype is spec.dtype
            and tensor.stride() == spec.stride
            and tensor.storage_offset() == var.offset
            and self._numbers.get(storage_key(tensor)) == var.storage
        )

    def release(self) -> list[Reference]:
        """Drop all tensors; return weak references to them, in the order of ``standing``."""
        self._mode.forget()
        self._references += map(weakref.ref, self._tensors)
        for one in (self._tensors, self._memory, self._made, self.declared):
            one.clear()
        return self._references


class History:
    """What the calls of a program that grows have done to the memory of tensors so far.

    Args:
      program: The program.
      var_of: Returns the variable of a tensor, if it has one.
    """

    def __init__(self, program: Program, var_of: Callable[[Tensor], Var | None]) -> None:
        self._program, self._var_of, self._seen = program, var_of, 0
        self._writes: Counter[int] = Counter()
        self._given: set[int] = set()
        self._unknown: set[int] = set()

    def writes_to(self, tensor: Tensor) -> int:
        """Return how many calls have written the memory of a tensor."""
        var = self._var_of(tensor)
        self._read()
        return 0 if var is None else self._writes[var.storage]

    @property
    def given(self) -> Set[int]:
        """The storages whose content may depend on the state, on inputs, or on other ranks."""
        self._read()
        return self._given

    def is_given(self, tensor: Tensor) -> bool:
        """Whether what a tensor holds may depend on the state, on inputs, or on other ranks."""
        var = self._var_of(tensor)
        return var is None or var.storage in self.given

    def mark(self, var: Var) -> None:
        """Note a variable that no call fills, of unknown content."""
        self._unknown.add(var.storage)
        self._given.add(var.storage)

    def forget(self) -> None:
        """Read the calls anew: some have been taken back."""
        self._seen = 0
        self._writes.clear()
        self._given = set(self._unknown)

    def _read(self) -> None:
        if not self._seen:
            self._given.update(var.storage for var in (*self._program.slots, *self._program.inputs))
        for instr in self._program.instrs[self._seen :]:
            written = [var.storage for var in instr.writes]
            self._writes.update(written)
            reads = {var.storage for var in instr.inputs()}
            if not reads.isdisjoint(self._given) or is_between_ranks(instr.op):
                self._given.update(written, (var.storage for var in instr.outputs()))
        self._seen = len(self._program.instrs)
