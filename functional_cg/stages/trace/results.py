"""Check what a step returns besides tensors: only immutable values are allowed."""

from __future__ import annotations

from collections.abc import Sequence
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor

from ...errors import ForeignTensorError, SideEffectError
from ...tree import KeyPath, path_string

__all__ = ["refuse_unreturnable"]

# Types that define no hash but are immutable, or that nobody would mutate.
_ATOMS = (torch.dtype, torch.layout, torch.memory_format, type, type(None), FunctionType, BuiltinFunctionType)


def refuse_unreturnable(function: str, paths: Sequence[KeyPath], leaves: Sequence[Any]) -> None:
    """Refuse arrays and mutable objects among the results: replay would return the same one each time.

    Raises:
      ForeignTensorError: For numpy arrays.
      SideEffectError: For other mutable objects.
    """
    _refuse_arrays(function, paths, leaves)
    _refuse_changeable(function, paths, leaves)


def _refuse_arrays(function: str, paths: Sequence[KeyPath], leaves: Sequence[Any]) -> None:
    rows = [
        f"{path_string(path, 'metrics')}  expected a tensor   got {type(leaf).__name__}"
        for path, leaf in zip(paths, leaves, strict=True)
        if hasattr(leaf, "__array__") and hasattr(leaf, "flags") and not isinstance(leaf, Tensor)
    ]
    if rows:
        raise ForeignTensorError.of(
            function,
            "returns an array that is not a tensor of the step.",
            rows=rows,
            why="Replay would return the same array each time.",
            fix="pass it as an input and return that; or leave it outside of the step.",
        )


def _refuse_changeable(function: str, paths: Sequence[KeyPath], leaves: Sequence[Any]) -> None:
    rows = [
        f"{path_string(path, 'metrics')}  expected a tensor or a plain value   got {type(leaf).__name__}"
        for path, leaf in zip(paths, leaves, strict=True)
        if not isinstance(leaf, Tensor) and not _is_fixed(leaf)
    ]
    if rows:
        raise SideEffectError.of(
            function,
            "returns an object that can change.",
            rows=rows,
            why="Replay would return the same object each time: what one call's result is given, all would have.",
            fix="return tensors, numbers and strings, in dicts, lists and tuples; make the object of them in the loop.",
        )


def _is_fixed(value: Any) -> bool:
    """Whether a value is immutable: atomic, or of a type that defines a hash, as immutable values do."""
    if isinstance(value, _ATOMS):
        return True
    if not any("__hash__" in vars(owner) for owner in type(value).__mro__[:-1]):
        return False
    try:
        hash(value)
    except TypeError:
        return False
    return True
