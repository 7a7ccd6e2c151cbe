"""A mesh as a value: the axes that the ranks of a run are laid out on, and this rank's position."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from .groups import Captures

__all__ = ["Axis", "Mesh"]


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a mesh.

    Attributes:
      name: ``data``, ``replica``, ``shard``.
      size: Number of ranks along it.
      rank: This rank's position on it.
      group: Name of the process group along it; empty for a single rank.
    """

    name: str
    size: int
    rank: int
    group: str


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Mesh:
    """Ranks laid out on one or two axes. Leaves are sharded over the last axis and replicated over the others.

    Made by :func:`functional_cg.sharding.mesh`. Meshes with equal axes are equal.

    Attributes:
      axes: The axes, outermost first.
      device: Where this rank's leaves live.
      captures: Holders of graphs with collectives of this mesh; closed before its process groups are.
      ranks: How ranks synchronize outside graphs; None for a single rank.
      watchdog: Ends the process if a step waits for other ranks forever; None for a single rank.
      stages: The axis of a pipeline, whose ranks hold other leaves: these axes are those of the ranks that hold the
        same ones. None without a pipeline.
    """

    axes: tuple[Axis, ...]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"), compare=False)
    captures: Captures = field(default_factory=Captures, compare=False, repr=False)
    ranks: Any = field(default=None, compare=False, repr=False)
    watchdog: Any = field(default=None, compare=False, repr=False)
    stages: Axis | None = None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(axis.size for axis in self.axes)

    @property
    def everyone(self) -> int:
        """Number of ranks that take part in a step: on these axes, in all stages of a pipeline."""
        return self.size * (1 if self.stages is None else self.stages.size)

    @property
    def number(self) -> int:
        """This rank's number among all that take part; 0 for the one that speaks for them."""
        if self.stages is None:
            return self.rank
        return 0 if self.ranks is None else int(self.ranks.rank)

    @property
    def rank(self) -> int:
        """This rank's number; the last axis varies fastest."""
        number = 0
        for axis in self.axes:
            number = number * axis.size + axis.rank
        return number

    @property
    def shards(self) -> Axis:
        """The axis over which leaves are sharded."""
        return self.axes[-1]

    @property
    def wide(self) -> tuple[Axis, ...]:
        """The axes with more than one rank, which a collective has to run over."""
        return tuple(axis for axis in self.axes if axis.size > 1)

    def __str__(self) -> str:
        axes = self.axes if self.stages is None else (self.stages, *self.axes)
        return ", ".join(f"{axis.name}={axis.size}" for axis in axes)
