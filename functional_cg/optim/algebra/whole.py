"""Gathers sharded leaves for what a shard alone cannot compute: rows, columns and matrix products."""

from __future__ import annotations

from torch import Tensor

from functional_cg.shards.reader import all_of
from functional_cg.shards.tensor import Sharded


def whole(leaf: Tensor) -> Tensor:
    """Gather a sharded leaf over the ranks, in its own dtype; return any other leaf unchanged."""
    return all_of(leaf) if isinstance(leaf, Sharded) else leaf


def placed_like(value: Tensor, leaf: Tensor) -> Tensor:
    """Shard a whole value like ``leaf``, keeping this rank's part."""
    if not isinstance(leaf, Sharded):
        return value
    placement = leaf.placement
    return Sharded(placement.own(value) if placement.partial else value, placement)
