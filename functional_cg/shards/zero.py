"""ZeRO as placements: whether a rank holds shards of moments, gradients and parameters.

Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models".
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor

from .. import tree as pytree
from ..errors import LayoutError
from .collectives import broadcast
from .mesh import Mesh
from .placement import Holders, Placement, Reading
from .tensor import Sharded

__all__ = ["Zero"]


@dataclass(frozen=True)
class Zero:
    """A sharding of states over a mesh; made by ``fcg.sharding.zero``, which documents the options, or ``pipe.zero``.

    Attributes:
      mesh: The ranks.
      stage: 1, 2 or 3.
      bucket_bytes: Bytes of whole leaves that share a launch.
      prefetch: How many buckets ahead of its use a leaf is gathered.
      param_dtype: Dtype that a loss sees; None for the parameters' own.
      reduce_dtype: Dtype in which gradients are summed; None for the gradients' own.
      reshard: Whether the backward gathers leaves again.
      holders: Which stages of a pipeline hold each parameter, in the order of the tree, None if all do; empty without a
        pipeline.
    """

    mesh: Mesh
    stage: Literal[1, 2, 3] = 3
    bucket_bytes: int = 32 * 2**20
    prefetch: int = 1
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    reshard: bool = True
    holders: tuple[Holders | None, ...] = ()

    def __str__(self) -> str:
        """Describe the sharding in text that is equal on all ranks."""
        names = [field.name for field in fields(self) if field.name not in ("mesh", "holders")]
        options = ", ".join(f"{name}={getattr(self, name)}" for name in names)
        held = (f"\n  {number}  {holders}" for number, holders in enumerate(self.holders))
        return f"zero({options}) on {self.mesh}{''.join(held)}"

    def planned(self, params: Any) -> Any:
        """Return the parameters as this rank will hold them, on the meta device."""
        flat, treedef = pytree.flatten(params)
        if self.holders and len(flat) != len(self.holders):
            raise LayoutError.of(
                "",
                "TrainState.create: `params` are not those that the pipeline was planned with.",
                rows=[f"params  expected {len(self.holders)} leaves   got {len(flat)}"],
                fix="`sharding=pipe.zero(loss_fn, params, batch)`, with these parameters.",
            )
        return pytree.unflatten(treedef, list(map(self._planned, flat, self.holders or [None] * len(flat))))

    def _planned(self, leaf: Tensor, holders: Holders | None) -> Tensor:
        meta = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
        alone = holders is None and self.mesh.size == 1 and self.param_dtype is None
        if alone or not (leaf.is_floating_point() or leaf.is_complex()):
            return meta
        reading = Reading(
            self.bucket_bytes,
            self.prefetch,
            self.param_dtype,
            self.reduce_dtype,
            "whole" if self.stage == 1 else "shard",
            self.reshard,
        )
        sharded = self.stage == 3 and self.mesh.shards.size > 1
        placement = Placement(self.mesh, tuple(leaf.shape), sharded, reading, holders=holders)
        return Sharded(meta.new_empty(placement.local_shape), placement)

    def agreed(self, leaf: Any) -> Any:
        """Return rank 0's value of a leaf, on this rank's device."""
        if not isinstance(leaf, Tensor):
            return leaf
        # torch's DTensor shards along a dimension; placements here shard the flattened leaf.
        # Told by its method: to import the class takes longer than the whole package.
        full = leaf.full_tensor() if hasattr(leaf, "full_tensor") else leaf
        return broadcast(full.to(self.mesh.device), self.mesh)

    def moved(self, placed: Any) -> Any:
        """Return the parameters as the optimizer's ``init`` sees them: shards at every stage."""
        return pytree.map(_shard, placed)

    def accumulators(self, placed: Any) -> Any:
        """Return zeros to accumulate gradients over several calls: shards from stage 2 on."""
        return pytree.map(torch.zeros_like, placed if self.stage == 1 else self.moved(placed))


def _shard(leaf: Any) -> Any:
    if not isinstance(leaf, Sharded) or leaf.placement.sharded or leaf.placement.mesh.shards.size == 1:
        return leaf
    split = leaf.placement.split
    return Sharded(split.own(leaf.local), split)
