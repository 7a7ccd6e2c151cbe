"""Mixed precision: which dtype does what, a loss scale as a part of the state, and rounding by a key."""

from __future__ import annotations

from .loss_scale import LossScale
from .policy import Policy
from .rounding import stochastic_round

__all__ = ["LossScale", "Policy", "stochastic_round"]
