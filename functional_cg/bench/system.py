"""What the bench times: a system that is ready for its first step, and the names of all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..step.costs import CostAnalysis

__all__ = [
    "BETAS",
    "EPS",
    "FEEDS",
    "FEW",
    "FEW_LEAVES",
    "OPPONENTS",
    "OURS",
    "UPDATES",
    "VARIANTS",
    "System",
    "Unavailable",
    "nothing",
    "there",
    "waiter",
]

OURS = ("ours", "ours-aten")
# Ours once more, with something added to the update, or to the way of its batch.
# A recipe is clipping, a schedule and a guard together.
UPDATES = ("ours-leaves", "ours-clip", "ours-schedule", "ours-guard", "ours-recipe")
FEEDS = ("ours-host", "ours-prefetch")
FEW_LEAVES = 10
FEW = (
    f"ours-{FEW_LEAVES}-leaves"  # the same step over so few: what a call pays for each leaf is the difference
)
VARIANTS = (*UPDATES, *FEEDS, FEW)
OPPONENTS = (
    "eager", "compile", "reduce-overhead", "graphed-callables", "hand-graph", "hand-graph-compiled",
    "cudagraph-module", "jax",
)  # fmt: skip
BETAS, EPS = (0.9, 0.999), 1e-8  # of AdamW, in every system


class Unavailable(Exception):
    """A system that cannot run here; the text says why."""


def nothing() -> None:
    """Do nothing."""


@dataclass(eq=False)
class System:
    """A system that is ready for its first step.

    Attributes:
      name: As on the command line.
      step: ``step(batch) -> loss``: one update; the loss is a value on the device.
      batches: Batches as ``step`` takes them.
      wait: Blocks until the device is done.
      close: Gives up graphs and memory.
      counts: Captures and replays so far, where the system counts them.
      peak_bytes: Peak of an allocator of its own, in bytes; None where torch's allocator knows it.
      costs: ``costs(bandwidth, peak_flops)``: what a step costs at least, where the system knows.
      notes: What a reader should know about this row.
    """

    name: str
    step: Callable[[Any], Any]
    batches: Sequence[Any]
    wait: Callable[[], None]
    close: Callable[[], None] = nothing
    counts: Callable[[], dict[str, int]] = dict
    peak_bytes: Callable[[], int | None] = lambda: None
    costs: Callable[[float | None, float | None], CostAnalysis | None] = lambda bandwidth, peak: None
    notes: list[str] = field(default_factory=list)


def waiter(device: torch.device) -> Callable[[], None]:
    """What blocks until a device is done."""
    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else nothing


def there(batches: Sequence[dict[str, torch.Tensor]], device: torch.device) -> list[dict[str, torch.Tensor]]:
    """Batches on a device."""
    return [{key: value.to(device) for key, value in batch.items()} for batch in batches]
