"""Times steps that ranks make together."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..system import waiter

__all__ = [
    "ROUNDS", "Times", "held_gib", "of_each_rank", "peak_gib", "timed", "together", "until_it_returns",
]  # fmt: skip

T = TypeVar("T")
ROUNDS, WARM_UPS = 5, 5


@dataclass(frozen=True)
class Times:
    """Milliseconds per step of the slowest rank: one number for each round."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    def __str__(self) -> str:
        low, high = min(self.rounds), max(self.rounds)
        return f"{self.median:8.2f} ms [{low:.2f}, {high:.2f}]"


def timed(step: Callable[[], object], device: torch.device, steps: int, *, warm_ups: int = WARM_UPS) -> Times:
    """Time rounds of steps, after some that are not timed.

    Args:
      step: Makes one step; all ranks call it.
      device: Where this rank computes.
      steps: Steps of a round.
      warm_ups: Steps before.
    """
    for _ in range(warm_ups):
        step()
    rounds = []
    for _ in range(ROUNDS):
        together(device)
        start = time.perf_counter()
        for _ in range(steps):
            step()
        waiter(device)()
        rounds.append(_slowest((time.perf_counter() - start) / steps * 1e3, device))
    return Times(tuple(rounds))


def until_it_returns(step: Callable[[], object], device: torch.device, steps: int) -> float:
    """Return the median milliseconds until a step returns on the host of the slowest rank, whose device is idle before.

    Args:
      step: Makes one step; all ranks call it.
      device: Where this rank computes.
      steps: How many times.
    """
    spent = []
    for _ in range(steps):
        together(device)
        start = time.perf_counter()
        step()
        spent.append((time.perf_counter() - start) * 1e3)
    return _slowest(statistics.median(spent), device)


def _slowest(milliseconds: float, device: torch.device) -> float:
    spent = torch.tensor(milliseconds, device=device)
    if dist.is_initialized():
        dist.all_reduce(spent, dist.ReduceOp.MAX)
    return float(spent)


def together(device: torch.device) -> None:
    """Wait for this device, then for all ranks."""
    waiter(device)()
    if dist.is_initialized():
        dist.barrier()
        waiter(device)()


def peak_gib(device: torch.device) -> float:
    """Return the peak of the allocator in GiB since the last call, and start anew; 0.0 on a CPU."""
    if device.type != "cuda":
        return 0.0
    torch.cuda.empty_cache()
    peak = torch.cuda.max_memory_allocated(device) / 2**30
    torch.cuda.reset_peak_memory_stats(device)
    return peak


def held_gib(device: torch.device) -> float:
    """Return the GiB that are held between steps, the memory of graphs included; 0.0 on a CPU."""
    if device.type != "cuda":
        return 0.0
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device) / 2**30


def of_each_rank(value: T) -> list[T]:
    """Return a value of each rank."""
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
