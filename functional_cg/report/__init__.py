"""Matplotlib plots of states and steps (opt-in import: needs matplotlib).

Text output is elsewhere: ``print(state)``, ``step.explain()``, and the notebook display of both.

Of a state:

  arena             where each leaf lies in memory
  bytes_by_role     bytes of parameters, optimizer state and the rest

Of a run:

  loss_curves       losses over calls, one line per run, or per member of a sweep
  members           losses of the members of a sweep over their rates
  statistics        what modules return, gradients and updates over calls, of ``step.statistics``
  profile           time and memory by module, of ``step.profile(state, batch)``
  step_times        distribution of the times of calls
  seconds_per_call  measure those times

Of a pipeline:

  schedule          when each rank computes what
"""

from __future__ import annotations

import typing as _typing

try:
    import matplotlib  # noqa: F401
except ImportError as error:
    raise ImportError(
        "functional_cg.report draws with matplotlib, which is not installed. "
        "To fix: `pip install matplotlib`."
    ) from error

from ..names import listed as _listed
from ..names import missing as _missing
from .plots import arena as arena
from .plots import bytes_by_role as bytes_by_role
from .plots import loss_curves as loss_curves
from .plots import members as members
from .profiles import profile as profile
from .schedules import schedule as schedule
from .statistics import statistics as statistics
from .timing import seconds_per_call as seconds_per_call
from .timing import step_times as step_times

if not _typing.TYPE_CHECKING:  # a type checker would let any name pass
    __getattr__, __dir__ = _missing(__name__), _listed(__name__)
