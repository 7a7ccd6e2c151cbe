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
from collections.abc import Callable, ItemsView, Iterable, KeysView, ValuesView
from types import FunctionType, MappingProxyType
from typing import Any

import torch

from ...pytree.sameness import same
from ...state.arena import BufferSpec

__all__ = [
    "Contents",
    "Shape",
    "in_classes",
    "instance_dict",
    "is_array",
    "is_container",
    "is_value",
    "missing",
    "shown",
]

_SHOWN = 8
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
      parts: The contents: of a dict, keys and values.
    """

    __slots__ = ("_kind", "_read", "parts")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, container: Any) -> None:
        self._kind, self._read = type(container), _reader(container)
        self.parts = tuple(self._read(container))

    def is_in(self, container: Any) -> bool:
        """Whether a container holds the same now."""
        if type(container) is not self._kind:
            return False
        now, parts = tuple(self._read(container)), self.parts
        return len(now) == len(parts) and (
            all(map(operator.is_, now, parts)) or all(map(_same_part, now, parts))
        )

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Contents)
            and (self._kind, len(self.parts)) == (other._kind, len(other.parts))
            and all(map(_same_part, self.parts, other.parts))
        )

    def __repr__(self) -> str:
        parts = [repr(p) if is_value(p) else type(p).__name__ for p in self.parts[: 2 * _SHOWN]]
        if issubclass(self._kind, dict | MappingProxyType):
            parts = [f"{key}: {value}" for key, value in zip(parts[::2], parts[1::2], strict=True)]
            return f"{{{', '.join(parts)}}}"
        return f"{self._kind.__name__} of {', '.join(parts) or 'nothing'}"


class Shape:
    """The bases of a class, and the names of its descriptors, such as methods and properties.

    Attributes:
      mro: Its method resolution order.
      count: How many names it defines.
    """

    __slots__ = ("_called", "count", "mro")

    def __init__(self, cls: type) -> None:
        self.mro, self.count, self._called = cls.__mro__, len(vars(cls)), _called_names(cls)

    def is_of(self, cls: type) -> bool:
        """Whether a class has the same bases, and descriptors under the same names."""
        return self.mro == cls.__mro__ and self._called == _called_names(cls)


def _called_names(cls: type) -> frozenset[str]:
    return frozenset(name for name, value in vars(cls).items() if hasattr(type(value), "__get__"))


def _reader(container: Any) -> Callable[[Any], Iterable[Any]]:
    match container:
        case dict() | MappingProxyType():
            return lambda now: itertools.chain.from_iterable(now.items())
        case set() | frozenset():
            return lambda now: (frozenset(now),)
        case KeysView() | ItemsView() | ValuesView():
            return iter
        case list() | tuple() | deque() | bytearray() | array.array():
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


def shown(value: object) -> str:
    """Return a value as text; a tensor as its spec, since its numbers would wait for the device."""
    if isinstance(value, torch.Tensor):
        return f"the tensor {BufferSpec.of(value)}"
    return repr(value)
