"""The arena: preallocated memory with one slot per leaf of a state.

Planning is pure (:func:`plan`); allocation and copying are not (:class:`Arena`). Each (device, dtype, role)
has one slab, so a role such as ``params`` is one contiguous range of bytes, of which a flat optimizer, a
reduce-scatter bucket or a checkpoint takes a range. Slots of 4 KiB or more are aligned to 256 bytes, smaller
ones to 16, and keep the dense strides with which their leaf was placed.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..ambient.modes import ordinary
from ..ambient.running import running
from ..concurrency.streams import Stream, current_raw_stream, current_stream
from ..concurrency.turns import Turn
from ..errors import CaptureError, LayoutError
from ..pytree.nodes import as_node
from ..shards.placement import Placement
from ..shards.tensor import placed
from ..tensors.overlap import storage_key
from ..tree import KeyPath, path_string
from .pages import Pages

__all__ = [
    "Arena",
    "BufferSpec",
    "Plan",
    "SlabSpec",
    "Slot",
    "as_plain",
    "dtype_name",
    "offsets",
    "plan",
    "refuse_in_a_trace",
    "refuse_unplaceable",
    "unplaceable",
]

_SMALL_ALIGNMENT = 16
_LARGE_ALIGNMENT = 256
_LARGE_BYTES = 4096


def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name of a dtype, as used in specs: ``f32``, ``bf16``, ``i64``, ``bool``."""
    name = str(dtype).removeprefix("torch.")
    for long, short in (("bfloat", "bf"), ("float", "f"), ("complex", "c"), ("uint", "u"), ("int", "i")):
        if name.startswith(long):
            return short + name[len(long) :]
    return name


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """Layout of a leaf's buffer: ``f32[8,1024]@cuda:0``.

    A leaf on a mesh has a placement; its shape and strides are those of the tensor that this rank holds.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    placement: Placement | None = None

    @classmethod
    def of(cls, tensor: Tensor) -> BufferSpec:
        """Return the spec of a tensor, with dense strides in the tensor's dimension order."""
        placement = placed(tensor)
        held = tensor if placement is None else tensor.local  # type: ignore[attr-defined]
        return cls(tuple(held.shape), dense_stride(held), held.dtype, held.device, placement)

    @property
    def logical_shape(self) -> tuple[int, ...]:
        """Shape of the whole leaf."""
        return self.shape if self.placement is None else self.placement.shape

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def same_layout(self, other: BufferSpec) -> bool:
        """Whether shape, dtype and device agree; strides are not part of a leaf's type."""
        return (
            self.shape == other.shape
            and self.dtype == other.dtype
            and self.device == other.device
            and self.placement == other.placement
        )

    def __str__(self) -> str:
        where = "" if self.placement is None else f" {self.placement.describe()}"
        return f"{dtype_name(self.dtype)}[{','.join(map(str, self.logical_shape))}]@{self.device}{where}"


def dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """Return dense strides in the dimension order of ``tensor`` (channels_last stays channels_last)."""
    if tensor.is_contiguous():  # also drops meaningless strides of dimensions of size 1
        stride, step = [], 1
        for size in reversed(tensor.shape):
            stride.append(step)
            step *= max(size, 1)
        return tuple(reversed(stride))
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return tuple(torch.empty_like(meta).stride())


@dataclass(frozen=True, slots=True)
class Slot:
    """A leaf's range in a slab; ``offset`` counts elements."""

    slab: int
    offset: int
    spec: BufferSpec


@dataclass(frozen=True, slots=True)
class SlabSpec:
    """One allocation: ``numel`` elements of ``dtype`` on ``device`` for one role."""

    role: str
    dtype: torch.dtype
    device: torch.device
    numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Plan:
    """Where each leaf lies: slots in the order of the leaves, and their slabs."""

    slots: tuple[Slot, ...]
    slabs: tuple[SlabSpec, ...]

    @property
    def nbytes(self) -> int:
        return sum(slab.nbytes for slab in self.slabs)


