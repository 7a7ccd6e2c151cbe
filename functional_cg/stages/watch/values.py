"""Plain host values and containers: what counts as one, and how their contents are compared.

Only the part of a container that the step reads is compared: its length, whether it has a key, or everything.
"""

from __future__ import annotations

import array
import ctypes
import enum
import itertools
import numbers
import operator
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, ItemsView, Iterable, KeysView, Sequence, ValuesView
from dataclasses import dataclass
from types import FunctionType, MappingProxyType
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ...pytree.sameness import same
from ...state.arena import BufferSpec
from ...tensors.aten import unwrapped

__all__ = [
    "DEFINED",
    "LOST",
    "Contents",
    "Excerpt",
    "Said",
    "Shape",
    "excerpts",
    "holds",
    "in_classes",
    "instance_dict",
    "is_array",
    "is_container",
    "is_value",
    "missing",
    "shown",
]

_LONG, _PARTS = 2000, 16  # letters of a value and parts of a container that a message shows
_SCALARS = (
    numbers.Number,
    str,
    bytes,
    type(None),
    enum.Enum,
    range,
    slice,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))
_CONTAINERS = (
    *(
        list,
        tuple,
        dict,
        set,
        frozenset,
        deque,
        bytearray,
        MappingProxyType,
        array.array,
        memoryview,
        ctypes.Array,
    ),
    *_VIEWS,
)
_ELSEWHERE = (
    threading.local,
    weakref.ProxyType,
    weakref.CallableProxyType,
)  # keep their attributes elsewhere
_LARGE = 1 << 24  # bytes of an array whose numbers a message would take seconds to look through
_PAIRED = (dict, MappingProxyType)  # whose parts are keys and values in turn
missing = object()


def is_value(value: Any) -> bool:
    """Whether a value is plain data that a graph bakes in: a number, string, dtype, ..., a tuple of them."""
    if type(value) in (tuple, frozenset, torch.Size):
        return all(map(is_value, value))
    numpy = sys.modules.get("numpy")
    # Not `isinstance`, which may run user code (a `__class__` property).
    return issubclass(type(value), _SCALARS) or (numpy is not None and issubclass(type(value), numpy.generic))


def is_array(value: object) -> bool:
    """Whether a value is a numpy array; does not import numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(type(value), numpy.ndarray)


def is_container(value: object) -> bool:
    """Whether a value is a container whose contents can be read without running user code."""
    if not issubclass(type(value), _CONTAINERS):
        return is_array(value)
    ways = ("__iter__", "__len__", "items")
    return not any(isinstance(in_classes(type(value).__mro__, way), FunctionType) for way in ways)


def holds(container: Iterable[object], value: object) -> bool:
    """Whether a container holds an object itself; tensors that it holds are not compared."""
    return any(one is value for one in container)


def in_classes(classes: Iterable[type], name: str) -> Any:
    """Return what the first class that has ``name`` stores under it; `missing` if none has it."""
    return next((vars(cls)[name] for cls in classes if name in vars(cls)), missing)


def instance_dict(owner: object) -> dict[str, Any]:
    """Return an object's ``__dict__``; this thread's for a ``threading.local``, a weak proxy's referent's."""
    try:
        lookup = getattr if issubclass(type(owner), _ELSEWHERE) else object.__getattribute__
        found = lookup(owner, "__dict__")
    except (AttributeError, ReferenceError):
        return {}
    return found if isinstance(found, dict) else {}


class Contents:
    """A snapshot of a container's contents; its parts are compared by identity, then by value.

    Attributes:
      kind: The class of the container.
      parts: The contents: of a dict, keys and values.
    """

    __slots__ = ("_read", "kind", "parts")

    def __init__(self, container: Any) -> None:
        self.kind, self._read = type(container), _reader(container)
        self.parts = tuple(self._read(container))

    @property
    def of_the_trace(self) -> bool:
        """Whether all that it holds are tensors of a trace: the step itself has filled it."""
        held = self.parts[1::2] if issubclass(self.kind, dict) else self.parts
        return bool(held) and all(
            isinstance(part, torch.Tensor) and isinstance(unwrapped(part), FakeTensor) for part in held
        )

    def is_in(self, container: Any) -> bool:
        """Whether a container holds the same now."""
        if type(container) is not self.kind:
            return False
        now, parts = tuple(self._read(container)), self.parts
        return len(now) == len(parts) and (
            all(map(operator.is_, now, parts)) or all(map(_same_part, now, parts))
        )


class Shape:
    """The bases of a class, and what computes in it, such as methods and properties.

    Attributes:
      mro: Its method resolution order.
      count: How many names it defines.
      names, called: The names of its descriptors, and these.
    """

    __slots__ = ("called", "count", "mro", "names")

    def __init__(self, cls: type) -> None:
        held = {name: value for name, value in vars(cls).items() if hasattr(type(value), "__get__")}
        self.mro, self.count, self.names, self.called = (
            cls.__mro__,
            len(vars(cls)),
            (*held,),
            (*held.values(),),
        )

    def is_of(self, cls: type) -> bool:
        """Whether a class has the same bases, and the same descriptors under the same names."""
        same = cls.__mro__ is self.mro and all(map(operator.is_, map(vars(cls).get, self.names), self.called))
        return (same and len(vars(cls)) == self.count) or not self.changed(cls)

    def changed(self, cls: type) -> list[str]:
        """Return the names of its descriptors that a class has not, or others, with the first one's of other bases."""
        old, new = dict(zip(self.names, self.called, strict=True)), Shape(cls)
        now = dict(zip(new.names, new.called, strict=True))
        found = [name for name in {**old, **now} if old.get(name) is not now.get(name)]
        return found if self.mro == new.mro else ["__bases__", *found]


