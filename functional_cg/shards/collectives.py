"""Collectives as pure functions: they return new tensors, and a trace records them. The one door to c10d's ops.

An axis of one rank has no process group: there, each is the identity, and no op is recorded.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed
import torch.distributed._functional_collectives  # registers what the ops do on fake tensors
from torch import Tensor

from .mesh import Axis, Mesh

__all__ = [
    "ALL_REDUCE",
    "GATHER",
    "REDUCE_SCATTER",
    "all_gather",
    "all_reduce",
    "broadcast",
    "reduce_scatter",
]

_ops = torch.ops._c10d_functional
GATHER = _ops.all_gather_into_tensor_coalesced.default  # takes lists: a trace joins several into one launch
REDUCE_SCATTER = _ops.reduce_scatter_tensor_coalesced.default
ALL_REDUCE = _ops.all_reduce.default


def all_gather(shard: Tensor, axis: Axis) -> Tensor:
    """A vector [n] of each rank, as one vector [n * size] in the order of ranks."""
    if axis.size == 1:
        return shard
    return _wait(GATHER([shard.contiguous()], axis.size, axis.group)[0])


def reduce_scatter(vector: Tensor, axis: Axis) -> Tensor:
    """The sum over ranks of a vector [n * size], of which each rank gets its own [n]."""
    if axis.size == 1:
        return vector
    return _wait(REDUCE_SCATTER([vector.contiguous()], "sum", axis.size, axis.group)[0])


def all_reduce(tensor: Tensor, where: Mesh | Axis, op: str = "sum") -> Tensor:
    """A tensor reduced over all ranks of a mesh, or along one axis.

    Args:
      tensor: Of one shape on all ranks.
      where: Over which ranks.
      op: ``sum``, ``max`` or ``min``.
    """
    for axis in where.wide if isinstance(where, Mesh) else (where,) * (where.size > 1):
        tensor = _wait(ALL_REDUCE(tensor.contiguous(), op, axis.group))
    return tensor


def _wait(tensor: Tensor) -> Tensor:
    return cast("Tensor", _ops.wait_tensor(tensor))


def broadcast(tensor: Tensor, mesh: Mesh) -> Tensor:
    """The value of rank 0, as a new tensor; outside of graphs."""
    out = tensor.detach().clone(memory_format=torch.contiguous_format)
    if mesh.size > 1:
        torch.distributed.broadcast(out, 0)
    return out
