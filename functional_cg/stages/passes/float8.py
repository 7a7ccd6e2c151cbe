"""Casts to float8 that overflow as torch's own casts do.

A Triton kernel saturates: a value that is too large becomes the largest finite number. torch gives NaN or infinity, or
saturates as well, depending on version and format.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..program import Instr

__all__ = ["overflow_of", "to_float8"]

# Larger values overflow: half a step beyond the format's largest number, where ties round to even.
_LARGEST: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.float8_e4m3fn: 464.0, torch.float8_e5m2: 61439.99609375}
)
_NEGATIVE = 0x80


def overflow_of(instr: Instr) -> int | None:
    """Return the bits of an overflow in a call's cast; None if it is no float8 cast, or the cast saturates."""
    dtype = instr.kwargs.get("dtype")
    if instr.op is not torch.ops.aten._to_copy.default or dtype not in _LARGEST:
        return None
    infinite = torch.full((), torch.inf, device=instr.out.spec.device).to(dtype)
    return None if bool(infinite.float().isfinite()) else int(infinite.view(torch.uint8))


def to_float8(value: Tensor, *, dtype: torch.dtype, overflow: int, **others: Any) -> Tensor:
    """Return ``value.to(dtype)``, where values that are too large get the bits ``overflow`` and their own sign."""
    cast = torch.ops.aten._to_copy.default(value, dtype=dtype, **others)
    signed = torch.where(torch.signbit(value), _NEGATIVE | overflow, overflow).to(torch.uint8)
    return torch.where(value.abs() > _LARGEST[dtype], signed, cast.view(torch.uint8)).view(dtype)
