"""A small numpy environment for the reinforcement-learning loop, the same for all systems."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..workloads import ACTIONS, OBSERVATION

__all__ = ["Environment"]

_SEED = 3


class Environment:
    """Points that actions push around, rewarded for being near the origin.

    Args:
      count: Number of points.
    """

    def __init__(self, count: int) -> None:
        draw = np.random.default_rng(_SEED)
        self._pushes = draw.standard_normal((ACTIONS, OBSERVATION)).astype(np.float32)
        self._points = draw.standard_normal((count, OBSERVATION)).astype(np.float32)

    def turn(self, act: Callable[[Any], Any], learn: Callable[[Any, Any], Any]) -> Any:
        """Run one iteration of the loop: observe, choose, act, learn.

        Args:
          act: ``act(observations) -> actions``, f32[n, 16] to i64[n] in numpy.
          learn: ``learn(observations, targets) -> loss``; targets f32[n, 2] are action and reward.
        Returns:
          The loss as ``learn`` returned it, on any device.
        """
        seen = self._points
        actions = act(seen)
        self._points = np.tanh(0.9 * seen + self._pushes[actions])
        rewards = -np.square(self._points).mean(1)
        return learn(seen, np.stack([actions.astype(np.float32), rewards], 1))
