"""Hypothesis strategies: tensors, pytrees, states, inputs, optimizers, and whole random step programs.

They need hypothesis. The first example of a test captures its step, the others replay: set ``deadline=None``.
"""

from __future__ import annotations

from .programs import StepProgram, optimizers, step_fns
from .trees import buffer_specs, dtypes, inputs, like, pytrees, shapes, states, tensors

__all__ = [
    "StepProgram",
    "buffer_specs",
    "dtypes",
    "inputs",
    "like",
    "optimizers",
    "pytrees",
    "shapes",
    "states",
    "step_fns",
    "tensors",
]
