"""Gradients of a loss in stages: from a rank's sums to the gradients of the leaves that it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..shards.collectives import all_reduce, from_one
from ..shards.mesh import Axis
from ..shards.placement import Holders
from ..shards.reader import Source, like_leaf, variable_of
from ..shards.tensor import Sharded
from ..state.arena import BufferSpec
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

    def gradient(number: int, leaf: Tensor) -> Tensor:
        holders = leaf.placement.holders if isinstance(leaf, Sharded) else None
        variable, total = variable_of(leaf), None
        if holders is None or holders.here:
            stages = [n for n in reversed(range(table.stages)) if number in found.stages[n].grads]
            parts = [sums.get((n, number)) for n in stages]
            apart = len({table.owners[n] for n in stages}) == 2
            total = _summed(parts, holders, found.params[number].spec, dtype, apart=apart)
        if total is None:
            return torch.zeros_like(variable, dtype=dtype or variable.dtype)
        total = total / table.microbatches
        return Source(leaf, variable).reduce(total, dtype) if isinstance(leaf, Sharded) else total

    return [like_leaf(leaf, gradient(number, leaf)) for number, leaf in enumerate(leaves)]


def _summed(
    parts: Sequence[Any],
    holders: Holders | None,
    like: BufferSpec,
    dtype: torch.dtype | None,
    *,
    apart: bool,
) -> Tensor | None:
    """Return the sum of the stages' parts in one order on all ranks; None if there are none.

    Args:
      parts: The parts; None for those that are not here.
      holders: The ranks that hold the leaf; None for all.
      like: Layout of a part.
      dtype: Dtype of the sum; None for that of the parts.
      apart: Whether two ranks have made them.
    """
    if holders is not None and len(holders.ranks) > 1:
        axis = holders.axis
        empty = torch.zeros(like.shape, dtype=dtype or like.dtype, device=like.device)
        if len(parts) == 2 and apart:  # a sum of two and of zeros is the same in any order
            own = next((part for part in parts if part is not None), empty)
            return all_reduce(own, axis)
        parts = [from_one(empty if part is None else part, axis, here=part is not None) for part in parts]
    return sum(parts[1:], start=parts[0]) if parts else None


def results(
    found: Rehearsal, table: Table, sums: Mapping[int, Tensor], stages: Axis, dtype: torch.dtype | None
) -> list[Tensor]:
    """Return the result of the loss on all ranks: means over micro-batches; sums of integers."""
    out: list[Any] = []
    for position, spec in enumerate(var.spec for var in found.results):
        home = next(n for n, stage in enumerate(found.stages) if position in stage.results)
        here, own = table.owners[home] == stages.rank, spec.dtype
        summed = dtype if dtype is not None and own.is_floating_point else own
        mine = sums[position] if here else torch.zeros(spec.shape, dtype=summed, device=spec.device)
        value = from_one(mine, stages, here=here)
        out.append(value / table.microbatches if own.is_floating_point or own.is_complex else value)
    return out
