"""Collectives as pure functions: they return new tensors, and a trace records them. The one door to c10d's ops.

An axis of one rank has no process group: there, each is the identity, and no op is recorded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed
import torch.distributed._functional_collectives  # registers what the ops do on fake tensors
from torch import Tensor

from .mesh import Axis, Mesh

__all__ = ["all_gather", "all_reduce", "broadcast", "reduce_scatter"]

_ops = torch.ops._c10d_functional


def all_gather(shards: Sequence[Tensor], axis: Axis) -> list[Tensor]:
    """Each vector [n] as [n * size], in the order of ranks; all vectors in one grouped launch per dtype."""
    if axis.size == 1:
        return list(shards)
    return _grouped(shards, lambda group: _ops.all_gather_into_tensor_coalesced(group, axis.size, axis.group))


def reduce_scatter(vectors: Sequence[Tensor], axis: Axis) -> list[Tensor]:
    """Sums over ranks of vectors [n * size], of which each rank gets its own [n]; one grouped launch per dtype."""
    if axis.size == 1:
        return list(vectors)
    return _grouped(
        vectors, lambda group: _ops.reduce_scatter_tensor_coalesced(group, "sum", axis.size, axis.group)
    )


def all_reduce(tensors: Sequence[Tensor], mesh: Mesh | Axis, op: str = "sum") -> list[Tensor]:
    """Each tensor reduced over all ranks of a mesh, or along one axis.

    Args:
      tensors: Of one shape per position on all ranks.
      mesh: Over which ranks.
      op: ``sum``, ``max`` or ``min``.
    """
    axes = mesh.wide if isinstance(mesh, Mesh) else (mesh,) * (mesh.size > 1)
    out = list(tensors)
    for axis in axes:
        out = [_ops.wait_tensor(_ops.all_reduce(t.contiguous(), op, axis.group)) for t in out]
    return out


def _grouped(tensors: Sequence[Tensor], call: object) -> list[Tensor]:
    """Call once per dtype: one launch holds one dtype. Results in the order of the arguments."""
    by_dtype: dict[torch.dtype, list[int]] = {}
    for position, tensor in enumerate(tensors):
        by_dtype.setdefault(tensor.dtype, []).append(position)
    out: dict[int, Tensor] = {}
    for positions in by_dtype.values():
        results = call([tensors[i].contiguous() for i in positions])  # type: ignore[operator]
        out.update(zip(positions, map(_ops.wait_tensor, results), strict=True))
    return [out[i] for i in range(len(tensors))]


def broadcast(tensor: Tensor, mesh: Mesh) -> Tensor:
    """The value of rank 0, as a new tensor; outside of graphs."""
    out = tensor.detach().clone(memory_format=torch.contiguous_format)
    if mesh.size > 1:
        torch.distributed.broadcast(out, 0)
    return out
