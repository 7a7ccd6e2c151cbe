"""Placements: where the elements of a leaf lie on a mesh, and how a loss reads it.

A sharded leaf is flattened in logical order and cut into equal pieces, one per rank of the mesh's last axis. The last
pieces are padded with zeros, down to pieces of nothing but padding: any size can be cut over any number of ranks, and
all ranks run one program.
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
    """How a loss reads a leaf, and what becomes of its gradient.

    Attributes:
      bucket_bytes: Leaves that are read one after the other are gathered together up to this size, and their
        gradients reduced together.
      prefetch: How many groups ahead of its use a leaf is gathered.
      param_dtype: Dtype that the loss sees; None for the leaf's own.
      reduce_dtype: Dtype in which gradients are summed; None for the one that they come in.
      gradient: Whether each rank keeps the whole gradient or its shard.
      reshard: Whether a gathered leaf is let go after use and gathered again in the backward.
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
      sharded: Whether a rank holds a shard; else it holds all of it.
      reading: How a loss reads it; None for a leaf that is no parameter.
      at_rest: Whether the leaf is looked at outside of a step, where an op of one rank alone starts no collective.
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
        """Elements of one shard, padding included."""
        return -(-self.numel // self.mesh.shards.size)

    @property
    def start(self) -> int:
        """Number of the first element of this rank's shard, in the whole leaf."""
        return self.mesh.shards.rank * self.length

    @property
    def elements(self) -> int:
        """Elements of this rank's shard, without padding."""
        return max(0, min(self.length, self.numel - self.start))

    @property
    def padded(self) -> bool:
        return self.length * self.mesh.shards.size != self.numel

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of what a rank holds."""
        return (self.length,) if self.sharded else self.shape

    def without_reading(self) -> Placement:
        """The same place, for a leaf that is no parameter."""
        return replace(self, reading=None)

    def pad(self, whole: Tensor) -> Tensor:
        """A leaf [*shape] as a vector [length * ranks], with zeros at its end."""
        flat = whole.reshape(-1)
        missing = self.length * self.mesh.shards.size - self.numel
        return torch.cat([flat, flat.new_zeros(missing)]) if missing else flat

    def unpad(self, vector: Tensor) -> Tensor:
        """A vector [length * ranks] as the leaf [*shape]."""
        return (vector[: self.numel] if self.padded else vector).view(self.shape)

    def own(self, whole: Tensor) -> Tensor:
        """This rank's shard of a leaf [*shape]: a vector [length]."""
        return self.pad(whole).narrow(0, self.start, self.length)

    def masked(self, local: Tensor, fill: float = 0.0) -> Tensor:
        """A shard with another number in place of its padding, for reductions."""
        if not (self.sharded and self.padded):
            return local
        # A number in a call on the device: what is copied there from the host cannot be captured.
        start = torch.full((), self.start, device=local.device)
        place = torch.arange(self.length, device=local.device) + start
        return torch.where(
            place < self.numel, local, torch.full((), fill, dtype=local.dtype, device=local.device)
        )

    def describe(self) -> str:
        """For specs: ``sharded over data=4``."""
        return f"{'sharded' if self.sharded else 'replicated'} over {self.mesh}"
