"""Sharded training: ZeRO as placements on a mesh, with collectives inside the captured step.

All ranks run one program, launched by ``torchrun``; each rank captures a graph that includes its collectives. Without a
mesh, or with one rank, everything here is the identity, so the same source runs on one GPU.

Before the first step:

  mesh        lay out all ranks of a run
  zero        shard a state over a mesh: ``TrainState.create(..., sharding=zero(mesh, stage=3))``
  from_local  leaves of a rank's own pieces, for parallelism written by hand
  pipeline    lay out a loss in stages over an axis of a mesh, and micro-batches over a schedule

Inside of a step:

  mean, sum   of each leaf over all ranks
  fold_in     a key for this rank, so that ranks draw differently

Outside of a step:

  gather      whole leaves in place of shards; all ranks must call it
  local       this rank's shard of a leaf
  state_dict  all leaves, whole, in the host memory of rank 0

Types:

  Mesh        what ``mesh`` returns
  Pipeline    what ``pipeline`` returns: ``cut``, ``value_and_grad``, ``value``, ``zero``
  Zero        what ``zero`` returns
"""

import typing as _typing

from ..names import listed as _listed
from ..names import missing as _missing
from ..pipelines.pipeline import Pipeline as Pipeline
from ..shards.mesh import Mesh as Mesh
from ..shards.zero import Zero as Zero
from .launch import mesh as mesh
from .pipelining import pipeline as pipeline
from .values import fold_in as fold_in
from .values import from_local as from_local
from .values import gather as gather
from .values import local as local
from .values import mean as mean
from .values import state_dict as state_dict
from .values import sum as sum
from .zero import zero as zero

if not _typing.TYPE_CHECKING:  # a type checker would let any name pass
    __getattr__, __dir__ = _missing(__name__), _listed(__name__)
