"""Mixed precision: dtype policies, dynamic loss scaling, and stochastic rounding.

Dtypes, scales and rounding:

  Policy            dtypes for storing parameters, computing with them, and summing gradients
  LossScale         a loss scale for float16 that shrinks on overflow; bfloat16 needs none
  stochastic_round  round each element at random, so that its mean stays
"""

from __future__ import annotations

import typing as _typing

from ..names import listed as _listed
from ..names import missing as _missing
from .loss_scale import LossScale as LossScale
from .policy import Policy as Policy
from .rounding import stochastic_round as stochastic_round

if not _typing.TYPE_CHECKING:  # a type checker would let any name pass
    __getattr__, __dir__ = _missing(__name__), _listed(__name__)
