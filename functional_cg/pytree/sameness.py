"""Compare Python values as constants of a graph: by type, equality, sign and bits, at any depth.

``==`` alone is too weak: ``True == 1 == 1.0``, ``0.0 == -0.0``, ``Decimal("1.0") == Decimal("1.00")``, and
objects that a user's class calls equal may hold any of these.
"""

from __future__ import annotations

import dataclasses
import numbers
import struct
from collections import deque
from typing import Any

import torch

__all__ = ["Exact", "alike", "same"]

_PROTOCOL = 4  # earlier protocols drop the `fold` of a time


def same(new: Any, old: Any) -> bool:
    """Whether two values bake the same constants; False for two tensors, or if a comparison fails."""
    try:
        return alike(new, old)
    except Exception:  # a user's `__eq__`, or values that contain themselves
        return False


def alike(new: Any, old: Any) -> bool:
    """Like :func:`same`, but raise a TypeError that names the type whose comparison fails."""
    if new is old:
        return True
    if type(new) is not type(old) or isinstance(new, torch.Tensor):
        return False
    match new:
        case tuple() | list() | deque():
            return len(new) == len(old) and all(map(alike, new, old)) and _holds_alike(new, old)
        case dict():  # the order counts, since Python iterates in it
            return alike(list(new.items()), list(old.items())) and _holds_alike(new, old)
        case set() | frozenset():
            return {Exact(part) for part in new} == {Exact(part) for part in old} and _holds_alike(new, old)
        case numbers.Complex() if not isinstance(new, numbers.Rational):
            return _bits(new) == _bits(old)
        case range():  # equal ranges yield the same numbers, but `stop` may differ
            return alike((new.start, new.stop, new.step), (old.start, old.stop, old.step))
        case slice():
            return alike((new.start, new.stop, new.step), (old.start, old.stop, old.step))
    if dataclasses.is_dataclass(new) and not isinstance(new, type) and type(new).__eq__ is not object.__eq__:
        names = [field.name for field in dataclasses.fields(new)]  # also those that its `==` skips
        fields = alike([getattr(new, name) for name in names], [getattr(old, name) for name in names])
        return fields and _holds_alike(new, old)
    return _equal(new, old) and _holds_alike(new, old)


def _equal(new: Any, old: Any) -> bool:
    try:
        return bool(new == old)
    except Exception as error:  # a user's `__eq__`
        raise TypeError(f"values of type {type(new).__name__} cannot be compared: {error}") from error


def _bits(number: numbers.Complex) -> bytes:
    value = complex(number)
    return struct.pack("dd", value.real, value.imag)


def _holds_alike(new: Any, old: Any) -> bool:
    """Whether two equal objects hold the same contents, as ``copy`` sees them."""
    if type(new).__module__ == "builtins":
        return True
    try:
        parts, others = new.__reduce_ex__(_PROTOCOL), old.__reduce_ex__(_PROTOCOL)
    except TypeError:  # not copyable: `==` has decided
        return True
    if isinstance(parts, str):
        return bool(parts == others)
    # The rest are iterators over the items of a list or dict, which have been compared already.
    return alike(parts[:3], others[:3])


def _hash(value: Any) -> int:
    """Hash a value, NaN as 0: Python hashes each NaN by its identity."""
    if type(value) is tuple:
        return hash(tuple(map(_hash, value)))
    return hash(value) if type(value) not in (float, complex) or value == value else 0


class Exact:
    """A dict key for a hashable value; two keys are equal only if their values are the :func:`same`."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return _hash(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Exact) and same(self.value, other.value)

    def __repr__(self) -> str:
        return f"Exact({self.value!r})"
