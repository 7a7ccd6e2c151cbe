"""Sharded training: ZeRO as placements on a mesh, collectives inside of the captured step.

One program on all ranks: launched by ``torchrun``, each rank captures one graph with its collectives in it. Without a
mesh, or with one rank, everything here is the identity, and the same source runs on one GPU.
"""

from ..shards.mesh import Mesh
from .launch import mesh
from .values import fold_in, gather, local, mean, state_dict, sum
from .zero import Zero, zero

__all__ = ["Mesh", "Zero", "fold_in", "gather", "local", "mean", "mesh", "state_dict", "sum", "zero"]
