"""Check the arguments of a draw, before anything is drawn."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from ..errors import LayoutError
from ..tree import leaves

__all__ = [
    "bounds",
    "check_broadcast",
    "check_floating",
    "check_integer",
    "check_key",
    "check_operand",
    "check_probability",
    "describe",
    "numel",
    "round_down",
    "used_keys",
    "validate_key",
]

# What keys are drawn from, with the numbers folded into them.
_USED: ContextVar[list[tuple[Tensor, Any]] | None] = ContextVar("keys in use", default=None)


def describe(value: object) -> str:
    if not isinstance(value, Tensor):
        # The repr of a whole state would read its values, which a step refuses with a different error.
        reads = any(isinstance(leaf, Tensor) for leaf in leaves(value))
        return type(value).__name__ if reads else f"{type(value).__name__} {value!r}"
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}@{value.device}"


@contextlib.contextmanager
def used_keys() -> Iterator[list[tuple[Tensor, Any]]]:
    """Note each key that is drawn or derived from in this block, with what is folded into it."""
    used: list[tuple[Tensor, Any]] = []
    token = _USED.set(used)
    try:
        yield used
    finally:
        _USED.reset(token)
        if (around := _USED.get()) is not None:
            around.extend(used)


def validate_key(key: object) -> Tensor:
    """Refuse what is no key; return the key."""
    if not isinstance(key, Tensor):
        fix = (
            "give the state one, `TrainState.create(..., key=fcg.random.key(0))`"
            if key is None
            else "`fcg.random.key(0)`"
        )
        raise TypeError(
            f"`key`: expected a key, got {describe(key)}.\nTo fix: {fix}; the key is the first argument."
        )
    if key.dtype != torch.int64 or key.shape != (2,):
        rows = [f"key  expected int64[2]   got {describe(key)}"]
        fix = "pass one key, from `key(seed)`, or one row of `split(key, n)`, `keys[0]`."
        raise LayoutError.of("", "this is not a random key.", rows=rows, fix=fix)
    return key


def check_key(key: object, folded: object = None) -> None:
    """Refuse what is no key; note for :func:`used_keys` that one is drawn or derived from."""
    valid = validate_key(key)
    # torch.compile cannot read a context variable; `microbatches` never runs under it.
    if not torch.compiler.is_dynamo_compiling() and (used := _USED.get()) is not None:
        used.append((valid, folded))


def check_operand(name: str, value: object, key: Tensor) -> None:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        raise TypeError(f"`{name}`: expected a floating tensor, got {describe(value)}.")
    if value.device != key.device:
        rows = [f"{name}  expected a tensor on {key.device}, like the key   got {describe(value)}"]
        fix = "move one of them outside of the step; a copy between devices cannot be captured."
        raise LayoutError.of("", "key and operand are on two devices.", rows=rows, fix=fix)


def check_integer(name: str, value: object, low: int, high: int) -> None:
    # Refuse a tensor before comparing it: the comparison would read it on the host.
    if not isinstance(value, int):
        fix = "."
        if isinstance(value, Tensor):
            fix = (
                ".\nTo fix: name the argument of the step that it comes from in `static_argnames=`; a number on the "
                "device goes into `fcg.random.fold_in(key, number)`."
            )
        elif isinstance(value, float):
            fix = f".\nTo fix: a whole number, such as `{int(value)}`."
        raise TypeError(f"`{name}`: expected a Python int, got {describe(value)}{fix}")
    if not low <= value <= high:
        raise ValueError(f"`{name}`: expected an integer from {low} to {high}, got {value}.")


def check_floating(dtype: object) -> None:
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"`dtype`: expected a floating dtype, got {dtype}.")


def check_probability(p: object) -> None:
    if not isinstance(p, float | int) or not 0 <= p <= 1:
        raise ValueError(f"`p`: expected a Python number from 0 to 1, got {describe(p)}.")


def check_broadcast(name: str, value: Tensor, shape: Sequence[int]) -> None:
    # An operand with more dimensions would broadcast the draw instead: all its rows would share one draw.
    sizes = zip(reversed(value.shape), reversed(shape), strict=False)
    if value.ndim > len(shape) or any(size not in (1, wanted) for size, wanted in sizes):
        rows = [f"{name}  expected a shape that broadcasts to {list(shape)}   got {describe(value)}"]
        what = f"`{name}` does not broadcast to `shape`."
        raise LayoutError.of("", what, rows=rows, fix=f"pass `{name}.shape`.")


def numel(shape: object) -> int:
    if not isinstance(shape, Sequence):
        fix = (
            "the key comes first, then the shape"
            if isinstance(shape, Tensor)
            else "a tuple, such as `(4, 3)`"
        )
        raise TypeError(f"`shape`: expected a tuple of integers, got {describe(shape)}.\nTo fix: {fix}.")
    for size in shape:
        check_integer("shape", size, 0, 2**63 - 1)
    return math.prod(shape)


def round_down(value: float, dtype: torch.dtype, *, strict: bool) -> float:
    """Return the largest number of ``dtype`` that is at most ``value``, or below it if ``strict``."""
    info = torch.finfo(dtype)
    mantissa, exponent = math.frexp(value)
    # Just below a power of two, numbers are twice as dense; near zero, they are spaced like subnormals.
    spacing = math.ldexp(info.eps, exponent - (2 if mantissa == 0.5 else 1)) if value else 0.0
    spacing = max(spacing, info.tiny * info.eps)
    return (math.ceil(value / spacing) - 1 if strict else math.floor(value / spacing)) * spacing


def bounds(low: float, high: float, dtype: torch.dtype) -> tuple[float, float]:
    """Return the smallest and the largest number of ``dtype`` in [low, high)."""
    limit = torch.finfo(dtype).max
    if not (low < high and max(-low, high, high - low) <= limit):
        raise ValueError(f"expected low < high, at most {limit:.4g} apart ({dtype}), got [{low}, {high}).")
    smallest = -round_down(-low, dtype, strict=False)
    largest = round_down(high, dtype, strict=True)
    if smallest > largest:
        raise ValueError(f"[{low}, {high}) holds no number of {dtype}. To fix: use a wider range or dtype.")
    return smallest, largest
