"""Hypothesis strategies: tensors, pytrees, states, inputs, optimizers, and whole random step programs.

They need hypothesis. The first example of a test captures its step, the others replay: set ``deadline=None``.
"""

from __future__ import annotations

from .exact import exact_step_fns, whole_numbers
from .programs import StepProgram, optimizers, step_fns
from .trees import buffer_specs, dtypes, inputs, like, pytrees, shapes, states, tensors

__all__ = [
    "StepProgram",
    "buffer_specs",
    "dtypes",
    "exact_step_fns",
    "inputs",
    "like",
    "optimizers",
    "pytrees",
    "shapes",
    "states",
    "step_fns",
    "tensors",
    "whole_numbers",
]
