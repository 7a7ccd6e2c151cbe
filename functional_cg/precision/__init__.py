"""Mixed precision: a loss scale as a part of the state, and rounding by a key."""

from __future__ import annotations

from .loss_scale import LossScale
from .rounding import stochastic_round

__all__ = ["LossScale", "stochastic_round"]
