"""A JAX-style functional training step for PyTorch, captured once and replayed, safe by construction.

A step is a function ``fn(state, *inputs) -> (state, metrics)``. Its first call traces, checks and captures it; each
later call launches the captured work at once. ``help(fcg.graph_step)`` shows a whole step.

Steps:

  graph_step        capture a training step; the state passed in is taken over, the new one returned
  graph_fn          capture a function that changes no state: evaluation, sampling, acting
  GraphStep, GraphFn   what they make: ``explain()``, ``profile()``, ``find_nonfinite()``, ``eager()``
  Lowered, Captured    a step that was traced and checked for one layout; and then captured
  prefetch          copy the next batches to the step's device while it runs
  bucket, pack      pad batches of any length to a few sizes; pack sequences into one row of fixed length
  record            record the last calls, to go back to any of them and see where it went wrong

States:

  TrainState        parameters, optimizer state, buffers, key and step count
  place             copy any pytree into a state
  fork, snapshot    copy a state into an independent one; to ordinary tensors
  sleep, wake       send a state's memory on the device away between phases; bring it back at the same addresses
  save, load        write a state to a safetensors file; read a file or folder, or a part of it, into a state or module
  state_dict, load_state_dict   copy a state to the host, under dotted names; write such a dict into a state
  checkpoints, Checkpoints   a folder of complete checkpoints, sharded, written beside the training

Inside of a step:

  value_and_grad, grad   the value of a function and its gradient; the gradient alone
  microbatches      average gradients over slices of the batch
  from_module       an ``nn.Module`` as a pure function, with its parameters and buffers
  remat             recompute in the backward pass instead of keeping values
  cond              select between two branches on the device
  scan              loop over the first dimension of a tensor
  sweep             train many models at once with a step of one
  tap, debug_print  record a value, to be read after any call; print values at each call
  statistics, alarm   numbers by module: outputs, gradients, updates; a warning when a condition turns true
  LossScale         a dynamic loss scale for float16

Modules:

  optim             optimizers, schedules, clipping
  random            random numbers from explicit keys
  nn                modules as functions, memory-efficient cross-entropy, fp8
  tree              pytrees: ``map``, ``at``, ``flatten``
  precision         dtype policies, loss scaling, stochastic rounding
  sharding          ZeRO and pipelines over the ranks of a mesh

Imported on first use: ``fcg.testing`` (assertions), ``fcg.report`` (plots).

Errors, one class per mistake; ``help(functional_cg.errors)`` lists them:

  AliasError, AsleepError, BakedValueError, BusyError, CaptureError, ClosedError, DonatedStateError,
  ForeignTensorError, FunctionalCGError, HostSyncError, ImplicitRandomnessError, LayoutError, MiscompileError,
  RankError, ReadOnlyError, ResultError, SideEffectError, StreamError
"""

from __future__ import annotations

import typing as _typing

from . import nn as nn
from . import optim as optim
from . import precision as precision
from . import random as random
from . import sharding as sharding
from . import tree as tree
from .buckets import bucket as bucket
from .buckets import pack as pack
from .checkpoint import Checkpoints as Checkpoints
from .checkpoint import checkpoints as checkpoints
from .checkpoint import load as load
from .checkpoint import load_state_dict as load_state_dict
from .checkpoint import save as save
from .checkpoint import state_dict as state_dict
from .errors import AliasError as AliasError
from .errors import AsleepError as AsleepError
from .errors import BakedValueError as BakedValueError
from .errors import BusyError as BusyError
from .errors import CaptureError as CaptureError
from .errors import ClosedError as ClosedError
from .errors import DonatedStateError as DonatedStateError
from .errors import ForeignTensorError as ForeignTensorError
from .errors import FunctionalCGError as FunctionalCGError
from .errors import HostSyncError as HostSyncError
from .errors import ImplicitRandomnessError as ImplicitRandomnessError
from .errors import LayoutError as LayoutError
from .errors import MiscompileError as MiscompileError
from .errors import RankError as RankError
from .errors import ReadOnlyError as ReadOnlyError
from .errors import ResultError as ResultError
from .errors import SideEffectError as SideEffectError
from .errors import StreamError as StreamError
from .graph_step import GraphFn as GraphFn
from .graph_step import GraphStep as GraphStep
from .graph_step import graph_fn as graph_fn
from .graph_step import graph_step as graph_step
from .module_statistics import statistics as statistics
from .names import answer_calls as _answer_calls
from .names import listed as _listed
from .names import missing as _missing
from .nn import from_module as from_module
from .precision import LossScale as LossScale
from .prefetch import prefetch as prefetch
from .recorder import record as record
from .state.handle import place as place
from .state.handle import snapshot as snapshot
from .state.lifecycle import fork as fork
from .state.lifecycle import sleep as sleep
from .state.lifecycle import wake as wake
from .step.lowered import Captured as Captured
from .step.lowered import Lowered as Lowered
from .train_state import TrainState as TrainState
from .transforms.alarms import alarm as alarm
from .transforms.autodiff import grad as grad
from .transforms.autodiff import value_and_grad as value_and_grad
from .transforms.control import cond as cond
from .transforms.control import scan as scan
from .transforms.debug import debug_print as debug_print
from .transforms.microbatches import microbatches as microbatches
from .transforms.remat import remat as remat
from .transforms.sweep import sweep as sweep
from .transforms.taps import tap as tap

__version__ = "0.2.0"


if _typing.TYPE_CHECKING:
    from . import report as report
    from . import testing as testing
else:  # a type checker would let any name pass
    __getattr__, __dir__ = _missing(__name__), _listed(__name__)
    _answer_calls()
