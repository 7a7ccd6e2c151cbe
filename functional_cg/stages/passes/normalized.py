"""Normalizations as elementwise calls of their statistics, for a backward that recomputes their results."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...tensors.aten import named_arguments
from ...tensors.op_table import row_of
from ..program import Instr

__all__ = ["apply_statistics", "normalized"]

_library = torch.library.Library("fcg", "FRAGMENT")
_library.define(
    "normalized(Tensor x, Tensor? mean, Tensor rstd, Tensor? weight, Tensor? bias, int? groups) -> Tensor"
)


def apply_statistics(
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int | None,
) -> Tensor:
    """Return ``(x - mean) * rstd * weight + bias`` in the dtype of ``x``, computed in that of ``rstd``.

    Args:
      x: [batch, channels, ...].
      mean: Mean of each row, batch element and group, or channel; None for 0.
      rstd: Reciprocal of the standard deviation, of the same shape.
      weight: Shaped like the last dimensions of ``x``, or [channels].
      bias: Shaped like ``weight``.
      groups: Groups of channels, each with statistics for each batch element; 0 for statistics of channels; None for
        statistics that broadcast.
    """

    def spread(value: Tensor) -> Tensor:
        if groups is None:
            return value
        if groups and value.ndim == 2 and value.shape == (x.shape[0], groups):
            each = value.unsqueeze(2).expand(-1, -1, x.shape[1] // groups)
            return each.reshape(x.shape[:2] + (1,) * (x.ndim - 2))
        return value.reshape((1, x.shape[1]) + (1,) * (x.ndim - 2))

    out = x.to(rstd.dtype)
    if mean is not None:
        out = out - spread(mean)
    out = out * spread(rstd)
    if weight is not None:
        out = out * spread(weight)
    if bias is not None:
        out = out + spread(bias)
    return out.to(x.dtype)


_library.impl("normalized", apply_statistics, "CompositeExplicitAutograd")


def normalized(instr: Instr) -> Instr | None:
    """Return the elementwise call with the first result of a normalization that returns its statistics, or None."""
    if not row_of(instr.op).normalizes:
        return None
    given = named_arguments(instr.op, instr.args, instr.kwargs)
    out, *statistics = instr.out[:3]
    mean, rstd = statistics if len(statistics) == 2 else (None, *statistics)
    groups = 0 if "running_mean" in given else given.get("group")
    if not rstd.spec.numel or rstd.spec.dtype not in (torch.float32, torch.float64):
        return None  # running statistics are not there, others were rounded
    args = given["input"], mean, rstd, given.get("weight"), given.get("bias"), groups
    op = torch.ops.fcg.normalized.default
    return replace(instr, op=op, args=args, kwargs={}, out=out, writes=())
