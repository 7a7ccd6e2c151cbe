"""Normalizations as elementwise calls of their statistics, for a backward that recomputes their results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from ..program import Instr, Var

__all__ = ["apply_statistics", "normalized"]

_BATCH = ("native_batch_norm", "cudnn_batch_norm", "_native_batch_norm_legit")
_STATISTICS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "_fused_rms_norm": ("rstd",),
        "_native_batch_norm_legit": ("mean", "rstd"),
        "cudnn_batch_norm": ("mean", "rstd"),
        "native_batch_norm": ("mean", "rstd"),
        "native_group_norm": ("mean", "rstd"),
        "native_layer_norm": ("mean", "rstd"),
    }
)  # what follows the result

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
    if instr.name not in _STATISTICS:
        return None
    given = dict(zip((argument.name for argument in instr.op._schema.arguments), instr.args, strict=False))
    given |= instr.kwargs
    results = dict(zip(("out", *_STATISTICS[instr.name]), instr.out, strict=False))
    mean, rstd, groups = (
        results.get("mean"),
        results["rstd"],
        0 if instr.name in _BATCH else given.get("group"),
    )
    if not _are_exact(rstd):
        return None
    args = given["input"], mean, rstd, given.get("weight"), given.get("bias"), groups
    op = torch.ops.fcg.normalized.default
    return replace(instr, op=op, args=args, kwargs={}, out=results["out"], writes=())


def _are_exact(rstd: Var) -> bool:
    """Whether statistics are there, which running ones are not, and were not rounded to a narrower dtype."""
    return rstd.spec.numel > 0 and rstd.spec.dtype in (torch.float32, torch.float64)
