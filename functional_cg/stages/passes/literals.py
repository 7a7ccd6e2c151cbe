"""Python numbers as kernels hold them.

In half precision, some kernels round a number before they compute with it, and others read it in single precision, as
compiled ones do: on a CPU, ``x - 0.1`` of bfloat16 subtracts 0.10009765625, and ``x * 0.1`` multiplies by 0.1. Nothing
tells which, and a GPU's kernels differ. So the kernel itself is asked, with all numbers that such a tensor may hold.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..evaluate import quiet
from ..fx_passes.rounding import HALF
from ..program import Instr, Var
from .changes import with_arguments

__all__ = ["as_held"]

_NUMBERS = (torch.NumberType, torch.TensorType)  # `x - 0.1` calls an op of two tensors
_APART = 7919  # places by which the numbers of the second tensor are shifted; a prime


def as_held(instr: Instr) -> Instr:
    """Return a call by element with its numbers as its kernel holds them; results are equal, bit by bit."""
    tensors, schema = instr.inputs(), instr.op._schema.arguments
    dtypes = {var.spec.dtype for var in tensors}
    if not _is_asked(instr.op) or len(dtypes) != 1 or not dtypes <= HALF:
        return instr
    (dtype,) = dtypes
    found = {argument.name: one for argument, one in zip(schema, instr.args, strict=False)} | instr.kwargs
    changed: dict[str, float] = {}
    for argument in schema:
        number: Any = found.get(argument.name)
        if type(number) not in (int, float) or not isinstance(argument.type, _NUMBERS):
            continue
        held = _rounded(number, dtype)
        if held != number and math.isfinite(held):
            asked = tuple((name, _shape(one)) for name, one in found.items())
            if _is_held(instr.op, asked, argument.name, held, dtype, tensors[0].spec.device):
                found[argument.name] = changed[argument.name] = held
    return with_arguments(instr, changed) if changed else instr


@cache
def _is_asked(op: Any) -> bool:
    """Whether a kernel may be asked: it computes each element from those at its place, and draws nothing."""
    arguments = op._schema.arguments
    plain = not any(one.is_out or isinstance(one.type, torch.ListType) for one in arguments)
    by_itself = torch.Tag.pointwise in op.tags and torch.Tag.nondeterministic_seeded not in op.tags
    return op.namespace == "aten" and plain and by_itself


def _rounded(number: float, dtype: torch.dtype) -> float:
    try:
        rounded = torch.tensor(float(number), dtype=dtype).item()
    except (OverflowError, RuntimeError):
        return math.inf
    return int(rounded) if type(number) is int and math.isfinite(rounded) else rounded


def _shape(value: Any) -> Any:
    """Return what a call depends on: of a tensor, whether it has dimensions."""
    return ("tensor", bool(value.spec.shape)) if isinstance(value, Var) else value


@cache
def _is_held(
    op: Any,
    asked: tuple[tuple[str, Any], ...],
    name: str,
    held: float,
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Whether a kernel computes the same with a number as with the rounded one."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).to(device)

    def computed(**numbers: float) -> Tensor:
        given: dict[str, Any] = {}
        for shift, (key, one) in enumerate(asked):
            if isinstance(one, tuple) and one[:1] == ("tensor",):
                values = every.roll(shift * _APART)
                given[key] = values if one[1] else values[2**14]
            else:
                given[key] = one
        given |= numbers
        return op(**given)  # type: ignore[no-any-return]

    with quiet():
        try:
            one, other = computed(), computed(**{name: held})
        except (RuntimeError, TypeError, ValueError, NotImplementedError):
            return False
    return one.shape == every.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())
