"""Simulated lanes: what a branched plan runs side by side, a replay of the simulator runs in any order that is allowed.

A device may run the calls of two lanes in any order, unless one lane waits for the other. So each replay takes another
order: the last lane as far as it can go, then the one before it; the first lane first; then orders at random. An order
that is missing in the plan shows up as a wrong value.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..stages.branches.source import Lanes
from .recorded import Call

__all__ = ["SimulatedLanes"]


@dataclass(frozen=True, slots=True)
class _Wait:
    """A lane goes on once another has run so many of its calls."""

    lane: int
    count: int


@dataclass(slots=True)
class SimulatedLanes(Lanes):
    """The calls of a recorded run, by lane, with the waits between them.

    Attributes:
      recorder: Returns what records a kernel that does not pass by the dispatcher.
      lane: The lane on which the run is.
      calls: All calls, in the order of the run.
    """

    recorder: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda launch: launch
    lane: int = 0
    calls: list[Call] = field(default_factory=list)
    _queues: dict[int, list[Call | _Wait]] = field(default_factory=dict)
    _counts: dict[int, int] = field(default_factory=dict)
    _recorded: dict[int, _Wait] = field(default_factory=dict)

    def __enter__(self) -> None:
        self.lane = 0

    def __exit__(self, *error: object) -> None:
        self.lane = 0

    def on(self, lane: int) -> None:
        self.lane = lane

    def wait(self, unit: int) -> None:
        self._queues.setdefault(self.lane, []).append(self._recorded[unit])

    def record(self, unit: int) -> None:
        self._recorded[unit] = _Wait(self.lane, self._counts.get(self.lane, 0))

    def kernel(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        return self.recorder(launch)

    def append(self, call: Call) -> None:
        """Add a call to the lane."""
        self.calls.append(call)
        self._queues.setdefault(self.lane, []).append(call)
        self._counts[self.lane] = self._counts.get(self.lane, 0) + 1

    @property
    def one(self) -> bool:
        """Whether all calls are on one lane."""
        return len(self._queues) < 2

    def order(self, number: int) -> list[Call]:
        """Return the calls in an order that a device may take; for each number another one."""
        queues = {lane: deque(queue) for lane, queue in self._queues.items()}
        done = dict.fromkeys(queues, 0)
        lanes, chance = sorted(queues, reverse=number % 3 == 0), random.Random(number)
        out: list[Call] = []
        while queues:
            if number % 3 == 2:
                chance.shuffle(lanes)
            lane = next(lane for lane in lanes if lane in queues and _goes_on(queues[lane][0], done))
            item = queues[lane].popleft()
            if isinstance(item, Call):
                out.append(item)
                done[lane] += 1
            if not queues[lane]:
                del queues[lane]
        return out


def _goes_on(item: Call | _Wait, done: dict[int, int]) -> bool:
    return isinstance(item, Call) or done.get(item.lane, 0) >= item.count
