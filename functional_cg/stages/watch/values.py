"""Plain values of the host: what counts as one, when two are the same, and what is compared of a container.

A container is compared in the part of it that the step reads: its length, whether it has a key, or all that it holds.
"""

from __future__ import annotations

import array
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
    *(list, tuple, dict, set, frozenset, deque, bytearray, MappingProxyType, array.array, memoryview),
    *_VIEWS,
)
_ELSEWHERE = (
    threading.local,
    weakref.ProxyType,
    weakref.CallableProxyType,
)  # they store no attributes in themselves
missing = object()


def is_value(value: Any) -> bool:
    """Whether `value` is plain data that a graph bakes in: a number, a string, None, a dtype, ..., a tuple of them."""
    if type(value) in (tuple, frozenset, torch.Size):
        return all(map(is_value, value))
    numpy = sys.modules.get("numpy")
    # Asking for the class of an instance could run something of the user's.
    return issubclass(type(value), _SCALARS) or (numpy is not None and issubclass(type(value), numpy.generic))


def is_array(value: object) -> bool:
    """Whether `value` is an array of numpy, which need not be there."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(type(value), numpy.ndarray)


def is_container(value: object) -> bool:
    """Whether reading what `value` holds runs nothing of the user's."""
    if not issubclass(type(value), _CONTAINERS):
        return is_array(value)
    ways = ("__iter__", "__len__", "items")
    return not any(isinstance(in_classes(type(value).__mro__, way), FunctionType) for way in ways)


def in_classes(classes: Iterable[type], name: str) -> Any:
    """What the first of the classes that has `name` stores under it, or `missing`."""
    return next((vars(cls)[name] for cls in classes if name in vars(cls)), missing)


def instance_dict(owner: object) -> dict[str, Any]:
    """The attributes that an object itself stores; those of a thread, and what a weak proxy stands for, included."""
    try:
        lookup = getattr if issubclass(type(owner), _ELSEWHERE) else object.__getattribute__
        found = lookup(owner, "__dict__")
    except (AttributeError, ReferenceError):
        return {}
    return found if isinstance(found, dict) else {}


class Contents:
    """What a container held: its parts by identity, else by value."""

    __slots__ = ("_kind", "_parts", "_read")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, container: Any) -> None:
        self._kind, self._read = type(container), _reader(container)
        self._parts = tuple(self._read(container))

    def is_in(self, container: Any) -> bool:
        """Whether `container` holds the same now."""
        if type(container) is not self._kind:
            return False
        now, parts = tuple(self._read(container)), self._parts
        return len(now) == len(parts) and (
            all(map(operator.is_, now, parts)) or all(map(_same_part, now, parts))
        )

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Contents)
            and (self._kind, len(self._parts)) == (other._kind, len(other._parts))
            and all(map(_same_part, self._parts, other._parts))
        )

    def __repr__(self) -> str:
        parts = [repr(p) if is_value(p) else type(p).__name__ for p in self._parts[: 2 * _SHOWN]]
        if issubclass(self._kind, dict | MappingProxyType):
            parts = [f"{key}: {value}" for key, value in zip(parts[::2], parts[1::2], strict=True)]
            return f"{{{', '.join(parts)}}}"
        return f"{self._kind.__name__} of {', '.join(parts) or 'nothing'}"


class Shape:
    """What a class derives from, and the names under which it has something that is called.

    Attributes:
      mro: The classes that it derives from.
      count: How many names it has.
    """

    __slots__ = ("_called", "count", "mro")

    def __init__(self, cls: type) -> None:
        self.mro, self.count, self._called = cls.__mro__, len(vars(cls)), _called_names(cls)

    def is_of(self, cls: type) -> bool:
        """Whether a class derives from the same, and has such things under the same names."""
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
        case memoryview():
            return lambda now: (now.tobytes(),)
    return _array_parts


def _array_parts(now: Any) -> Iterable[Any]:
    held = now.ravel().tolist() if now.dtype.hasobject else [now.tobytes()]
    return now.shape, str(now.dtype), *held


def _same_part(new: Any, old: Any) -> bool:
    # A container inside of another one is an entry of its own, where more is read of it than that it is there.
    inner = type(new) is type(old) and is_container(old) and not is_value(old) and type(old) is not frozenset
    return new is old or inner or same(new, old)


def shown(value: object) -> str:
    """A value in a message. The numbers of a tensor would wait for the device."""
    if isinstance(value, torch.Tensor):
        return f"the tensor {BufferSpec.of(value)}"
    return repr(value)
