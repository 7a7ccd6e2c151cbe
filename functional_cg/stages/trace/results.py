"""What a step may return beside tensors: values that nobody can change."""

from __future__ import annotations

from collections.abc import Sequence
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor

from ...errors import ForeignTensorError, SideEffectError
from ...tree import KeyPath, path_string

__all__ = ["refuse_unreturnable"]

# Values without a hash of their own that cannot change, or that nobody means to.
_ATOMS = (torch.dtype, torch.layout, torch.memory_format, type, type(None), FunctionType, BuiltinFunctionType)


def refuse_unreturnable(function: str, paths: Sequence[KeyPath], leaves: Sequence[Any]) -> None:
    """Raise for arrays and for objects that can change: replay would return the same one each time.

    Raises:
      ForeignTensorError: For arrays of numpy.
      SideEffectError: For other objects.
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
    """Whether no one can change a value: it is atomic, or has a hash of its own, as values have that stay equal."""
    if isinstance(value, _ATOMS):
        return True
    if not any("__hash__" in vars(owner) for owner in type(value).__mro__[:-1]):
        return False
    try:
        hash(value)
    except TypeError:
        return False
    return True
