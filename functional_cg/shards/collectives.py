"""Collectives as pure functions that return new tensors; the only module that uses c10d's ops.

A trace records them. An axis of one rank has no process group: there, each is the identity, and no op is recorded.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
import torch.distributed
import torch.distributed._functional_collectives  # registers the ops for fake tensors
from torch import Tensor

from .mesh import Axis, Mesh

__all__ = [
    "ALL_REDUCE",
    "GATHER",
    "REDUCE_SCATTER",
    "WAIT",
    "all_gather",
    "all_reduce",
    "broadcast",
    "from_one",
    "is_collective",
    "reduce_scatter",
    "result_of",
]

_ops = torch.ops._c10d_functional
GATHER = _ops.all_gather_into_tensor_coalesced.default  # takes lists, so that several can share a launch
REDUCE_SCATTER = _ops.reduce_scatter_tensor_coalesced.default
ALL_REDUCE = _ops.all_reduce.default
WAIT = _ops.wait_tensor.default


# Dtypes that every backend sends and adds up; without adding up, any dtype can be sent as bytes.
_NUMBERS = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8}
)


def all_gather(shard: Tensor, axis: Axis) -> Tensor:
    """Gather a vector [n] from each rank into one vector [n * size], in rank order."""
    if axis.size == 1:
        return shard
    if shard.dtype not in _NUMBERS:
        return all_gather(_bytes(shard), axis).view(shard.dtype)
    return _wait(GATHER([shard.contiguous()], axis.size, axis.group)[0])


def reduce_scatter(vector: Tensor, axis: Axis) -> Tensor:
    """Sum a vector [n * size] over ranks; each rank gets its own piece [n] of the sum."""
    if axis.size == 1:
        return vector
    if vector.is_complex():
        return torch.view_as_complex(reduce_scatter(_pairs(vector), axis))
    return _wait(REDUCE_SCATTER([vector.contiguous()], "sum", axis.size, axis.group)[0])


def all_reduce(tensor: Tensor, where: Mesh | Axis, op: str = "sum") -> Tensor:
    """Reduce a tensor over all ranks of a mesh, or along one axis.

    Args:
      tensor: A tensor of the same shape on all ranks.
      where: The ranks to reduce over.
      op: ``sum``, ``max`` or ``min``.
    """
    if tensor.is_complex():
        return torch.view_as_complex(all_reduce(_pairs(tensor), where, op))
    for axis in where.wide if isinstance(where, Mesh) else (where,) * (where.size > 1):
        tensor = _wait(ALL_REDUCE(tensor.contiguous(), op, axis.group))
    return tensor


def is_collective(op: Any) -> bool:
    """Whether an op starts a collective, which runs beside later calls until it is waited for."""
    return op is not WAIT and op._schema.name.startswith("_c10d_functional::")


def result_of(op: Any) -> Literal["equal", "gathered", "own", ""]:
    """Return what ranks get of a collective along its group; "" for any other op.

    All get equal values, or the values of all gathered, or each gets its own part of a sum or an exchange.
    """
    if not is_collective(op):
        return ""
    if op is GATHER:
        return "gathered"
    name = op._schema.name.partition("::")[2]
    return "equal" if name.startswith(("all_reduce", "all_gather", "broadcast")) else "own"


def _wait(tensor: Tensor) -> Tensor:
    return cast("Tensor", WAIT(tensor))


def _pairs(tensor: Tensor) -> Tensor:
    """Return complex numbers [...] as real ones [..., 2]."""
    return torch.view_as_real(tensor.resolve_conj().contiguous())


def _bytes(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor as a vector of bytes."""
    return tensor.resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)


def from_one(tensor: Tensor, axis: Axis, *, here: bool) -> Tensor:
    """Return the value that one rank of an axis has, bit by bit, on all of them; others bring a tensor like it."""
    if axis.size == 1:
        return tensor
    raw = _bytes(tensor if here else torch.zeros_like(tensor, memory_format=torch.contiguous_format))
    return all_reduce(raw, axis).view(tensor.dtype).view(tensor.shape)


def broadcast(tensor: Tensor, mesh: Mesh) -> Tensor:
    """Return the value of rank 0 as a new tensor; not for use in graphs."""
    out = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    if mesh.everyone > 1:
        torch.distributed.broadcast(_bytes(out), 0)  # into the same memory
    return out
