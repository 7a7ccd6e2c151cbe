"""When two Python values bake the same constants: of one type, equal, and alike in sign and bits, at any depth.

``==`` alone is too weak: ``True == 1 == 1.0``, ``0.0 == -0.0``, ``Decimal("1.0") == Decimal("1.00")``, and what a
class of the user's calls equal may hold any of these.
"""

from __future__ import annotations

import numbers
import struct
from collections import OrderedDict, deque
from typing import Any

import torch

__all__ = ["Exact", "same"]


def same(new: Any, old: Any) -> bool:
    """Whether two values bake the same constants. Two tensors never do; what cannot be compared does not."""
    if new is old:
        return True
    if type(new) is not type(old) or isinstance(new, torch.Tensor):
        return False
    try:
        return _alike(new, old)
    except Exception:  # a comparison of the user's own, or values without an end
        return False


def _alike(new: Any, old: Any) -> bool:
    match new:
        case str() | bytes() | bool() | int() if type(new).__module__ == "builtins":
            return bool(new == old)
        case tuple() | list() | deque():
            return len(new) == len(old) and all(map(same, new, old)) and _whole(new, old)
        case dict():
            return _same_entries(new, old) and _whole(new, old)
        case set() | frozenset():
            return {Exact(part) for part in new} == {Exact(part) for part in old} and _whole(new, old)
        case numbers.Complex() if not isinstance(new, numbers.Rational):
            return _bits(new) == _bits(old)
    return bool(new == old) and _whole(new, old)


def _same_entries(new: dict[Any, Any], old: dict[Any, Any]) -> bool:
    if isinstance(new, OrderedDict) and not all(map(same, new, old)):
        return False
    held = {Exact(key): value for key, value in old.items()}
    return len(new) == len(old) and all(
        Exact(key) in held and same(value, held[Exact(key)]) for key, value in new.items()
    )


def _bits(number: numbers.Complex) -> bytes:
    value = complex(number)
    return struct.pack("dd", value.real, value.imag)


def _whole(new: Any, old: Any) -> bool:
    """Whether two equal objects hold the same, as far as ``copy`` would see."""
    if type(new).__module__ == "builtins":
        return True
    try:
        parts, others = new.__reduce_ex__(2), old.__reduce_ex__(2)
    except TypeError:  # there is nothing to copy: `==` has said it all
        return True
    if isinstance(parts, str):
        return bool(parts == others)
    # Iterators over the parts of a list or a dict are new each time; these were compared before.
    return same(parts[:3], others[:3])


class Exact:
    """A hashable value as a key that is equal to another one's only if they are the `same`."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return hash(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Exact) and same(self.value, other.value)

    def __repr__(self) -> str:
        return f"Exact({self.value!r})"
