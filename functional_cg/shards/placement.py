"""Placements: where the elements of a leaf lie on a mesh, and how a loss reads it.

A sharded leaf is flattened in logical order and cut into equal pieces, one per rank of the mesh's last axis. The last
pieces are padded with zeros, and may be all padding. So a leaf of any size can be sharded over any number of ranks, and
all ranks run the same program.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from .mesh import Mesh

__all__ = ["Placement", "Reading"]


@dataclass(frozen=True, slots=True)
class Reading:
    """How a loss reads a leaf, and how its gradient is reduced.

    Attributes:
      bucket_bytes: Size of a bucket: leaves read consecutively are gathered together up to this size, and their
        gradients reduced together.
      prefetch: How many buckets ahead of its use a leaf is gathered.
      param_dtype: Dtype that the loss sees; None for the leaf's own.
      reduce_dtype: Dtype in which gradients are summed; None for the gradients' own.
      gradient: Whether each rank keeps the whole gradient or its shard.
      reshard: Whether a gathered leaf is freed after use and gathered again in the backward.
    """

    bucket_bytes: int = 0
    prefetch: int = 0
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    gradient: Literal["whole", "shard"] = "shard"
    reshard: bool = True


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a leaf's elements lie.

    Attributes:
      mesh: The ranks.
      shape: Logical shape, the same on all ranks.
      sharded: Whether a rank holds a shard rather than the whole leaf.
      reading: How a loss reads it; None for a leaf that is not a parameter.
      at_rest: Whether the leaf is outside a step, where an op must not start a collective, since one rank may run it
        alone.
    """

    mesh: Mesh
    shape: tuple[int, ...]
    sharded: bool
    reading: Reading | None = field(default=None, compare=False)
    at_rest: bool = field(default=False, compare=False)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def length(self) -> int:
        """Number of elements of a shard, padding included."""
        return -(-self.numel // self.mesh.shards.size)

    @property
    def start(self) -> int:
        """Index in the whole leaf of the first element of this rank's shard."""
        return self.mesh.shards.rank * self.length

    @property
    def elements(self) -> int:
        """Number of elements of this rank's shard, without padding."""
        return max(0, min(self.length, self.numel - self.start))

    @property
    def padded(self) -> bool:
        return self.length * self.mesh.shards.size != self.numel

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the tensor that a rank holds."""
        return (self.length,) if self.sharded else self.shape

    def without_reading(self) -> Placement:
        """Return the same placement for a leaf that is not a parameter."""
        return replace(self, reading=None)

    def pad(self, whole: Tensor) -> Tensor:
        """Flatten a leaf [*shape] to a vector [length * ranks], with zeros at its end."""
        flat = whole.reshape(-1)
        missing = self.length * self.mesh.shards.size - self.numel
        return torch.cat([flat, flat.new_zeros(missing)]) if missing else flat

    def unpad(self, vector: Tensor) -> Tensor:
        """Turn a padded vector [length * ranks] back into the leaf [*shape]."""
        return (vector[: self.numel] if self.padded else vector).view(self.shape)

    def own(self, whole: Tensor) -> Tensor:
        """Return this rank's shard of a leaf [*shape]: a vector [length]."""
        return self.pad(whole).narrow(0, self.start, self.length)

    def masked(self, local: Tensor, fill: float = 0.0) -> Tensor:
        """Return a shard with its padding replaced by ``fill``, for reductions."""
        if not (self.sharded and self.padded):
            return local
        # `full` makes the number on the device: a copy from the host cannot be captured.
        start = torch.full((), self.start, device=local.device)
        place = torch.arange(self.length, device=local.device) + start
        return torch.where(
            place < self.numel, local, torch.full((), fill, dtype=local.dtype, device=local.device)
        )

    def describe(self) -> str:
        """Describe the placement, for specs: ``sharded over data=4``."""
        return f"{'sharded' if self.sharded else 'replicated'} over {self.mesh}"
