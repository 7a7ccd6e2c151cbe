"""Process groups of a pipeline: one for each pair that sends, and one for each set of ranks that holds a leaf."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from types import MappingProxyType

import torch
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
        return [
            place for _, place in sorted((r, place) for row in self._rows() for place, r in enumerate(row))
        ]

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
        for row in self._rows():
            members = sorted(row[place] for place in some)
            group = dist.new_group(members, timeout=timedelta(seconds=self.mesh.ranks.timeout))
            found = group.group_name if self.mesh.rank in members else found
        return found

    def _rows(self) -> list[list[int]]:
        """Return the ranks of each pipeline, in the order of their stages."""
        sizes = [axis.size for axis in self.mesh.axes]
        ranks = torch.arange(self.mesh.size, device="cpu").view(sizes)
        return ranks.movedim(self.place, -1).reshape(-1, self.stages.size).tolist()
