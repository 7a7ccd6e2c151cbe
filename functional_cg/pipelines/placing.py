"""The sharding of a pipeline's state: each rank holds the parameters that its stages read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import tree as pytree
from ..errors import LayoutError
from ..shards.collectives import broadcast
from ..shards.mesh import Mesh
from ..shards.placement import Holders, Placement, Reading
from ..shards.tensor import Sharded

__all__ = ["Staged", "holders_of"]


@dataclass(frozen=True)
class Staged:
    """Where the parameters of a loss lie in a pipeline; made by :meth:`Pipeline.zero`.

    Attributes:
      mesh: The ranks that hold the same stages as this one.
      stage: Of ZeRO over these ranks: 1, 2 or 3.
      reading: How a loss reads a leaf.
      holders: Which stages hold each parameter, in the order of the tree; None on a single stage rank.
    """

    mesh: Mesh
    stage: int
    reading: Reading
    holders: tuple[Holders | None, ...]

    def __str__(self) -> str:
        held = "\n".join(f"  {number}  {holders}" for number, holders in enumerate(self.holders))
        return f"zero(stage={self.stage}, {self.reading}) in a pipeline on {self.mesh}\n{held}"

    def planned(self, params: Any) -> Any:
        """Return the parameters as this rank will hold them, on the meta device."""
        flat, treedef = pytree.flatten(params)
        if len(flat) != len(self.holders):
            raise LayoutError.of(
                "",
                "TrainState.create: `params` are not those that the pipeline was planned with.",
                rows=[f"params  expected {len(self.holders)} leaves   got {len(flat)}"],
                fix="`sharding=pipe.zero(loss_fn, params, batch)`, with these parameters.",
            )
        return pytree.unflatten(treedef, list(map(self._planned, flat, self.holders)))

    def _planned(self, leaf: Tensor, holders: Holders | None) -> Tensor:
        meta = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
        alone = holders is None and self.mesh.size == 1 and self.reading.param_dtype is None
        if alone or not (leaf.is_floating_point() or leaf.is_complex()):
            return meta
        sharded = self.stage == 3 and self.mesh.shards.size > 1
        placement = Placement(self.mesh, tuple(leaf.shape), sharded, self.reading, holders=holders)
        return Sharded(meta.new_empty(placement.local_shape), placement)

    def agreed(self, leaf: Any) -> Any:
        """Return rank 0's value of a leaf, on this rank's device."""
        return broadcast(leaf.to(self.mesh.device), self.mesh) if isinstance(leaf, Tensor) else leaf

    def moved(self, placed: Any) -> Any:
        """Return the parameters as the optimizer's ``init`` sees them: shards over the ranks of a stage."""
        return pytree.map(_split, placed)

    def accumulators(self, placed: Any) -> Any:
        """Return zeros to accumulate gradients over several calls: shards from stage 2 on."""
        return pytree.map(torch.zeros_like, placed if self.stage == 1 else self.moved(placed))


def _split(leaf: Any) -> Any:
    if not isinstance(leaf, Sharded) or leaf.placement.sharded or leaf.placement.mesh.shards.size == 1:
        return leaf
    split = leaf.placement.split
    return Sharded(split.own(leaf.local), split)


def holders_of(
    mesh: Mesh, readers: Sequence[tuple[int, ...]], groups: Mapping[tuple[int, ...], str]
) -> tuple[Holders | None, ...]:
    """Return who holds each parameter: the stage ranks that read it."""
    stages = mesh.stages
    if stages is None or stages.size == 1:
        return (None,) * len(readers)
    return tuple(Holders(stages, ranks, groups.get(ranks, "")) for ranks in readers)
