"""Sharded training: ZeRO as placements on a mesh, with collectives inside the captured step.

All ranks run one program, launched by ``torchrun``; each rank captures a graph that includes its collectives. Without a
mesh, or with one rank, everything here is the identity, so the same source runs on one GPU.
"""

from ..shards.mesh import Mesh
from .launch import mesh
from .values import fold_in, gather, local, mean, state_dict, sum
from .zero import Zero, zero

__all__ = ["Mesh", "Zero", "fold_in", "gather", "local", "mean", "mesh", "state_dict", "sum", "zero"]
