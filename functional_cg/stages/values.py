"""Plain values of the host: what counts as one, when two are the same, and what is compared of a container.

A container is compared in the part of it that the step reads: its length, whether it has a key, or all that it holds.
"""

from __future__ import annotations

import enum
import functools
import itertools
import numbers
import operator
import os
import struct
import sys
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FunctionType, MappingProxyType
from typing import Any

import torch

from ..arena import BufferSpec

__all__ = [
    "CONTENTS",
    "KIND",
    "LARGEST",
    "LENGTH",
    "SUBMODULES",
    "TRUTH",
    "Contents",
    "Submodules",
    "View",
    "has_attribute",
    "has_key",
    "in_classes",
    "instance_dict",
    "is_container",
    "is_value",
    "missing",
    "same",
    "shown",
]

LARGEST = 64  # parts of one container that are compared
_LARGEST_ARRAY = 4096  # bytes
_LONGEST_TUPLE = 8
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
_CONTAINERS = (list, tuple, dict, set, frozenset, deque, bytearray, MappingProxyType)
missing = object()


def is_value(value: Any) -> bool:
    """Whether `value` is plain data that a graph bakes in: a number, a string, None, a dtype, ..., a tuple of them."""
    if type(value) in (tuple, frozenset, torch.Size):
        return len(value) <= _LONGEST_TUPLE and all(map(is_value, value))
    return isinstance(value, _SCALARS)


def is_array(value: object) -> bool:
    """Whether `value` is an array of numpy, which need not be there."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray


def is_container(value: object) -> bool:
    """Whether reading what `value` holds runs nothing of the user's."""
    if not isinstance(value, _CONTAINERS):
        return is_array(value)
    ways = ("__iter__", "__len__", "items") if isinstance(value, dict) else ("__iter__", "__len__")
    return not any(isinstance(in_classes(type(value).__mro__, way), FunctionType) for way in ways)


def in_classes(classes: Iterable[type], name: str) -> Any:
    """What the first of the classes that has `name` stores under it, or `missing`."""
    return next((vars(cls)[name] for cls in classes if name in vars(cls)), missing)


def instance_dict(owner: object) -> dict[str, Any]:
    """The attributes that an object itself stores."""
    try:
        found = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}


def same(new: Any, old: Any) -> bool:
    """Whether two values bake the same constants: one type, equal, and for floats equal bits. Two tensors do not."""
    if type(new) is not type(old) or isinstance(new, torch.Tensor):
        return False
    if isinstance(new, tuple):
        return len(new) == len(old) and all(map(same, new, old))
    if isinstance(new, numbers.Complex) and not isinstance(new, numbers.Rational):
        return _bits(new) == _bits(old)
    try:
        return bool(new == old)
    except Exception:  # a comparison of the user's own
        return False


def _bits(number: numbers.Complex) -> bytes:
    value = complex(number)
    return struct.pack("dd", value.real, value.imag)


class Contents:
    """What a container held: its parts by identity, else by value; of a large one its length and its first parts."""

    __slots__ = ("_kind", "_parts", "_read", "_size")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, container: Any) -> None:
        self._kind, self._read = type(container), _reader(container)
        self._size = None if is_array(container) else len(container)
        self._parts = tuple(itertools.islice(self._read(container), 2 * LARGEST))

    def is_in(self, container: Any) -> bool:
        """Whether `container` holds the same now."""
        if type(container) is not self._kind or (self._size is not None and len(container) != self._size):
            return False
        read, parts = self._read, self._parts
        return all(map(operator.is_, read(container), parts)) or all(map(_same_part, read(container), parts))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Contents)
            and (self._kind, self._size, len(self._parts)) == (other._kind, other._size, len(other._parts))
            and all(map(_same_part, self._parts, other._parts))
        )

    def __repr__(self) -> str:
        parts = [repr(p) if is_value(p) else type(p).__name__ for p in self._parts[: 2 * _SHOWN]]
        if issubclass(self._kind, dict | MappingProxyType):
            parts = [f"{key}: {value}" for key, value in zip(parts[::2], parts[1::2], strict=True)]
            return f"{{{', '.join(parts)}}}"
        return f"{self._kind.__name__} of {', '.join(parts) or 'nothing'}"


class Submodules(Contents):
    """Which modules are inside of a module, however deep."""

    __slots__ = ("_registries",)

    def __init__(self, module: torch.nn.Module) -> None:
        self._kind, self._size = type(module), None
        self._registries = tuple(inner._modules for inner in module.modules() if inner._modules)
        self._parts = self._held()

    def is_in(self, container: Any) -> bool:
        return self._held() == self._parts

    def _held(self) -> tuple[Any, ...]:
        return tuple(itertools.chain.from_iterable(map(dict.values, self._registries)))


def _reader(container: Any) -> Callable[[Any], Iterable[Any]]:
    match container:
        case dict() | MappingProxyType():
            return lambda now: itertools.chain.from_iterable(now.items())
        case set() | frozenset():
            return _set_parts
        case list() | tuple() | deque() | bytearray():
            return iter
    return _array_parts


def _set_parts(now: Any) -> Iterable[Any]:
    return (frozenset(now),) if len(now) <= LARGEST else ()


def _array_parts(now: Any) -> Iterable[Any]:
    layout = now.shape, str(now.dtype)
    return (*layout, now.tobytes()) if now.nbytes <= _LARGEST_ARRAY else layout


def _same_part(new: Any, old: Any) -> bool:
    # A container inside of another one is an entry of its own, where more is read of it than that it is there.
    inner = type(new) is type(old) and is_container(old) and not is_value(old) and type(old) is not frozenset
    return new is old or inner or same(new, old)


@dataclass(frozen=True, slots=True)
class View:
    """A part of a value that is compared in place of it.

    Attributes:
      read: The part.
      fits: Whether a value has such a part, and reading it runs nothing of the user's.
      text: How it is written, around the value.
    """

    read: Callable[[Any], object]
    fits: Callable[[Any], bool]
    text: str = "{}"


def _holds(value: object) -> bool:
    return (is_container(value) and not is_value(value)) or value is os.environ


def _is_object(value: object) -> bool:
    return not isinstance(value, type | torch.Tensor | torch.nn.Module) and not is_value(value)


LENGTH = View(len, _holds, "len({})")
TRUTH = View(bool, _holds, "bool({})")
KIND = View(type, _is_object, "type({})")
CONTENTS = View(Contents, is_container)
SUBMODULES = View(Submodules, lambda module: isinstance(module, torch.nn.Module))


def has_key(key: Any) -> View:
    """Whether a container has a key, or an element."""
    return View(functools.partial(_has_key, key), _holds, f"{key!r} in {{}}")


def has_attribute(name: str) -> View:
    """Whether an object has an attribute."""
    return View(functools.partial(_has_attribute, name), _is_object, f"hasattr({{}}, {name!r})")


def _has_key(key: Any, container: Any) -> bool:
    return key in container


def _has_attribute(name: str, owner: object) -> bool:
    return hasattr(owner, name)


def shown(value: object) -> str:
    """A value in a message. The numbers of a tensor would wait for the device."""
    if isinstance(value, torch.Tensor):
        return f"the tensor {BufferSpec.of(value)}"
    return repr(value)
