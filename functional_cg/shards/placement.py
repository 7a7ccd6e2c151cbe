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

from .mesh import Axis, Mesh

__all__ = ["Holders", "Placement", "Reading"]


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
class Holders:
    """The ranks of a pipeline that hold a leaf; on the others it has no elements.

    Attributes:
      stages: The axis of the pipeline.
      ranks: Positions on it, in order.
      group: Name of their process group if there are several; empty for one.
    """

    stages: Axis
    ranks: tuple[int, ...]
    group: str = ""

    @property
    def here(self) -> bool:
        """Whether this rank is one of them."""
        return self.stages.rank in self.ranks

    @property
    def first(self) -> bool:
        """Whether this rank is the first of them, which answers for the leaf."""
        return self.stages.rank == self.ranks[0]

    @property
    def axis(self) -> Axis:
        """Themselves as an axis, for collectives between them."""
        place = self.ranks.index(self.stages.rank) if self.here else -1
        return Axis(self.stages.name, len(self.ranks), place, self.group)

    def __str__(self) -> str:
        ranks = f"rank{'s' * (len(self.ranks) > 1)} {' and '.join(map(str, self.ranks))}"
        return f"held by {ranks} of {self.stages.name}={self.stages.size}"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a leaf's elements lie.

    Attributes:
      mesh: The ranks.
      shape: Logical shape, the same on all ranks.
      sharded: Whether the ranks that hold it hold a shard each, rather than the whole leaf.
      reading: How a loss reads it; the default for a leaf that is not a parameter.
      at_rest: Whether the leaf is outside a step, where an op must not start a collective, since one rank may run it
        alone.
      holders: The ranks of a pipeline that hold it; None if all do.
      stacked: Whether the leaf is the stack of the ranks' own pieces, along its first dimension: a step gets the piece.
    """

    mesh: Mesh
    shape: tuple[int, ...]
    sharded: bool
    reading: Reading = field(default=Reading(), compare=False)
    at_rest: bool = field(default=False, compare=False)
    holders: Holders | None = None
    stacked: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def partial(self) -> bool:
        """Whether a rank may hold less than the whole leaf: it then holds a vector of elements."""
        return self.sharded or self.holders is not None

    @property
    def here(self) -> bool:
        """Whether this rank holds any of it."""
        return self.holders is None or self.holders.here

    @property
    def pieces(self) -> int:
        """Number of parts that the leaf is cut into."""
        return self.mesh.shards.size if self.sharded else 1

    @property
    def length(self) -> int:
        """Number of elements of this rank's part, padding included."""
        return -(-self.numel // self.pieces) if self.here else 0

    @property
    def start(self) -> int:
        """Index in the whole leaf of the first element of this rank's part."""
        return self.mesh.shards.rank * self.length if self.sharded else 0

    @property
    def elements(self) -> int:
        """Number of elements of this rank's part, without padding."""
        return max(0, min(self.length, self.numel - self.start))

    @property
    def padded(self) -> bool:
        return self.here and self.length * self.pieces != self.numel

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the tensor that a rank holds."""
        if self.stacked:
            return self.shape[1:]
        return (self.length,) if self.partial else self.shape

    @property
    def split(self) -> Placement:
        """The same leaf, with a shard on each of the ranks that hold it."""
        return replace(self, sharded=True)

    def pad(self, whole: Tensor) -> Tensor:
        """Flatten a leaf [*shape] to a vector [length * pieces], with zeros at its end."""
        flat = whole.reshape(-1)
        missing = self.length * self.pieces - self.numel if self.here else 0
        return torch.cat([flat, flat.new_zeros(missing)]) if missing else flat

    def unpad(self, vector: Tensor) -> Tensor:
        """Turn a padded vector [length * pieces] back into the leaf [*shape]."""
        return (vector[: self.numel] if self.padded else vector).view(self.shape)

    def own(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a leaf [*shape]: a vector [length], or a piece [*shape[1:]]."""
        part = self.pad(whole).narrow(0, self.start, self.length)
        return part.view(self.local_shape) if self.stacked else part

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
        how = "stacked" if self.stacked else "sharded" if self.sharded else "replicated"
        over = f"{how} over {self.mesh}"
        if self.holders is None:
            return over
        axes = ", ".join(f"{axis.name}={axis.size}" for axis in self.mesh.wide)
        return str(self.holders) + (f", {over.partition(' ')[0]} over {axes}" if axes else "")
