"""Gradients of a loss in stages: from a rank's sums to the gradients of the leaves that it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ..shards.collectives import all_reduce, from_one
from ..shards.mesh import Axis
from ..shards.placement import Holders
from ..shards.reader import Source, like_leaf, variable_of
from ..shards.tensor import Sharded
from .actions import Table
from .stages import Rehearsal

__all__ = ["gradients", "results"]


def gradients(
    found: Rehearsal,
    table: Table,
    sums: Mapping[tuple[int, int], Tensor],
    leaves: Sequence[Tensor],
    dtype: torch.dtype | None,
) -> list[Tensor]:
    """Return the gradient of each leaf, averaged over micro-batches and over the ranks that hold the same stages.

    A leaf that several stages read gets the sum of their gradients, the last stage's first, wherever they run.
    """
    return [_gradient(found, table, sums, number, leaf, dtype) for number, leaf in enumerate(leaves)]


def _gradient(
    found: Rehearsal,
    table: Table,
    sums: Mapping[tuple[int, int], Tensor],
    number: int,
    leaf: Tensor,
    dtype: torch.dtype | None,
) -> Tensor:
    holders = leaf.placement.holders if isinstance(leaf, Sharded) else None
    variable = variable_of(leaf)
    if holders is not None and not holders.here:
        return like_leaf(leaf, torch.zeros_like(variable, dtype=dtype or variable.dtype))
    stages = [n for n in reversed(range(table.stages)) if number in found.stages[n].grads]
    total = _summed([(n, sums.get((n, number))) for n in stages], holders, found.params[number], dtype)
    if total is None:
        return like_leaf(leaf, torch.zeros_like(variable, dtype=dtype or variable.dtype))
    total = total / table.microbatches
    if isinstance(leaf, Sharded):
        total = Source(leaf, variable).reduce(total, dtype)
    return like_leaf(leaf, total)


def _summed(
    parts: Sequence[tuple[int, Tensor | None]],
    holders: Holders | None,
    like: Tensor,
    dtype: torch.dtype | None,
) -> Tensor | None:
    """Return the sum of the stages' parts in one order on all ranks; None if there are none."""
    if holders is None or len(holders.ranks) == 1:
        mine = [cast("Tensor", part) for _, part in parts]
    else:
        axis = holders.axis
        empty = torch.zeros(like.shape, dtype=dtype or like.dtype, device=like.device)
        if len(parts) == 2:  # a sum of two and of zeros is the same in any order
            own = next((part for _, part in parts if part is not None), empty)
            return all_reduce(own, axis)
        mine = [from_one(empty if part is None else part, axis, here=part is not None) for _, part in parts]
    total: Tensor | None = None
    for part in mine:
        total = part if total is None else total + part
    return total


def results(
    found: Rehearsal, table: Table, sums: Mapping[int, Tensor], stages: Axis, dtype: torch.dtype | None
) -> list[Tensor]:
    """Return the result of the loss on all ranks: means over micro-batches; sums of integers."""
    out: list[Any] = []
    for position, like in enumerate(found.results):
        home = next(n for n, stage in enumerate(found.stages) if position in stage.results)
        here = table.owners[home] == stages.rank
        floating = like.is_floating_point()
        if here:
            mine = sums[position]
        else:
            summed = dtype if dtype is not None and floating else like.dtype
            mine = torch.zeros(like.shape, dtype=summed, device=like.device)
        value = from_one(mine, stages, here=here)
        out.append(value / table.microbatches if floating or like.is_complex() else value)
    return out
