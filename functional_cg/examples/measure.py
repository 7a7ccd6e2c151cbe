"""Measures a training run: calls per second, and whether replays match eager runs."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import Tensor

import functional_cg as fcg

__all__ = ["EagerTwin", "Meter"]


class EagerTwin:
    """A fork of a state that repeats each call eagerly and compares the results.

    Attributes:
      equal: Whether all leaves and metrics were bitwise equal after each call.
      distance: Largest distance between a leaf and its eager twin, relative to the twin's norm.
    """

    def __init__(self, step: fcg.GraphStep[Any, Any], state: Any) -> None:
        self._step = step
        self._state = fcg.fork(state)
        self._seconds: list[float] = []
        self.equal = True
        self.distance = 0.0

    def follow(self, batch: Any, state: Any, metrics: dict[str, Tensor]) -> None:
        """Repeat the call that returned ``state`` and ``metrics``, and compare."""
        start = time.perf_counter()
        self._state, expected = self._step.eager(self._state, batch)
        _wait(expected)
        self._seconds.append(time.perf_counter() - start)
        got, wanted = _held((state, metrics)), _held((self._state, expected))
        for a, b in zip(got, wanted, strict=True):
            self.equal &= torch.equal(a, b)
            self.distance = max(self.distance, _distance(a.double(), b.double()))

    @property
    def calls(self) -> int:
        """Number of calls compared."""
        return len(self._seconds)

    @property
    def calls_per_s(self) -> float:
        """Eager calls per second, from the median call."""
        return 1 / statistics.median(self._seconds) if self._seconds else 0.0


class Meter:
    """Measures calls per second, and can pause for work that is not training.

    Attributes:
      calls: Number of calls at the last lap.
    """

    def __init__(self) -> None:
        self.calls = 0
        self._seconds = 0.0
        self._mark = time.perf_counter()

    def lap(self, calls: int, metrics: dict[str, Tensor]) -> None:
        """Wait for ``metrics`` and add the time since the last mark; ``calls`` is the total number so far."""
        _wait(metrics)
        self._seconds += time.perf_counter() - self._mark
        self.calls = calls
        self.mark()

    def mark(self) -> None:
        """Restart the clock: time since the last lap does not count."""
        self._mark = time.perf_counter()

    @property
    def calls_per_s(self) -> float:
        """Calls per second, over all laps."""
        return self.calls / self._seconds if self.calls else 0.0


def _held(tree: tuple[Any, dict[str, Tensor]]) -> list[Tensor]:
    """Copy this rank's part of each leaf."""
    state, metrics = tree
    return [fcg.sharding.local(leaf) for leaf in fcg.tree.leaves((fcg.snapshot(state), metrics))]


def _wait(metrics: dict[str, Tensor]) -> None:
    for value in metrics.values():
        value.cpu()


def _distance(a: Tensor, b: Tensor) -> float:
    norm = float(b.norm())
    return float((a - b).norm()) / norm if norm else float(a.norm())
