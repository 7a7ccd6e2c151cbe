"""A JAX-style functional training step for PyTorch, captured once and replayed, safe by construction."""

from __future__ import annotations

from . import nn, optim, precision, random, sharding, tree
from .buckets import bucket
from .checkpoint import load, load_state_dict, save, state_dict
from .errors import (
    AliasError,
    BakedValueError,
    BusyError,
    CaptureError,
    ClosedError,
    DonatedStateError,
    ForeignTensorError,
    FunctionalCGError,
    HostSyncError,
    ImplicitRandomnessError,
    LayoutError,
    MiscompileError,
    RankError,
    ReadOnlyError,
    ResultError,
    SideEffectError,
    StreamError,
)
from .graph_step import GraphFn, GraphStep, graph_fn, graph_step
from .nn import from_module
from .precision import LossScale
from .prefetch import prefetch
from .state.handle import fork, place, snapshot
from .step.lowered import Captured, Lowered
from .train_state import TrainState
from .transforms.autodiff import grad, microbatches, value_and_grad
from .transforms.control import cond, scan
from .transforms.debug import debug_print
from .transforms.remat import remat
from .transforms.taps import tap

__version__ = "0.1.0"

__all__ = [
    "AliasError",
    "BakedValueError",
    "BusyError",
    "CaptureError",
    "Captured",
    "ClosedError",
    "DonatedStateError",
    "ForeignTensorError",
    "FunctionalCGError",
    "GraphFn",
    "GraphStep",
    "HostSyncError",
    "ImplicitRandomnessError",
    "LayoutError",
    "LossScale",
    "Lowered",
    "MiscompileError",
    "RankError",
    "ReadOnlyError",
    "ResultError",
    "SideEffectError",
    "StreamError",
    "TrainState",
    "bucket",
    "cond",
    "debug_print",
    "fork",
    "from_module",
    "grad",
    "graph_fn",
    "graph_step",
    "load",
    "load_state_dict",
    "microbatches",
    "nn",
    "optim",
    "place",
    "precision",
    "prefetch",
    "random",
    "remat",
    "save",
    "scan",
    "sharding",
    "snapshot",
    "state_dict",
    "tap",
    "tree",
    "value_and_grad",
]
