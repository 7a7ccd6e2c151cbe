"""Matplotlib plots of states and steps (opt-in import: needs matplotlib).

Text output is elsewhere: ``print(state)``, ``step.explain()``, and the notebook display of both.
"""

from __future__ import annotations

try:
    import matplotlib  # noqa: F401
except ImportError as error:
    raise ImportError(
        "functional_cg.report draws with matplotlib, which is not installed. "
        "To fix: `pip install matplotlib`."
    ) from error

from .plots import arena, bytes_by_role, loss_curves
from .profiles import profile
from .timing import seconds_per_call, step_times

__all__ = ["arena", "bytes_by_role", "loss_curves", "profile", "seconds_per_call", "step_times"]