def _aligned(offset_bytes: int, nbytes: int) -> int:
    alignment = _LARGE_ALIGNMENT if nbytes >= _LARGE_BYTES else _SMALL_ALIGNMENT
    return -(-offset_bytes // alignment) * alignment


def offsets(specs: Iterable[BufferSpec]) -> tuple[list[int], int]:
    """Lay leaves of one dtype out in one range; return their offsets and its length, in elements."""
    places, end = [], 0
    itemsize = 1
    for spec in specs:
        itemsize = spec.dtype.itemsize
        start = _aligned(end, spec.nbytes)
        places.append(start // itemsize)
        end = start + spec.nbytes
    return places, -(-_aligned(end, 0) // itemsize)


def plan(specs: Sequence[BufferSpec], roles: Sequence[str]) -> Plan:
    """Lay out leaves in disjoint slots inside their slabs; pure and deterministic.

    Args:
      specs: One spec per leaf.
      roles: One role per leaf; leaves of one (device, dtype, role) share a slab, in order.
    """
    groups: dict[tuple[torch.device, torch.dtype, str], list[int]] = {}
    for position, (spec, role) in enumerate(zip(specs, roles, strict=True)):
        groups.setdefault((spec.device, spec.dtype, role), []).append(position)
    slots: dict[int, Slot] = {}
    slabs: list[SlabSpec] = []
    for (device, dtype, role), members in groups.items():
        places, numel = offsets(specs[i] for i in members)
        for i, place in zip(members, places, strict=True):
            slots[i] = Slot(len(slabs), place, specs[i])
        slabs.append(SlabSpec(role, dtype, device, numel))
    return Plan(tuple(slots[i] for i in range(len(specs))), tuple(slabs))


@dataclass(eq=False, slots=True, weakref_slot=True)
class Arena:
    """Memory of one state: slabs and the slots in them. Arenas compare by identity.

    Attributes:
      plan: The layout.
      slabs: One 1-d tensor per slab.
      slots: One view per leaf, with the leaf's shape and strides.
      storages: Identities of the slabs' storages.
      stream: The stream that last used the arena, where work is queued; ``raw_stream`` is its CUDA handle.
      lease: Weak reference to the state that lives here: an arena serves one state at a time, in all steps.
      watchers: Called when that state is gone.
      on_cuda: Whether the device is a GPU; stored, since each call asks several times.
      turn: Lets one thread at a time use it: of two that update it, the second finds its state donated.
      pages: What takes its memory from the device and brings it back; None if the memory stays.
    """

    plan: Plan
    slabs: tuple[Tensor, ...]
    slots: tuple[Tensor, ...]
    device: torch.device
    storages: frozenset[int] = frozenset()
    pages: Pages | None = None
    stream: Stream | None = None
    raw_stream: int = -1
    lease: weakref.ref[Any] | None = None
    watchers: list[Callable[[], None]] = field(default_factory=list)
    on_cuda: bool = field(init=False)
    turn: Turn = field(init=False)

    def __post_init__(self) -> None:
        self.on_cuda = self.device.type == "cuda"
        self.turn = Turn("a state", on_gpu=self.on_cuda)

    @property
    def free(self) -> bool:
        """Whether no state lives here: the last handle and the last leaf are gone."""
        return self.lease is None or self.lease() is None

    @property
    def vacant(self) -> bool:
        """Whether a new state may live here."""
        return self.free and not self.asleep

    @property
    def asleep(self) -> bool:
        """Whether its memory is away."""
        return self.pages is not None and self.pages.away

    @classmethod
    def allocate(
        cls, plan: Plan, device: torch.device, *, pin_memory: bool = False, can_sleep: bool = False
    ) -> Arena:
        """Allocate zeroed slabs; padding between slots stays zero for the arena's whole life."""
        with ordinary():
            pages = Pages([slab.nbytes for slab in plan.slabs], device) if can_sleep else None
            if pages is None:
                slabs = tuple(
                    torch.zeros(slab.numel, dtype=slab.dtype, device=slab.device, pin_memory=pin_memory)
                    for slab in plan.slabs
                )
            else:
                slabs = tuple(
                    part.view(slab.dtype) for part, slab in zip(pages.parts, plan.slabs, strict=True)
                )
            slots = tuple(
                torch.as_strided(slabs[slot.slab], slot.spec.shape, slot.spec.stride, slot.offset)
                for slot in plan.slots
            )
        return cls(plan, slabs, slots, device, frozenset(map(storage_key, slabs)), pages)

    def copy(self) -> Arena:
        """Return an arena with the same layout and values."""
        copy = Arena.allocate(self.plan, self.device)
        self.turn.read(partial(self._copy_to, copy.slabs))
        return copy

    def _copy_to(self, slabs: Sequence[Tensor]) -> None:
        self.join()
        for new, old in zip(slabs, self.slabs, strict=True):
            new.copy_(old)

    def join(self) -> None:
        """Order the current stream after the arena's last use, if that was on another stream."""
        if self.on_cuda and self.raw_stream == current_raw_stream(self.device.index):
            return
        current = current_stream(self.device)
        if current is self.stream:
            return
        if self.stream is not None:
            self._order_after(self.stream, current)
        self.stream = current
        if self.on_cuda:
            self.raw_stream = current.cuda_stream

    def _order_after(self, last: Stream, current: Any) -> None:
        if current is None:
            last.synchronize()
            return
        current.wait_stream(last)
        if self.on_cuda:
            for slab in self.slabs:  # the allocator must not reuse them before this stream is done
                slab.record_stream(current)


def refuse_in_a_trace(function: str = "") -> None:
    """Raise if a state is made or stored in a step that is being traced, whose tensors have no values.

    Raises:
      CaptureError: In a trace.
    """
    if running().work is not None:
        raise CaptureError.of(
            function,
            "makes or stores a state, as `fcg.place`, `fcg.fork`, `fcg.save` and `fcg.load_state_dict` do.",
            why="A graph repeats what is done on the device: it writes no file and makes no state.",
            fix="call it between steps, on the state that one has returned; values leave a step in `metrics`.",
        )


def refuse_unplaceable(
    paths: Sequence[KeyPath],
    leaves: Sequence[Any],
    devices: Sequence[torch.device | None],
    root: str,
    function: str = "",
) -> None:
    """Raise if a leaf cannot live in an arena: not a dense tensor, or not on the device of the others.

    Args:
      paths: Key path of each leaf.
      leaves: The leaves to place.
      devices: Device of each leaf; None if any will do.
      root: Name of the tree.
      function: Name of the user's function.

    Raises:
      CaptureError: In a trace.
      LayoutError: For offending leaves; it lists the first five.
    """
    refuse_in_a_trace(function)
    home = next((device for device in devices if device is not None), None)
    rows, better = [], ""
    for path, leaf, device in zip(paths, leaves, devices, strict=True):
        problem = unplaceable(leaf)
        name = path_string(path, root)
        better = better or as_node(leaf, name) or as_plain(leaf, name) or _as_pure(leaf, name)
        if problem:
            rows.append(f"{path_string(path, root)}  expected a dense tensor   got {problem}")
        elif device is not None and device != home:
            rows.append(f"{path_string(path, root)}  expected device {home}   got {device}")
    if rows:
        raise LayoutError.of(
            function,
            f"`{root}` has leaves that cannot be placed.",
            rows=rows,
            why="A state is a pytree of dense tensors on one device.",
            fix=f"{better}."
            if better
            else f'make them tensors and move them, `fcg.place({root}, device="{home or "cpu"}")`; '
            "keep names and settings as static fields.",
        )


def _is_ordinary(kind: type[Tensor]) -> bool:
    """Whether tensors of a class are no more than their values: in a step, they are plain tensors."""
    as_parameters = torch.nn.Parameter.__torch_function__
    return kind is Tensor or (
        issubclass(kind, torch.nn.Parameter)
        and kind.__torch_function__ == as_parameters
        and kind.__torch_dispatch__ is Tensor.__torch_dispatch__
    )


def as_plain(leaf: Any, name: str) -> str:
    """Say how to make a plain tensor of one of a subclass with memory of its own; "" for any other."""
    like_tensors = isinstance(leaf, Tensor) and type(leaf).__torch_dispatch__ is Tensor.__torch_dispatch__
    if not like_tensors or _is_ordinary(type(leaf)):
        return ""
    return f"pass it as a plain tensor, `{name}.as_subclass(torch.Tensor)`"


def _as_pure(leaf: Any, name: str) -> str:
    """Say what to do with a module or an optimizer, which is no tree of tensors; "" for anything else."""
    if isinstance(leaf, torch.nn.Module):
        return (
            f"`{name}` is a {type(leaf).__name__}: make it a pure function, `apply, params, buffers = "
            "fcg.from_module(model)`, pass `fcg.TrainState.create(params=params, buffers=buffers, "
            "optimizer=optimizer)`, and in the step `out, buffers = apply(state.params, state.buffers, x)`"
        )
    if isinstance(leaf, torch.optim.Optimizer):
        return (
            f"`{name}` is an optimizer: pass what holds its state, `fcg.TrainState.create(params=params, "
            f"optimizer=fcg.optim.from_torch(torch.optim.{type(leaf).__name__}, lr=0.1))`"
        )
    return ""


def unplaceable(leaf: Any) -> str:
    """Describe a leaf that is not a dense tensor with its own memory; an empty string if it is."""
    if not isinstance(leaf, Tensor):
        return f"{type(leaf).__name__} {leaf}" if isinstance(leaf, int | float) else type(leaf).__name__
    if leaf.layout is not torch.strided:
        return f"layout {leaf.layout}"
    if placed(leaf) is not None:
        return str(BufferSpec.of(leaf))
    if not _is_ordinary(type(leaf)):
        return f"the subclass {type(leaf).__name__}"
    if leaf.is_quantized or leaf.is_nested:
        return "a quantized or nested tensor"
    return str(BufferSpec.of(leaf)) if leaf.is_meta else ""
