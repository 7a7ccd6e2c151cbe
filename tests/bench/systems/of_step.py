"""Makes a system of one of our steps and its state."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

import functional_cg as fcg
from functional_cg.step.costs import CostAnalysis

from ..system import OURS, System, waiter
from ..workloads import Batch

__all__ = ["counts", "of_step"]


def of_step(
    step: Any, state: Any, device: torch.device, batches: Sequence[Batch], *, recorded: bool = False
) -> System:
    """Build a system of a captured step.

    Args:
      step: The step; its metrics have a ``"loss"``.
      state: Its first state.
      device: Where both are.
      batches: Batches on that device.
      recorded: Whether its calls are recorded.
    """
    states, made = [state], fcg.record(step) if recorded else step

    def run(batch: Batch) -> Any:
        states[0], metrics = made(states[0], batch)
        return metrics["loss"]

    def close() -> None:
        states.clear()
        step.close()

    def costs(bandwidth: float | None, peak: float | None) -> CostAnalysis | None:
        lowered = step.lower(states[0], batches[0])
        return lowered.cost_analysis(bandwidth=bandwidth, peak_flops=peak)  # type: ignore[no-any-return]

    return System(OURS[0], run, batches, waiter(device), close, partial(counts, step), costs=costs)


def counts(*steps: Any) -> dict[str, int]:
    """Count captures and replays of all steps."""
    return {
        "captures": sum(step.stats.captures for step in steps),
        "replays": sum(step.stats.replays for step in steps),
    }
