"""Summarize the values of a tensor in a few numbers. Reads the values, so it waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["summary"]

_FIRST = 6


def summary(tensor: Tensor) -> list[tuple[str, str]]:
    """Return range, mean and spread of the finite elements, the count of non-finite ones, and the first elements.

    Returns:
      Pairs (name, number as text); statistics of complex numbers are those of their absolute values.

    Example:
      >>> import torch
      >>> from functional_cg.messages.summary import summary
      >>> summary(torch.tensor([1.0, 3.0, float("nan")]))[:2]
      [('min', '1'), ('max', '3')]
    """
    with torch.no_grad():
        flat = tensor.detach().reshape(-1)
        sizes = flat.abs() if flat.is_complex() else flat
        wide = sizes.cpu().double()
        finite = wide[wide.isfinite()]
        rows = [("min", finite.min()), ("max", finite.max()), ("mean", finite.mean())] if len(finite) else []
        if len(finite) > 1:
            rows.append(("std", finite.std()))
        shown = [(name, f"{float(value):.6g}") for name, value in rows]
        if len(finite) < len(wide):
            shown.append(("not finite", f"{len(wide) - len(finite):,} of {len(wide):,}"))
        more = ", …" if len(wide) > _FIRST else ""
        return [*shown, ("first", ", ".join(map(_number, flat[:_FIRST].tolist())) + more)]


def _number(value: complex | float) -> str:
    return str(value) if isinstance(value, bool | int) else f"{value:.6g}"
