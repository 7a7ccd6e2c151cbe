"""Hypothesis strategies: tensors, pytrees, states, inputs, optimizers, and whole random step programs.

They need hypothesis. Set ``deadline=None``: the first example of a test captures the step, the others replay it.

Data:

  tensors         tensors on the CPU
  pytrees         nested dicts, lists and tuples of tensors
  states          pytrees that can be a state
  inputs          inputs of several calls, each like one tree
  like            trees of the same structure, shapes and dtypes with other values
  shapes, dtypes  shapes, 0-dim and empty ones too; dtypes
  buffer_specs    shape, dtype and strides of a leaf

Programs:

  optimizers      optimizers of ``fcg.optim``
  step_fns        random pure steps over random states
  StepProgram     what ``step_fns`` draws; its repr is its program text
"""

from __future__ import annotations

import typing as _typing

from ..names import listed as _listed
from ..names import missing as _missing
from .programs import StepProgram as StepProgram
from .programs import optimizers as optimizers
from .programs import step_fns as step_fns
from .trees import buffer_specs as buffer_specs
from .trees import dtypes as dtypes
from .trees import inputs as inputs
from .trees import like as like
from .trees import pytrees as pytrees
from .trees import shapes as shapes
from .trees import states as states
from .trees import tensors as tensors

if not _typing.TYPE_CHECKING:  # a type checker would let any name pass
    __getattr__, __dir__ = _missing(__name__), _listed(__name__)
