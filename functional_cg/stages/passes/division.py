"""Floor division and remainder of floating-point numbers, by the formulas of torch's own kernels.

A compiler divides, rounds and multiplies back. If the quotient has more digits than the format holds, that result is
entirely wrong; infinite operands give wrong values or NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..program import Instr

__all__ = ["division_of"]


def division_of(instr: Instr) -> Callable[..., Tensor] | None:
    """Return the formula of a call; None if it is no floating-point floor division or remainder."""
    name = instr.op._schema.name
    if name.rstrip("_") == "aten::div" and instr.kwargs.get("rounding_mode") != "floor":
        return None
    if "out" in instr.kwargs:  # torch itself writes it
        return None
    return _DIVISIONS.get(name) if any(out.spec.dtype.is_floating_point for out in instr.outputs()) else None


def remainder(value: Any, other: Any) -> Tensor:
    """Return the remainder, which has the sign of the divisor."""
    return _floored(value, other)[1]


def floor_divide(value: Any, other: Any, *, rounding_mode: str = "floor") -> Tensor:
    assert rounding_mode == "floor"
    return _floored(value, other)[0]


def remainder_(value: Tensor, other: Any) -> Tensor:
    return value.copy_(remainder(value, other))


def floor_divide_(value: Tensor, other: Any, *, rounding_mode: str = "floor") -> Tensor:
    return value.copy_(floor_divide(value, other, rounding_mode=rounding_mode))


def _floored(value: Any, other: Any) -> tuple[Tensor, Tensor]:
    """Return quotient and remainder as Python's ``divmod`` (CPython, ``float_divmod``), with IEEE division by zero."""
    dtype = torch.result_type(value, other)
    if not isinstance(value, Tensor):
        value = torch.full((), value, dtype=dtype, device=other.device)
    value = value.to(dtype)
    rest = torch.fmod(value, other)
    other_sign = _of_other_sign(rest, other)
    quotient = (value - rest) / other
    quotient = torch.where(other_sign, quotient - 1, quotient)
    down = quotient.floor()
    down = torch.where(quotient - down > 0.5, down + 1, down)
    whole = value / other
    down = torch.where(quotient != 0, down, torch.copysign(torch.zeros_like(whole), whole))
    down = torch.where(value.isfinite(), torch.where(whole.isinf(), whole, down), down)
    if isinstance(other, Tensor):
        down = torch.where(other == 0, whole, down)
    elif other == 0:
        down = whole
    return down, torch.where(other_sign, rest + other, rest)


def _of_other_sign(rest: Tensor, other: Any) -> Tensor:
    """Return where a remainder has another sign than the divisor.

    By choice, not by `&` and `!=` of conditions: the compiler's bounds of these fail for values that it knows.
    """
    if not isinstance(other, Tensor):
        return rest > 0 if other < 0 else rest < 0
    return torch.where(other < 0, rest > 0, rest < 0)


_DIVISIONS: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {
        "aten::remainder": remainder,
        "aten::remainder_": remainder_,
        "aten::floor_divide": floor_divide,
        "aten::floor_divide_": floor_divide_,
        "aten::div": floor_divide,
        "aten::div_": floor_divide_,
    }
)
