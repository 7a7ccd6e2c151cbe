"""Reduce whole leaves: first over this rank's elements, then over the ranks that hold the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, cast

import torch
from torch import Tensor

from .collectives import all_reduce
from .placement import Placement

__all__ = ["REDUCTIONS", "norms"]

Reduction = Callable[[Tensor, Placement, Mapping[str, Any]], Tensor]


def _across(value: Tensor, placement: Placement, op: str = "sum") -> Tensor:
    return all_reduce(value, placement.mesh.shards, op)


def _extreme(value: Tensor, placement: Placement, op: Literal["max", "min"]) -> Tensor:
    """Return the largest or smallest value over the ranks; NaN if any rank has NaN, which collectives may ignore."""
    if not value.is_floating_point():
        return _across(value, placement, op)
    missing = value.isnan().to(value.dtype) * (1 if op == "max" else -1)
    extreme, some = _across(torch.stack([value, missing]), placement, op).unbind()
    return extreme.masked_fill(some != 0, math.nan)


def _sum(local: Tensor, placement: Placement, named: Mapping[str, Any]) -> Tensor:
    return _across(placement.masked(local).sum(dtype=named.get("dtype")), placement)


def _mean(local: Tensor, placement: Placement, named: Mapping[str, Any]) -> Tensor:
    return _sum(local, placement, named) / placement.numel


def _max(local: Tensor, placement: Placement, named: Mapping[str, Any]) -> Tensor:
    lowest = -math.inf if local.is_floating_point() else torch.iinfo(local.dtype).min
    return _extreme(placement.masked(local, lowest).amax(), placement, "max")


def _min(local: Tensor, placement: Placement, named: Mapping[str, Any]) -> Tensor:
    highest = math.inf if local.is_floating_point() else torch.iinfo(local.dtype).max
    return _extreme(placement.masked(local, highest).amin(), placement, "min")


def _any(local: Tensor, placement: Placement, named: Mapping[str, Any]) -> Tensor:
    return _max((local != 0).to(torch.int32), placement, named) != 0


def _all(local: Tensor, placement: Placement, named: Mapping[str, Any]) -> Tensor:
    return _min((local != 0).to(torch.int32), placement, named) != 0


def _count(local: Tensor, placement: Placement, named: Mapping[str, Any]) -> Tensor:
    return _across((placement.masked(local) != 0).sum(), placement)


def _norm(local: Tensor, placement: Placement, named: Mapping[str, Any]) -> Tensor:
    order = named.get("ord", named.get("p", 2))
    return norms([(local, placement)], 2 if order is None else order, named.get("dtype"))[0]


def norms(
    leaves: Sequence[tuple[Tensor, Placement | None]], order: float, dtype: torch.dtype | None
) -> list[Tensor]:
    """Return the norm of each leaf; sharded leaves share one collective.

    Args:
      leaves: Pairs (local tensor, placement); the placement is None for a leaf that is whole here.
      order: A positive number, or infinity.
      dtype: Dtype in which to sum; None for the leaf's own.
    """
    own = torch._foreach_norm(
        [local if placement is None else placement.masked(local) for local, placement in leaves],
        order,
        dtype=dtype,
    )
    out = list(own)
    sharded = [i for i, (_, placement) in enumerate(leaves) if placement is not None]
    if not sharded:
        return out
    home = cast("Placement", leaves[sharded[0]][1])
    stacked = torch.stack([out[i] for i in sharded])
    if order == math.inf:
        total = _extreme(stacked, home, "max")
    elif order == 2:
        total = _across(stacked.square(), home).sqrt()
    else:
        total = _across(stacked.pow(order), home).pow(1 / order)
    for i, norm in zip(sharded, total.unbind(), strict=True):
        out[i] = norm
    return out


REDUCTIONS: Mapping[str, Reduction] = MappingProxyType(
    {
        "aten::sum": _sum,
        "aten::mean": _mean,
        "aten::amax": _max,
        "aten::amin": _min,
        "aten::max": _max,
        "aten::min": _min,
        "aten::any": _any,
        "aten::all": _all,
        "aten::count_nonzero": _count,
        "aten::linalg_vector_norm": _norm,
        "aten::norm": _norm,
    }
)
