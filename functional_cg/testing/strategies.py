"""Hypothesis strategies: tensors, pytrees, states, inputs, optimizers, and whole random step programs.

They need hypothesis. Set ``deadline=None``: the first example of a test captures the step, the others replay it.
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
