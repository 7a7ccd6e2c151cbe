"""Arithmetic on leaves: running averages, norms, masked maps, and gathers of sharded leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from functional_cg.optim.algebra.base import Shared
from functional_cg.optim.rules import fused as _fused
from functional_cg.shards.reader import all_of
from functional_cg.shards.tensor import Sharded


def averaged(decay: Shared, old: Any, new: Tensor) -> Tensor:
    """Exponential moving average of a leaf: ``decay * old + (1 - decay) * new``."""
    return decay(old) * old + decay.rest(old) * new  # type: ignore[no-any-return]


def norm(leaf: Tensor) -> Tensor:
    """The L2 norm of a leaf, f32[] or f64[]."""
    out: Tensor = torch.linalg.vector_norm(leaf, dtype=torch.promote_types(leaf.dtype, torch.float32))
    return out


def leaf_norms(leaves: Sequence[Tensor], order: float = 2) -> list[Tensor]:
    """The norm of each leaf, f32[] or f64[]; one op per device and dtype."""
    if not leaves:
        return []

    def norms(columns: Any, _: Any) -> tuple[Any]:
        dtype = torch.promote_types(columns[0][0].dtype, torch.float32)
        return (torch._foreach_norm(columns[0], order, dtype=dtype),)

    return _fused.per_group(norms, [leaves])[0]


def whole(leaf: Tensor) -> Tensor:
    """Gather a sharded leaf over the ranks, in its own dtype; return any other leaf unchanged."""
    return all_of(leaf) if isinstance(leaf, Sharded) else leaf


def placed_like(value: Tensor, leaf: Tensor) -> Tensor:
    """Shard a whole value like ``leaf``, keeping this rank's part."""
    if not isinstance(leaf, Sharded):
        return value
    placement = leaf.placement
    return Sharded(placement.own(value) if placement.partial else value, placement)
