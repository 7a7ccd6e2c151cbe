"""Sharded training: ZeRO as placements on a mesh, with collectives inside the captured step.

All ranks run one program, launched by ``torchrun``; each rank captures a graph that includes its collectives. Without a
mesh, or with one rank, everything here is the identity, so the same source runs on one GPU.
"""

import typing as _typing

from ..names import no_such_name as _no_such_name
from ..shards.mesh import Mesh
from .launch import mesh
from .values import fold_in, gather, local, mean, state_dict, sum
from .zero import Zero, zero

__all__ = ["Mesh", "Zero", "fold_in", "gather", "local", "mean", "mesh", "state_dict", "sum", "zero"]


if not _typing.TYPE_CHECKING:  # a type checker would let any name pass

    def __getattr__(name: str) -> object:
        raise _no_such_name(__name__, name, __all__)
