"""Process groups of a pipeline: one for each pair that sends, and one for each set of ranks that holds a leaf."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from types import MappingProxyType

import torch.distributed as dist

from ..shards.mesh import Axis, Mesh

__all__ = ["Links"]


@dataclass(frozen=True)
class Links:
    """Where the stage axis lies among those of a mesh.

    A pair that sends has a group of its own, since a communicator is one queue: what one pair waits for would keep what
    another one sends. Ranks that hold a leaf sum its gradients, in the order of the program, which is one on all of
    them. So all stages together do it in the group of their axis, and each smaller set has one group.

    Attributes:
      mesh: All ranks.
      place: Number of the stage axis.
      known: Names of the groups of sets, made so far; empty where this rank is in none.
    """

    mesh: Mesh
    place: int
    known: dict[tuple[int, ...], str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def stages(self) -> Axis:
        """The axis of the stages."""
        return self.mesh.axes[self.place]

    def of_stages(self) -> list[int]:
        """Return the position of each rank on the stage axis."""
        return [at[self.place] for at in self._places()]

    def for_pairs(self, pairs: Iterable[tuple[int, int]]) -> Mapping[tuple[int, ...], str]:
        """Make a process group for each pair of positions (from, to); return the names of this rank's groups.

        All ranks make all groups, in one order, as torch asks; of sets, too.
        """
        made = {pair: self._made(pair) for pair in pairs}
        return MappingProxyType({pair: name for pair, name in made.items() if name})

    def for_sets(self, sets: Iterable[tuple[int, ...]]) -> Mapping[tuple[int, ...], str]:
        """Return the names of this rank's groups for sets of positions; make those that are not there."""
        whole = tuple(range(self.stages.size))
        found = {}
        for some in sets:
            if some != whole and some not in self.known:
                self.known[some] = self._made(some)
            found[some] = self.stages.group if some == whole else self.known[some]
        return MappingProxyType({some: name for some, name in found.items() if name})

    def _made(self, some: tuple[int, ...]) -> str:
        """Make the groups of some positions, beside each other; return the name of this rank's, or an empty text."""
        found = ""
        places = self._places()
        here = tuple(axis.rank for axis in self.mesh.axes)
        for beside in sorted({self._beside(at) for at in places}):
            members = [
                rank
                for rank, at in enumerate(places)
                if at[self.place] in some and self._beside(at) == beside
            ]
            group = dist.new_group(members, timeout=timedelta(seconds=self.mesh.ranks.timeout))
            if here[self.place] in some and self._beside(here) == beside:
                found = group.group_name
        return found

    def _places(self) -> list[tuple[int, ...]]:
        return list(itertools.product(*(range(axis.size) for axis in self.mesh.axes)))

    def _beside(self, at: tuple[int, ...]) -> tuple[int, ...]:
        """Return a position without that on the stage axis."""
        return at[: self.place] + at[self.place + 1 :]
