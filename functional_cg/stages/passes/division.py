"""Division that rounds to whole numbers, and remainders, by the formulas of torch's own kernels.

A compiler divides, rounds and multiplies back. If the quotient has more digits than the format holds, that result is
entirely wrong; infinite operands give wrong values or NaN. And an ulp decides what a quotient is rounded to: in half
precision, torch's kernels for a CPU round each operation, unless they divide by a single number; those for a GPU round
the whole numbers alone, and multiply by the reciprocal of a Python number.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..fx_passes.rounding import HALF, ROUNDED
from ..program import Instr

__all__ = ["division_of"]


def division_of(instr: Instr) -> Callable[..., Tensor] | None:
    """Return the formula of what a call computes; None if that is no floating-point quotient or remainder of these."""
    name = instr.op._schema.name.removesuffix("_")
    if name == "aten::div" and instr.kwargs.get("rounding_mode") is None:
        return None
    return _DIVISIONS.get(name) if any(out.spec.dtype.is_floating_point for out in instr.outputs()) else None


def remainder(value: Any, other: Any) -> Tensor:
    """Return the remainder, which has the sign of the divisor."""
    value, other = _operands(value, other)
    if isinstance(other, Tensor):
        other = other.to(value.dtype)
    rest = torch.fmod(value, other)
    return torch.where(_of_other_sign(rest, other), rest + other, rest)


def divide(value: Any, other: Any, *, rounding_mode: str = "floor") -> Tensor:
    """Return the quotient, rounded towards zero, or down as by Python's ``divmod`` (CPython, ``float_divmod``).

    Division by zero is that of IEEE 754.
    """
    value, other = _operands(value, other)
    dtype, is_number = value.dtype, not isinstance(other, Tensor)
    if dtype in HALF and (value.is_cuda or is_number or other.numel() == 1):
        value, other = value.float(), other if is_number else other.float()
    each = _rounding(value.dtype)
    whole = _rounding(dtype) if value.is_cuda else each
    by = partial(_by_number, number=other) if value.is_cuda and is_number else partial(_exactly, other=other)
    quotient = each(by(value))
    if rounding_mode == "trunc":
        return (quotient if is_number else whole(quotient)).trunc().to(dtype)
    rest = torch.fmod(value, other)
    exact = each(by(each(value - rest)))
    exact = torch.where(_of_other_sign(rest, other), each(exact - 1), exact)
    down = whole(exact.floor())
    down = torch.where(exact - down > 0.5, whole(down + 1), down)
    down = torch.where(exact != 0, down, torch.copysign(torch.zeros_like(down), quotient))
    down = torch.where(value.isfinite(), torch.where(quotient.isinf(), quotient, down), down)
    if isinstance(other, Tensor):
        down = torch.where(other == 0, quotient, down)
    elif other == 0:
        down = quotient
    return down.to(dtype)


def _operands(value: Any, other: Any) -> tuple[Tensor, Any]:
    """Return the dividend as a tensor of the dtype of the quotient, and the divisor as its kernel reads it."""
    dtype = torch.result_type(value, other)
    if not isinstance(value, Tensor):
        value = _rounding(dtype)(torch.full((), value, dtype=dtype, device=other.device))
    # Kernels of a CPU divide by one without dimensions as it is.
    if isinstance(other, Tensor) and other.is_cuda:
        other = other.to(dtype)
    return value.to(dtype), other


def _rounding(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Return what rounds the result of an operation; a compiler does not, in half precision."""
    return (lambda result: ROUNDED(result, dtype)) if dtype in HALF else (lambda result: result)


def _exactly(value: Tensor, other: Any) -> Tensor:
    """Divide, to the last bit; in single precision, compiled kernels of a GPU do not."""
    if value.is_cuda and isinstance(other, Tensor):
        return (value.double() / other.double()).to(value.dtype)
    return value / other  # type: ignore[no-any-return]


def _by_number(value: Tensor, number: float) -> Tensor:
    """Multiply by the reciprocal of a number."""
    held = (lambda it: it) if value.dtype is torch.float64 else (lambda it: ctypes.c_float(it).value)
    number = held(float(number))
    return value * (held(1.0 / number) if number else math.copysign(math.inf, number))


def _of_other_sign(rest: Tensor, other: Any) -> Tensor:
    """Return where a remainder has another sign than the divisor.

    By choice, not by `&` and `!=` of conditions: the compiler's bounds of these fail for values that it knows.
    """
    if not isinstance(other, Tensor):
        return rest > 0 if other < 0 else rest < 0
    return torch.where(other < 0, rest > 0, rest < 0)


_DIVISIONS: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {"aten::remainder": remainder, "aten::floor_divide": divide, "aten::div": divide}
)