def _reader(container: Any) -> Callable[[Any], Iterable[Any]]:
    match container:
        case dict() | MappingProxyType():
            return lambda now: itertools.chain.from_iterable(now.items())
        case set() | frozenset():
            return lambda now: (frozenset(now),)
        case (
            KeysView() | ItemsView() | ValuesView() | list() | tuple() | deque() | bytearray() | array.array()
        ):
            return iter
        case memoryview() | ctypes.Array():
            return lambda now: (bytes(now),)
    return _array_parts


def _array_parts(now: Any) -> Iterable[Any]:
    held = now.ravel().tolist() if now.dtype.hasobject else [now.tobytes()]
    return now.shape, str(now.dtype), *held


def _same_part(new: Any, old: Any) -> bool:
    # A nested container has a separate entry if its contents are read, too.
    inner = type(new) is type(old) and is_container(old) and not is_value(old) and type(old) is not frozenset
    return new is old or inner or same(new, old)


@dataclass(frozen=True, repr=False)
class Said:
    """Text that a message shows for an object without a short repr."""

    text: str

    def __repr__(self) -> str:
        return self.text


# What a message shows of a definition, and instead of what is no longer there.
DEFINED, LOST = Said("as defined then"), Said("<gone>")


class Excerpt(Said):
    """What a message shows of a container."""


def excerpts(one: Contents, other: Contents) -> tuple[Excerpt, Excerpt]:
    """Return what a message shows of two contents."""
    ours, theirs = _elements(one), _elements(other)
    pairs = enumerate(zip(ours, theirs, strict=False))
    first = next((at for at, pair in pairs if not _same_part(*pair)), 0)
    if max(len(ours), len(theirs)) <= _PARTS:
        first = 0
    if issubclass(one.kind, _PAIRED):
        first -= first % 2
    return Excerpt(_text(one.kind, ours, first)), Excerpt(_text(other.kind, theirs, first))


def _elements(contents: Contents) -> Sequence[Any]:
    """Return the parts of a container; of an array, its shape, its dtype, and all its numbers unless it is large."""
    parts, numpy = contents.parts, sys.modules.get("numpy")
    if issubclass(contents.kind, memoryview | ctypes.Array):
        return cast("bytes", parts[0])
    if numpy is None or not issubclass(contents.kind, numpy.ndarray) or type(parts[-1]) is not bytes:
        return parts
    shape, name, data = parts
    if len(data) > _LARGE:
        return [shape, name]
    plain = name in numpy.sctypeDict  # else it is that of a record
    return [shape, name, *numpy.frombuffer(data, name if plain else "uint8").tolist()]


def _text(kind: type, elements: Sequence[Any], first: int) -> str:
    parts = [
        shown(part) if is_value(part) else type(part).__name__ for part in elements[first : first + _PARTS]
    ]
    if issubclass(kind, _PAIRED):
        parts = [f"{key}: {value}" for key, value in zip(parts[::2], parts[1::2], strict=True)]
    parts = ["..."] * (first > 0) + parts + ["..."] * (first + _PARTS < len(elements))
    if issubclass(kind, _PAIRED):
        return f"{{{', '.join(parts)}}}"
    return f"{kind.__name__} of {', '.join(parts) or 'nothing'}"


def shown(value: object) -> str:
    """Return a value as a short text; a tensor as its spec, since its numbers would wait for the device."""
    if isinstance(value, torch.Tensor):
        return f"the tensor {BufferSpec.of(value)}"
    text = repr(value)
    return text if len(text) <= _LONG else f"{text[: _LONG // 2]} ... {text[-_LONG // 2 :]}"
