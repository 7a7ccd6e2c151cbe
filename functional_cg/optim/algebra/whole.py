"""Whole leaves of sharded ones, for what a shard alone cannot answer: rows, columns and matrix products."""

from __future__ import annotations

from torch import Tensor

from functional_cg.shards.reader import all_of
from functional_cg.shards.tensor import Sharded


def whole(leaf: Tensor) -> Tensor:
    """All of a leaf, in its own dtype: gathered over the ranks where they hold shards."""
    return all_of(leaf) if isinstance(leaf, Sharded) else leaf


def placed_like(value: Tensor, leaf: Tensor) -> Tensor:
    """A whole value as ``leaf`` lies: this rank's shard of it."""
    if not isinstance(leaf, Sharded):
        return value
    placement = leaf.placement
    return Sharded(placement.own(value) if placement.sharded else value, placement)
