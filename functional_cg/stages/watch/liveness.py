"""Find objects that are referenced only by themselves, by each other, and by the caller.

Counts references as CPython's cycle collector does, on a part of the heap: an object with more references
than this part accounts for is held from outside, and so is everything reachable from it.
"""

from __future__ import annotations

import builtins
import gc
import sys
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from torch._ops import OpOverload, OpOverloadPacket

from .places import GONE, Entry, How, Place
from .values import Contents

__all__ = ["unheld", "without_gone", "without_unheld"]

_MOST = 200_000  # objects to visit
# What leads nowhere, or stays anyway, as an op does: it alone would lead to hundreds of objects of torch.
_ATOMS = (ModuleType, type, OpOverload, OpOverloadPacket)
_PLAIN = frozenset({str, bytes, int, float, complex, bool, type(None), CodeType, FrameType})


def unheld(
    values: Sequence[Any], books: Iterable[Any], bookkeepers: tuple[type, ...], outside: Set[int]
) -> list[bool]:
    """Tell which values nothing else references.

    Args:
      values: The values.
      books: Objects that reference them on behalf of the caller.
      bookkeepers: Classes whose instances do not count as held, whoever references them.
      outside: Ids of objects that are known to be held; they are not searched.
    Returns:
      For each value, whether it is unheld; False for all if too many objects are reachable.
    """
    found: dict[int, Any] = {}
    inside: Counter[int] = Counter()
    left = [values, *books]
    while left:
        for one in _led_to(left.pop()):
            inside[id(one)] += 1
            if id(one) not in found and id(one) not in outside:
                found[id(one)] = one
                left.append(one)
        if len(found) > _MOST:
            return [False] * len(values)
    one = None
    counts, by_dict = _counts(found), _counts({0: object()})[0]
    held = {
        number
        for number, count in counts.items()
        if count - by_dict > inside[number] and not issubclass(type(found[number]), bookkeepers)
    }
    left = [found[number] for number in held]
    while left:
        for one in _led_to(left.pop()):
            if id(one) in found and id(one) not in held:
                held.add(id(one))
                left.append(one)
    return [id(value) not in held for value in values]


def _counts(objects: dict[int, Any]) -> dict[int, int]:
    return {number: sys.getrefcount(one) for number, one in objects.items()}


def _is_atom(value: Any) -> bool:
    return type(value) in _PLAIN or issubclass(type(value), _ATOMS)


def _led_to(value: Any) -> list[Any]:
    """Return the objects that a value references; for a function, not its globals."""
    if _is_atom(value):
        return []
    led_to = [one for one in gc.get_referents(value) if not _is_atom(one)]
    if type(value) is FunctionType:
        skipped = {id(value.__globals__), id(vars(builtins))}
        led_to = [one for one in led_to if id(one) not in skipped]
    return led_to


def without_gone(places: list[Place], entries: list[Entry]) -> tuple[list[Place], list[Entry]]:
    """Drop the places whose values nothing else references, and the entries that depend on them."""
    probe = Place(object(), "")
    held = sys.getrefcount(probe.value)
    while gone := [place for place in places if sys.getrefcount(place.value) <= held]:
        for place in gone:
            place.value = GONE
        places = [place for place in places if place.value is not GONE]
        entries = [entry for entry in entries if _remains(entry)]
    return places, entries


def without_unheld(
    places: list[Place], entries: list[Entry], books: dict[str, Any], outside: Set[int]
) -> tuple[list[Place], list[Entry]]:
    values = [place.value for place in places]
    free = unheld(values, (places, entries, books), (Place, Entry, Contents), outside)
    del values
    for place, gone in zip(places, free, strict=True):
        if gone:
            place.value = GONE
    return [one for one in places if one.value is not GONE], [one for one in entries if _remains(one)]


def _remains(entry: Entry) -> bool:
    led_to = entry.old.root.value if entry.how is How.ALIAS else None
    return entry.owner.root.value is not GONE and led_to is not GONE
