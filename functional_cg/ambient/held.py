"""What a function holds on the host: whether a call of it has changed what its next call reads.

A loop inside a step runs its body in Python until two times are alike. A body that counts, or that keeps what it
computes in a list, is never done with that.
"""

from __future__ import annotations

import enum
import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
)
from typing import Any

import torch
from torch import Tensor

__all__ = ["changed", "held_by"]

_MOST = 20_000  # objects to look at
_NUMBERS = (int, float, complex, str, bytes, type(None), type(Ellipsis), range, slice, enum.Enum)
_TORCH = (Tensor, torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format)
_CONSTANT = (*_NUMBERS, *_TORCH, ModuleType, CodeType, BuiltinFunctionType)
_EMPTY = object()  # what a cell without contents holds


def held_by(function: Callable[..., Any]) -> list[tuple[Any, Sequence[Any]]] | None:
    """Return all that a function holds, each object with its parts; None if some of it is not known.

    What its globals lead to is watched by whoever traces the step.
    """
    waiting, seen, found = [function], set[int](), list[tuple[Any, Sequence[Any]]]()
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, _CONSTANT):
            continue
        parts = _parts(one)
        if parts is None or len(seen) == _MOST:
            return None
        seen.add(id(one))
        found.append((one, parts))
        waiting += parts
    return found


def changed(before: list[tuple[Any, Sequence[Any]]] | None, function: Callable[..., Any]) -> bool:
    """Whether a function holds anything else than before, or may do so."""
    after = held_by(function)
    if before is None or after is None or len(before) != len(after):
        return True
    pairs = zip(before, after, strict=True)
    return not all(one is other and _same(old, new) for (one, old), (other, new) in pairs)


def _same(old: Sequence[Any], new: Sequence[Any]) -> bool:
    return len(old) == len(new) and all(one is other for one, other in zip(old, new, strict=True))


def _parts(value: Any) -> list[Any] | None:
    """Return the objects that one holds; None if it may hold what is not seen from Python."""
    if isinstance(value, FunctionType):
        defaults = *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()
        return [*(value.__closure__ or ()), *defaults, *vars(value).values()]
    if isinstance(value, CellType):
        try:
            return [value.cell_contents]
        except ValueError:
            return [_EMPTY]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if value is _EMPTY:
        return []
    if isinstance(value, type):  # one that the step itself defines may count
        return [*vars(value).values()] if "<locals>" in value.__qualname__ else []
    if _is_ours(type(value)) and hasattr(value, "__wrapped__"):  # a step: in another one, its function runs
        return [value.__wrapped__]
    parts: list[Any] = []
    for kind in type(value).__mro__[:-1]:
        if kind in (dict, MappingProxyType):
            parts += [*value.keys(), *value.values()]
        elif kind in (list, tuple, set, frozenset, deque):
            parts += value
        elif not _is_python(kind):
            return None
        else:
            slots = kind.__dict__.get("__slots__", ())
            names = (slots,) if isinstance(slots, str) else slots
            parts += [getattr(value, name) for name in names if hasattr(value, name)]
    own: Mapping[str, Any] = getattr(value, "__dict__", {})
    return [*parts, *own.values()]


def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == __name__.partition(".")[0]


def _is_python(kind: type) -> bool:
    """Whether a class is made by Python, and not by an extension, whose instances hold what they do not show."""
    made = "__dict__" in vars(kind) or "__slots__" in vars(kind)
    return made or any(_is_python(base) for base in kind.__bases__ if base is not object)
