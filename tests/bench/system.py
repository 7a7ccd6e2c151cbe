"""Defines the systems that the bench times: their names and their common interface."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from functional_cg.step.costs import CostAnalysis

__all__ = [
    "BETAS",
    "BUDGETS",
    "COMPILED",
    "EPS",
    "FEEDS",
    "FEW",
    "FEW_LEAVES",
    "LANES",
    "LINE",
    "MODULES",
    "ONCE",
    "OPPONENTS",
    "OURS",
    "RECORDED",
    "TUNED",
    "UPDATES",
    "VARIANTS",
    "WATCHED",
    "System",
    "Unavailable",
    "nothing",
    "there",
    "waiter",
]

OURS = ("ours", "ours-aten")
# Variants of ours, with additions to the update or to how its batch arrives.
# The recipe combines clipping, a schedule and a guard.
UPDATES = ("ours-leaves", "ours-clip", "ours-schedule", "ours-guard", "ours-recipe")
FEEDS = ("ours-host", "ours-prefetch")
FEW_LEAVES = 10
FEW = f"ours-{FEW_LEAVES}-leaves"  # the same step over this few leaves: the difference is the cost per leaf
TUNED = "ours-max-autotune"  # with the options of inductor that `max-autotune` sets
LANES = "ours-branches"  # with launches side by side where that pays, and no part compiled once
LINE = "ours-line"  # with all launches in one line
RECORDED = "ours-recorded"  # by `fcg.record(step)`
WATCHED = "ours-statistics"  # with `fcg.statistics(fn)`, at each call
# With less or more memory for what the forward keeps: `activation_memory_budget`, in percent.
BUDGETS = MappingProxyType({f"ours-budget-{percent}": percent / 100 for percent in (0, 25, 50, 75, 100)})
ONCE = "ours-compile-once"  # equal parts are compiled once
VARIANTS = (*UPDATES, *FEEDS, FEW, LANES, LINE, TUNED, ONCE, RECORDED, WATCHED, *BUDGETS)
OPPONENTS = (
    "eager", "compile", "reduce-overhead", "graphed-callables", "hand-graph", "hand-graph-compiled",
    "cudagraph-module", "max-autotune", "jax",
)  # fmt: skip
# For a module as it is.
MODULES = (*OURS, TUNED, ONCE, RECORDED, WATCHED, "eager", "compile", "reduce-overhead", "max-autotune")
COMPILED = (
    OURS[0],
    LANES,
    LINE,
    TUNED,
    ONCE,
    RECORDED,
    WATCHED,
    *BUDGETS,
    "compile",
    "reduce-overhead",
    "hand-graph-compiled",
    "max-autotune",
)
BETAS, EPS = (0.9, 0.999), 1e-8  # AdamW in every system


class Unavailable(Exception):
    """Raised by a system that cannot run here; the text says why."""


def nothing() -> None:
    """Do nothing."""


@dataclass(eq=False)
class System:
    """A training system, ready for its first step.

    Attributes:
      name: Name on the command line.
      step: ``step(batch) -> loss``, one update; the loss is on the device.
      batches: Batches as ``step`` takes them.
      wait: Waits for the device.
      close: Frees graphs and memory.
      counts: Captures and replays so far, if the system counts them.
      peak_bytes: Peak of the system's own allocator in bytes; None if it uses torch's.
      costs: ``costs(bandwidth, peak_flops)``, the minimum cost of a step, if the system knows it.
      notes: Remarks on this row for readers.
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
    """Return a function that waits for a device."""
    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else nothing


def there(batches: Sequence[dict[str, torch.Tensor]], device: torch.device) -> list[dict[str, torch.Tensor]]:
    """Copy batches to a device."""
    return [{key: value.to(device) for key, value in batch.items()} for batch in batches]
