"""Process groups between ranks of a pipeline: one for each pair that sends, one for each set that holds a leaf."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType

import torch.distributed as dist

from ..shards.mesh import Mesh

__all__ = ["Links"]


@dataclass(frozen=True)
class Links:
    """Where the stage axis lies among those of a mesh.

    Attributes:
      mesh: All ranks.
      place: Number of the stage axis.
    """

    mesh: Mesh
    place: int

    def of_stages(self) -> list[int]:
        """Return the position of each rank on the stage axis."""
        return [at[self.place] for at in self._places()]

    def made(self, sets: Iterable[tuple[int, ...]]) -> Mapping[tuple[int, ...], str]:
        """Make a process group for each set of positions on the stage axis; return the names of this rank's groups.

        All ranks make all groups, in one order, as torch asks.
        """
        found: dict[tuple[int, ...], str] = {}
        places = self._places()
        here = tuple(axis.rank for axis in self.mesh.axes)
        for some in sets:
            for beside in sorted({self._beside(at) for at in places}):
                members = [
                    rank
                    for rank, at in enumerate(places)
                    if at[self.place] in some and self._beside(at) == beside
                ]
                group = dist.new_group(members, timeout=timedelta(seconds=self.mesh.ranks.timeout))
                if here[self.place] in some and self._beside(here) == beside:
                    found[some] = group.group_name
        return MappingProxyType(found)

    def _places(self) -> list[tuple[int, ...]]:
        return list(itertools.product(*(range(axis.size) for axis in self.mesh.axes)))

    def _beside(self, at: tuple[int, ...]) -> tuple[int, ...]:
        """Return a position without that on the stage axis."""
        return at[: self.place] + at[self.place + 1 :]
