"""A mesh as a value: the axes that the ranks of a run are laid out on, and this rank's position."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

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
    """

    axes: tuple[Axis, ...]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"), compare=False)
    captures: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet, compare=False, repr=False)
    ranks: Any = field(default=None, compare=False, repr=False)
    watchdog: Any = field(default=None, compare=False, repr=False)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(axis.size for axis in self.axes)

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
        return ", ".join(f"{axis.name}={axis.size}" for axis in self.axes)
