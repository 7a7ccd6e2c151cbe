"""When two Python values bake the same constants: of one type, equal, and alike in sign and bits, at any depth.

``==`` alone is too weak: ``True == 1 == 1.0``, ``0.0 == -0.0``, ``Decimal("1.0") == Decimal("1.00")``, and what a
class of the user's calls equal may hold any of these.
"""

from __future__ import annotations

import dataclasses
import numbers
import struct
from collections import deque
from typing import Any

import torch

__all__ = ["Exact", "alike", "same"]

_PROTOCOL = 4  # earlier ones leave out the fold of a time


def same(new: Any, old: Any) -> bool:
    """Whether two values bake the same constants. Two tensors never do; what cannot be compared does not."""
    try:
        return alike(new, old)
    except Exception:  # a comparison of the user's own, or values without an end
        return False


def alike(new: Any, old: Any) -> bool:
    """The same; raises TypeError with the type of values that cannot be compared."""
    if new is old:
        return True
    if type(new) is not type(old) or isinstance(new, torch.Tensor):
        return False
    match new:
        case tuple() | list() | deque():
            return len(new) == len(old) and all(map(alike, new, old)) and _holds_alike(new, old)
        case dict():  # Python reads them in their order
            return alike(list(new.items()), list(old.items())) and _holds_alike(new, old)
        case set() | frozenset():
            return {Exact(part) for part in new} == {Exact(part) for part in old} and _holds_alike(new, old)
        case numbers.Complex() if not isinstance(new, numbers.Rational):
            return _bits(new) == _bits(old)
        case range():  # equal ones have equal numbers, and may end elsewhere
            return alike((new.start, new.stop, new.step), (old.start, old.stop, old.step))
        case slice():
            return alike((new.start, new.stop, new.step), (old.start, old.stop, old.step))
    if dataclasses.is_dataclass(new) and not isinstance(new, type) and type(new).__eq__ is not object.__eq__:
        names = [field.name for field in dataclasses.fields(new)]  # also those that its own `==` leaves out
        fields = alike([getattr(new, name) for name in names], [getattr(old, name) for name in names])
        return fields and _holds_alike(new, old)
    return _equal(new, old) and _holds_alike(new, old)


def _equal(new: Any, old: Any) -> bool:
    try:
        return bool(new == old)
    except Exception as error:  # a comparison of the user's own
        raise TypeError(f"values of type {type(new).__name__} cannot be compared: {error}") from error


def _bits(number: numbers.Complex) -> bytes:
    value = complex(number)
    return struct.pack("dd", value.real, value.imag)


def _holds_alike(new: Any, old: Any) -> bool:
    """Whether two equal objects hold the same, as far as ``copy`` would see."""
    if type(new).__module__ == "builtins":
        return True
    try:
        parts, others = new.__reduce_ex__(_PROTOCOL), old.__reduce_ex__(_PROTOCOL)
    except TypeError:  # there is nothing to copy: `==` has said it all
        return True
    if isinstance(parts, str):
        return bool(parts == others)
    # Behind these stand iterators over the parts of a list or a dict, which were compared before.
    return alike(parts[:3], others[:3])


def _hash(value: Any) -> int:
    """Hash a value; Python hashes each NaN as an object of its own."""
    if type(value) is tuple:
        return hash(tuple(map(_hash, value)))
    return hash(value) if type(value) not in (float, complex) or value == value else 0


class Exact:
    """A hashable value as a key that is equal to another one's only if they are the `same`."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return _hash(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Exact) and same(self.value, other.value)

    def __repr__(self) -> str:
        return f"Exact({self.value!r})"
