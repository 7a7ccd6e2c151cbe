"""Mixed precision: dtype policies, dynamic loss scaling, and stochastic rounding.

Dtypes, scales and rounding:

  Policy            dtypes for storing parameters, computing with them, and summing gradients
  LossScale         a loss scale for float16 that shrinks on overflow; bfloat16 needs none
  stochastic_round  round each element at random, so that its mean stays
"""

from __future__ import annotations

from .loss_scale import LossScale as LossScale
from .policy import Policy as Policy
from .rounding import stochastic_round as stochastic_round
