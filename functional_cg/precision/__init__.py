"""Mixed precision: dtype policies, dynamic loss scaling, and stochastic rounding."""

from __future__ import annotations

from .loss_scale import LossScale
from .policy import Policy
from .rounding import stochastic_round

__all__ = ["LossScale", "Policy", "stochastic_round"]
