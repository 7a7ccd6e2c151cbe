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
    """Reduce what ranks have found of their elements; of the stages that hold a leaf, the first one counts."""
    if placement.sharded:
        value = all_reduce(value, placement.mesh.shards, op)
    holders = placement.holders
    if holders is None:
        return value
    counts = holders.first or op != "sum"
    return all_reduce(value if counts else torch.zeros_like(value), holders.stages, op)


def _elements(local: Tensor, placement: Placement, fill: float = 0.0) -> Tensor:
    """Return the elements that this rank holds, with ``fill`` for padding; a single ``fill`` if it holds none."""
    return placement.masked(local, fill) if placement.here else torch.full_like(local.new_empty(1), fill)


def _largest(value: Tensor, across: Callable[[Tensor], Tensor], sign: int = 1) -> Tensor:
    missing = value.isnan().to(value.dtype) * sign
    extreme, some = across(torch.stack([value, missing])).unbind()
    return extreme.masked_fill(some != 0, math.nan)


def _sum(local: Tensor, placement: Placement, named: Mapping[str, Any]) -> Tensor:
    return _across(_elements(local, placement).sum(dtype=named.get("dtype")), placement)


def _extreme(local: Tensor, placement: Placement, op: Literal["max", "min"]) -> Tensor:
    """Return the largest or smallest value over the ranks; NaN if any rank has NaN, which collectives may ignore."""
    sign, floating = 1 if op == "max" else -1, local.is_floating_point()
    limits = (
        (-math.inf, math.inf) if floating else (torch.iinfo(local.dtype).min, torch.iinfo(local.dtype).max)
    )
    held = _elements(local, placement, limits[op == "min"])
    value = held.amax() if op == "max" else held.amin()
    if not floating:
        return _across(value, placement, op)
    return _largest(value, lambda both: _across(both, placement, op), sign)


def _truth(local: Tensor, placement: Placement, op: Literal["max", "min"]) -> Tensor:
    return _extreme((local != 0).to(torch.int32), placement, op) != 0


def _norm(local: Tensor, placement: Placement, named: Mapping[str, Any]) -> Tensor:
    order = named.get("ord", named.get("p", 2))
    return norms([(local, placement)], 2 if order is None else order, named.get("dtype"))[0]


def norms(
    leaves: Sequence[tuple[Tensor, Placement | None]], order: float, dtype: torch.dtype | None
) -> list[Tensor]:
    """Return the norm of each leaf; sharded leaves share one collective, and so do leaves of a pipeline.

    Args:
      leaves: Pairs (local tensor, placement); the placement is None for a leaf that is whole here.
      order: A positive number, or infinity.
      dtype: Dtype in which to sum; None for the leaf's own.
    """
    own = torch._foreach_norm(
        [local if placement is None else _elements(local, placement) for local, placement in leaves],
        order,
        dtype=dtype,
    )
    out = list(own)
    _combine(out, [i for i, (_, p) in enumerate(leaves) if p is not None and p.sharded], leaves, order)
    _share(out, [i for i, (_, p) in enumerate(leaves) if p is not None and p.holders is not None], leaves)
    return out


def _combine(
    out: list[Tensor],
    sharded: Sequence[int],
    leaves: Sequence[tuple[Tensor, Placement | None]],
    order: float,
) -> None:
    """Replace norms of shards by those of their leaves."""
    if not sharded:
        return
    shards = cast("Placement", leaves[sharded[0]][1]).mesh.shards
    stacked = torch.stack([out[i] for i in sharded])
    if order == math.inf:
        total = _largest(stacked, lambda value: all_reduce(value, shards, "max"))
    elif order == 2:
        total = all_reduce(stacked.square(), shards).sqrt()
    else:
        total = all_reduce(stacked.pow(order), shards).pow(1 / order)
    for i, norm in zip(sharded, total.unbind(), strict=True):
        out[i] = norm


def _share(out: list[Tensor], held: Sequence[int], leaves: Sequence[tuple[Tensor, Placement | None]]) -> None:
    """Replace norms by those that the first holder of each leaf has found, to the bit: the others add zero."""
    holders = [cast("Placement", leaves[i][1]).holders for i in held]
    known = [holder for holder in holders if holder is not None]
    if not known:
        return
    mine = [
        out[i] if holder.first else torch.zeros_like(out[i]) for i, holder in zip(held, known, strict=True)
    ]
    for i, norm in zip(held, all_reduce(torch.stack(mine), known[0].stages).unbind(), strict=True):
        out[i] = norm


REDUCTIONS: Mapping[str, Reduction] = MappingProxyType(
    {
        "aten::sum": _sum,
        "aten::mean": lambda local, placement, named: _sum(local, placement, named) / placement.numel,
        "aten::amax": lambda local, placement, _: _extreme(local, placement, "max"),
        "aten::amin": lambda local, placement, _: _extreme(local, placement, "min"),
        "aten::max": lambda local, placement, _: _extreme(local, placement, "max"),
        "aten::min": lambda local, placement, _: _extreme(local, placement, "min"),
        "aten::any": lambda local, placement, _: _truth(local, placement, "max"),
        "aten::all": lambda local, placement, _: _truth(local, placement, "min"),
        "aten::count_nonzero": lambda local, placement, _: _sum(local != 0, placement, {}),
        "aten::linalg_vector_norm": _norm,
        "aten::norm": _norm,
    }
)
