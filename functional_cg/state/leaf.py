"""Leases and read-only leaves: access to the memory of a state from outside steps.

A lease gives one state the use of an arena, and holds the number of the current generation. A leaf is a
tensor without memory that reads one slot, as long as it is of the current generation.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Never, Protocol

import torch
from torch import Tensor

from ..ambient.modes import ordinary, without_gradients
from ..concurrency.interrupts import uninterrupted
from ..concurrency.turns import Turn, at_one_time
from ..errors import DonatedStateError, ReadOnlyError
from ..messages.html import card, table
from ..messages.summary import summary
from ..tensors.aten import copies, tensors_in, written_arguments
from ..tensors.overlap import storage_key
from ..tree import KeyPath, Treedef
from .arena import Arena, BufferSpec

__all__ = [
    "Leaf",
    "Lease",
    "Origin",
    "Part",
    "as_tensor",
    "donated",
    "key_name",
    "owned",
    "turns_of",
]

_LARGEST = 3.4028234663852886e38  # the largest float32


@dataclass(eq=False, slots=True, weakref_slot=True)
class Lease:
    """The use of an arena by one state; it ends when the last handle and leaf are gone.

    Attributes:
      arena: The memory.
      treedef: Structure of the state.
      paths: Key path of each leaf.
      cell: One-element list with the current generation; a list, so that C code can increment it.
      whole: Root of the state's tree; caches the parts that have been looked up.
    """

    arena: Arena
    treedef: Treedef
    paths: list[KeyPath]
    cell: list[int] = field(default_factory=lambda: [0])
    whole: Part = field(init=False)

    def __post_init__(self) -> None:
        self.whole = Part(self.treedef, 0, "state")
        watchers = self.arena.watchers
        self.arena.lease = weakref.ref(self, lambda _: [watch() for watch in watchers])

    def raised(self) -> Callable[[], None]:
        """Return a C-level call that increments the generation."""
        return partial(operator.setitem, self.cell, 0, self.cell[0] + 1)

    def write(self, positions: Sequence[int], values: Sequence[Tensor]) -> None:
        """Write values into slots and increment the generation, all or nothing."""
        arena = self.arena
        arena.join()
        with ordinary():
            without_gradients()
            # What can fail happens before the generation is incremented. A copy from the host takes no memory.
            near = [value.detach() if value.is_cpu else value.detach().to(arena.device) for value in values]
            calls: list[Callable[[], Any]] = [self.raised()]
            if positions:
                calls += copies([arena.slots[i] for i in positions], near)
            uninterrupted(calls)


class Part:
    """A node of a state's tree: its structure, position and key path.

    Attributes:
      node: Structure of the part.
      start: Position of its first leaf.
      path: Key path as text.
    """

    __slots__ = ("_children", "node", "path", "start")

    def __init__(self, node: Treedef, start: int, path: str) -> None:
        self.node = node
        self.start = start
        self.path = path
        self._children: dict[Any, Part] | None = None

    @property
    def stop(self) -> int:
        return self.start + self.node.num_leaves

    @property
    def is_mapping(self) -> bool:
        return self.node.kind is dict or (self.node.kind is not None and issubclass(self.node.kind, Mapping))

    @property
    def children(self) -> dict[Any, Part]:
        """The parts one level below, by field name, key or index, in flat order; built on first use."""
        if self._children is None:
            found, start = {}, self.start
            for key, child in zip(self.node.keys, self.node.children, strict=True):
                found[key_name(key)] = Part(child, start, f"{self.path}{key}")
                start += child.num_leaves
            self._children = found
        return self._children


def key_name(key: Any) -> Any:
    """Return what a key-path entry stands for: a field name, a key or an index."""
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return key


class Origin(Protocol):
    """What a leaf needs of its handle; a donated one also has ``_donor``, the name of the donating call."""

    _lease: Lease
    _generation: int


def donated(path: str, origin: Origin, state: str = "state", function: str = "") -> DonatedStateError:
    """Return the error for using a handle or leaf of a donated state, in a call of `function` if given."""
    donor = getattr(origin, "_donor", "")
    by = f" to `{donor}`" if donor else ""
    edits = {
        "replace": f"{state} = {state}.replace(...)",
        "fcg.tree.at": f"{state} = fcg.tree.at(lambda s: ..., {state}, value)",
        "fcg.load_state_dict": f"{state} = fcg.load_state_dict({state}, d)",
        "fcg.load": f"{state} = fcg.load(path, {state})",
        "checkpoints": f"{state} = saved.load({state})",
        "train.rewind": f"{state} = train.rewind({state}, number)",
    }
    call = edits.get(donor, f"{state}, metrics = {donor or 'step'}({state}, batch)")
    return DonatedStateError.of(
        function,
        f"`{path}` was used after `{state}` was donated{by} (generation {origin._generation}).",
        why=f"Its buffers now hold generation {origin._lease.cell[0]}.",
        fix=f"use the returned state, `{call}`, or `{state}.latest()`; "
        f"to keep the old one, call `old = fcg.snapshot({state})` first.",
    )


class Leaf(Tensor):
    """A read-only view of a leaf of a state: reads like an ordinary tensor, and raises once its state is donated.

    Operations return ordinary tensors with their own memory; a view of a leaf is again a leaf. Writing raises
    :class:`ReadOnlyError`. ``numpy()``, DLPack, pickling and ``deepcopy`` copy; the storage is inaccessible.
    Give a module a copy, ``parameter.data = leaf.clone()``: without ``clone`` torch reads from address 0,
    which Python code cannot prevent.
    """

    _real: Tensor
    _origin: Origin
    _path: str

    __slots__ = ("_origin", "_path", "_real")
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, real: Tensor, origin: Origin, path: str) -> Leaf:
        if torch.is_inference_mode_enabled():  # the leaf may be used after the mode has ended
            with ordinary():
                return cls.__new__(cls, real, origin, path)
        leaf = torch.Tensor._make_wrapper_subclass(
            cls,
            real.shape,
            strides=real.stride(),
            storage_offset=real.storage_offset(),
            dtype=real.dtype,
            device=real.device,
            layout=real.layout,
        )
        # Without this mark `to_dlpack` reads a null pointer and crashes the process.
        torch._C._set_throw_on_mutable_data_ptr(leaf)
        for name, value in (("_real", real), ("_origin", origin), ("_path", path)):
            object.__setattr__(leaf, name, value)
        return leaf

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and func._can_decompose():
            return func.decompose(*args, **kwargs)  # only its parts show what it writes, as in F.batch_norm
        for tensor in written_arguments(func, args, kwargs):
            if isinstance(tensor, Leaf):
                raise tensor._read_only()
        sources = [t for t in tensors_in([*args, *kwargs.values()]) if isinstance(t, Leaf)]
        if func.overloadpacket is torch.ops.aten.set_:
            sources[0].storage()

        def compute() -> Any:
            return func(*map(_unwrap, args), **{name: _unwrap(arg) for name, arg in kwargs.items()})

        if len(sources) == 1:
            return _rewrap(sources[0]._turn.read(compute), sources)
        return _rewrap(at_one_time(turns_of(sources), compute), sources)

    def _read(self) -> Tensor:
        """Return the slot's memory, to be read in its turn; raise if the state was donated."""
        origin = self._origin
        if not self._alive:
            raise donated(self._path, origin)
        origin._lease.arena.join()
        return self._real

    @property
    def _alive(self) -> bool:
        return self._origin._lease.cell[0] == self._origin._generation

    def _owned(self) -> Tensor:
        return self._turn.read(lambda: self._read().clone())  # type: ignore[no-any-return]

    @property
    def _turn(self) -> Turn:
        return self._origin._lease.arena.turn

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{self._title}\n{self._owned()!r}" if self._alive else self._title

    def _repr_html_(self) -> str:
        rows = summary(self._owned()) if self._alive else []
        return card(self._title, table(rows[:-1]), table(rows[-1:]))  # the first elements need a wide column

    @property
    def _title(self) -> str:
        title = f"{self._path}  {BufferSpec.of(self._real)}  generation {self._origin._generation}"
        if self._alive:
            return title
        donor = getattr(self._origin, "_donor", "")
        return f"{title}, donated{f' to `{donor}`' if donor else ''}"

    def __format__(self, spec: str) -> str:
        return format(self._owned(), spec) if self.dim() == 0 else super().__format__(spec)

    def tolist(self) -> Any:
        return self._owned().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self._owned().numpy(force=force)

    def __dlpack__(self, **options: Any) -> Any:
        return self._owned().__dlpack__(**options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self._owned()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._owned().__reduce_ex__(protocol)

    def __setitem__(self, key: Any, value: Any) -> Never:  # would silently write into a copy
        raise self._read_only()

    def __setattr__(self, name: str, value: Any) -> Never:
        raise self._read_only(f".{name}")

    def requires_grad_(self, requires_grad: bool = True) -> Leaf:  # noqa: FBT001, FBT002
        if requires_grad:
            raise self._read_only(".requires_grad")
        return self

    def share_memory_(self) -> Never:  # crashes the process on a tensor without memory
        raise self._read_only()

    def storage(self) -> Never:
        raise ReadOnlyError.of(
            "",
            f"the storage of `{self._path}` was asked for; leaves of a state are read-only.",
            why="Whoever has the storage or its address can write the state unseen.",
            fix="take a copy of your own, `.clone()` or `fcg.snapshot(state)`.",
        )

    untyped_storage = _typed_storage = data_ptr = storage

    @property
    def __cuda_array_interface__(self) -> Never:  # an AttributeError, so that readers fall back to DLPack
        raise AttributeError("a leaf of a state has no __cuda_array_interface__; it exports a copy by DLPack")

    def _read_only(self, attribute: str = "") -> ReadOnlyError:
        return ReadOnlyError.of(
            "",
            f"`{self._path}{attribute}` was written to; leaves of a state are read-only.",
            why="The state changes only by what a step returns.",
            fix="`state = state.replace(...)`, or `state = fcg.tree.at(lambda s: ..., state, value)`; "
            "for a copy of your own, `.clone()` or `fcg.snapshot(state)`.",
        )


def turns_of(leaves: Iterable[Any]) -> list[Turn]:
    """Return the turns of the states that leaves belong to."""
    return [leaf._turn for leaf in leaves if isinstance(leaf, Leaf)]


def _unwrap(value: Any) -> Any:
    if isinstance(value, Leaf):
        return value._read()
    if isinstance(value, (list, tuple)):
        return type(value)(_unwrap(item) for item in value)
    return value


def _rewrap(value: Any, sources: Sequence[Leaf]) -> Any:
    if isinstance(value, Tensor):
        if value.layout is torch.strided:  # other layouts have no storage to share
            key = storage_key(value)
            for source in sources:
                if key in source._origin._lease.arena.storages:
                    lazy = value.is_conj() or value.is_neg()  # bits that a leaf cannot carry
                    return value.clone() if lazy else Leaf(value, source._origin, source._path)
        return value
    if isinstance(value, (list, tuple)):
        return type(value)(_rewrap(item, sources) for item in value)
    return value


def owned(value: Any) -> Any:
    """Return a copy of a leaf of a state, any other value as it is."""
    return value._owned() if isinstance(value, Leaf) else value


def as_tensor(value: Any) -> Any:
    """Convert Python numbers and numpy arrays to host tensors, as step inputs are: bool, i64, f32 and c64 scalars.

    Floats become f64, and complex numbers c128, if that is torch's default dtype. An array's memory is shared if torch
    can share it.
    What torch cannot hold (strings, objects, integers of more than 64 bits, floats beyond f32, masked arrays, arrays
    whose ``*`` is a matrix product) is returned as it is, to be reported with its key path.
    """
    try:
        for kind, dtype in ((bool, torch.bool), (int, torch.int64)):
            if isinstance(value, kind):
                return torch.tensor(value, dtype=dtype, device="cpu")
        if isinstance(value, float):
            return _from_float(value)
        if isinstance(value, complex):
            parts = [_from_float(value.real), _from_float(value.imag)]
            return torch.complex(*parts) if all(isinstance(one, Tensor) for one in parts) else value
        of_numpy = type(value).__module__ == "numpy" and hasattr(value, "__array__")
        if (
            of_numpy and type(value).__name__ != "matrix"
        ):  # which computes otherwise than a tensor of its numbers
            return _from_numpy(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        pass
    return value


def _from_float(value: float) -> Any:
    if torch.get_default_dtype() is torch.float64:
        return torch.tensor(value, dtype=torch.float64, device="cpu")
    if abs(value) > _LARGEST and math.isfinite(value):
        return value  # torch would make it infinite
    return torch.tensor(value, dtype=torch.float32, device="cpu")


def _from_numpy(value: Any) -> Tensor:
    strides = [step >= 0 and step % value.itemsize == 0 for step in value.strides]
    if value.ndim == 0 or not value.flags.writeable or not all(strides):
        return torch.tensor(value.copy(), device="cpu")  # torch cannot share read-only memory or such strides
    return torch.from_numpy(value)
