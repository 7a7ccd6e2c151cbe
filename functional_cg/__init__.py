"""A JAX-style functional training step for PyTorch, captured once and replayed, safe by construction."""

from __future__ import annotations

from . import nn, optim, precision, random, sharding, tree
from .autodiff import grad, microbatches, value_and_grad
from .checkpoint import load, load_state_dict, save, state_dict
from .control import cond, scan
from .debug import debug_print
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
from .lowered import Captured, Lowered
from .nn import from_module
from .precision import LossScale
from .prefetch import prefetch
from .remat import remat
from .state import fork, place, snapshot
from .taps import tap
from .train_state import TrainState

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
