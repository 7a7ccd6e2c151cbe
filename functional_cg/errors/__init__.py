"""The errors of functional_cg: one class per mistake, one message template.

Every class also inherits from the builtin that a caller would expect. A message says what happened, shows the
key paths with *expected* and *got*, says why replay would go wrong, and gives one fix::

    LayoutError: `train_step`: called with another layout than it was captured for; `state` is unchanged.
      batch['x']  expected i64[8,1024]@cuda:0   got i64[8,960]@cuda:0
    A captured graph has fixed shapes.
    To fix: pad the last batch or drop it; to pay for one more graph, use `graph_step(max_captures=2)`.
    Docs: help(functional_cg.LayoutError)

What a call can know is refused before anything is launched. Whatever else goes wrong (a result that is refused, a rank
that is lost), the state passed in stays valid. The docstring of each class is its page of the manual:
``help(functional_cg.LayoutError)``.

Tracebacks show the frames of your own code and of the libraries that it calls, not those of torch and of this package,
also for exceptions of your function and of torch that pass through. The environment variable ``FCG_TRACEBACK=full``
shows them all. A debugger, ``pdb.pm()``, starts in your innermost frame.

States and inputs:

  LayoutError              a structure, shape, dtype or device differs from what the step was lowered for
  DonatedStateError        a state was used after a step took it over
  AsleepError              a state was used between `sleep` and `wake`
  AliasError               two leaves of a state share memory
  ReadOnlyError            a leaf or an argument was written to

What a graph cannot repeat:

  ForeignTensorError       the step reads a tensor that is no state, input or constant
  HostSyncError            the step needs the value of a tensor in Python
  BakedValueError          a Python value that the graph holds has changed
  ImplicitRandomnessError  random numbers come from a generator outside of the state
  SideEffectError          the step changes something in Python, or keeps a tensor
  StreamError              a stream was not joined, or an event comes from before the step

Tracing, compiling and running:

  CaptureError             the function failed, or does something that no graph can hold
  MiscompileError          the compiled step computes something else than the step
  RankError                the ranks of a mesh have diverged
  ClosedError              a step was used after ``close()``
  BusyError                a step or state was used in the middle of a call that uses it
  ResultError              a class among the metrics raised; the error holds the new state

All of them:

  FunctionalCGError        the base class
"""

from __future__ import annotations

import typing as _typing

from ..names import listed as _listed
from ..names import missing as _missing
from .kinds import AliasError as AliasError
from .kinds import AsleepError as AsleepError
from .kinds import BakedValueError as BakedValueError
from .kinds import BusyError as BusyError
from .kinds import CaptureError as CaptureError
from .kinds import ClosedError as ClosedError
from .kinds import DonatedStateError as DonatedStateError
from .kinds import ForeignTensorError as ForeignTensorError
from .kinds import FunctionalCGError as FunctionalCGError
from .kinds import HostSyncError as HostSyncError
from .kinds import ImplicitRandomnessError as ImplicitRandomnessError
from .kinds import LayoutError as LayoutError
from .kinds import MiscompileError as MiscompileError
from .kinds import RankError as RankError
from .kinds import ReadOnlyError as ReadOnlyError
from .kinds import ResultError as ResultError
from .kinds import SideEffectError as SideEffectError
from .kinds import StreamError as StreamError

if not _typing.TYPE_CHECKING:  # a type checker would let any name pass
    __getattr__, __dir__ = _missing(__name__), _listed(__name__)
