"""Whole leaves of sharded ones, for what a shard alone cannot answer: rows, columns and matrix products."""

from __future__ import annotations

import torch
from torch import Tensor

from functional_cg.shards.reader import gathered
from functional_cg.shards.reader import whole as read
from functional_cg.shards.tensor import Sharded


def whole(leaf: Tensor) -> Tensor:
    """All of a leaf, in its own dtype: gathered over the ranks where they hold shards."""
    if not isinstance(leaf, Sharded):
        return leaf
    with torch.no_grad():
        return read(gathered([Sharded(leaf.local, leaf.placement.without_reading())])[0])


def placed_like(value: Tensor, leaf: Tensor) -> Tensor:
    """A whole value as ``leaf`` lies: this rank's shard of it."""
    if not isinstance(leaf, Sharded):
        return value
    placement = leaf.placement
    return Sharded(placement.own(value) if placement.sharded else value, placement)
