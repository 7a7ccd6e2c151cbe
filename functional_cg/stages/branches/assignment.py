"""Assign units to lanes, as a device would take them up: whenever a lane is free, the unit with the longest way to go.

Collectives run on the last lane, one after another: they occupy the link between ranks and not the device, so other
lanes go on meanwhile. What is read from them waits for them, and is passed over by what is ready before. Units run
ahead of the order of the plan only as far as there is room for what they allocate.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from .costs import SYNC
from .units import Memory, Unit, predecessors

__all__ = ["Assignment", "assign", "longest_way"]


@dataclass(slots=True)
class Assignment:
    """Where and when each unit runs.

    Attributes:
      order: The units, in the order in which they were taken up.
      lane: The lane of each unit.
      start: Estimated microseconds from the beginning of the step.
      end: Likewise.
    """

    order: list[int]
    lane: list[int]
    start: list[float]
    end: list[float]

    @classmethod
    def of(cls, count: int) -> Assignment:
        return cls([], [0] * count, [0.0] * count, [0.0] * count)


@dataclass(slots=True)
class _Queue:
    """Units of one kind, whose predecessors are assigned.

    Attributes:
      lanes: Where they may run.
      coming: When what each needs is done, and the unit.
      ready: Those that need nothing more now: the longest way to the end first.
    """

    lanes: Sequence[int]
    coming: list[tuple[float, int]] = field(default_factory=list)
    ready: list[tuple[float, int]] = field(default_factory=list)

    def next(self, free: Sequence[float]) -> float:
        """When the next of them may begin."""
        lane = min((free[one] for one in self.lanes), default=math.inf)
        if self.ready:
            return lane
        return max(lane, self.coming[0][0]) if self.coming else math.inf


class _Room:
    """What units that run ahead of the order of the plan allocate, beyond what those before them hold.

    The first unit that has not run may always run: so there is always one that may, and at most ``limit`` bytes are
    taken in addition to what the line has at that unit.
    """

    def __init__(self, units: Sequence[Unit], limit: float) -> None:
        self._units, self._limit = units, limit
        self.front = 0
        self._done = [False] * len(units)
        self._ahead: dict[Memory, int] = {}  # memory that is counted
        self._taken = 0
        self._touching: dict[Memory, int] = {}  # units that have yet to touch it
        for unit in units:
            for memory in unit.reads | unit.writes:
                self._touching[memory] = self._touching.get(memory, 0) + 1
        self._last: dict[Memory, float] = {}
        self._dying: list[tuple[float, int, int, Memory]] = []  # names of memory have no order
        self._held: list[tuple[int, int]] = []

    def has(self, number: int) -> bool:
        """Whether there is room for a unit; if not, it is held until there is."""
        made = sum(self._units[number].made.values())
        if not made or number == self.front or self._taken + made <= self._limit:
            return True
        heapq.heappush(self._held, (made, number))
        return False

    def released(self, now: float) -> Iterator[int]:
        """Yield units that were held, and for which there is room."""
        while self._dying and self._dying[0][0] <= now:
            self._taken -= self._ahead.pop(heapq.heappop(self._dying)[3], 0)
        for place in [n for n, (_, number) in enumerate(self._held) if number == self.front]:
            yield self._held.pop(place)[1]
            heapq.heapify(self._held)
        while self._held and self._taken + self._held[0][0] <= self._limit:
            yield heapq.heappop(self._held)[1]

    def run(self, number: int, end: float) -> None:
        """Take note of a unit that was assigned."""
        unit = self._units[number]
        self._done[number] = True
        for memory, nbytes in unit.made.items():
            self._ahead[memory] = nbytes
            self._taken += nbytes
        for place, memory in enumerate(unit.reads | unit.writes):
            self._touching[memory] -= 1
            self._last[memory] = max(self._last.get(memory, 0.0), end)
            if memory in self._ahead and not self._touching[memory]:
                heapq.heappush(self._dying, (self._last[memory], number, place, memory))
        while self.front < len(self._units) and self._done[self.front]:
            for memory in self._units[self.front].made:
                self._taken -= self._ahead.pop(memory, 0)
            self.front += 1


def assign(
    units: Sequence[Unit], before: Sequence[Sequence[int]], lanes: int, ahead: float = math.inf
) -> Assignment:
    """Assign units to at most so many lanes, from two on; the last one is the link's, if there are collectives.

    Args:
      units: The units, in the order of the plan.
      before: For each of them, those that it has to wait for.
      lanes: The most lanes.
      ahead: Bytes that units may allocate that run before others that precede them in the plan.
    """
    found, free = Assignment.of(len(units)), [0.0] * lanes
    after, left = _ways(units, before)
    links = int(any(unit.link for unit in units))
    queues = _Queue(range(lanes - links)), _Queue(range(lanes - links, lanes))
    room = _Room(units, ahead)
    waiting = [len(needed) for needed in before]
    for number in (n for n in range(len(units)) if not waiting[n]):
        heapq.heappush(queues[units[number].link].coming, (0.0, number))
    now = 0.0
    while len(found.order) < len(units):
        for number in room.released(now):
            heapq.heappush(queues[units[number].link].ready, (-left[number], number))
        queue = min(queues, key=lambda one: one.next(free))
        now = max(now, queue.next(free))
        while queue.coming and queue.coming[0][0] <= now + SYNC:
            _, number = heapq.heappop(queue.coming)
            heapq.heappush(queue.ready, (-left[number], number))
        _, number = heapq.heappop(queue.ready)
        if not room.has(number):
            continue
        lane, begin = _best(before[number], queue.lanes, free, found)
        found.start[number] = max(begin, now)
        found.lane[number] = lane
        found.order.append(number)
        free[lane] = found.end[number] = found.start[number] + units[number].micros
        room.run(number, found.end[number])
        for one in after[number]:
            waiting[one] -= 1
            if not waiting[one]:
                done = max(found.end[b] for b in before[one])
                heapq.heappush(queues[units[one].link].coming, (done, one))
    return found


def longest_way(units: Sequence[Unit]) -> float:
    """Return the microseconds of the longest way through units, each of which waits for those that it needs."""
    return max(_ways(units, predecessors(units))[1], default=0.0)


def _ways(
    units: Sequence[Unit], before: Sequence[Sequence[int]]
) -> tuple[Sequence[Sequence[int]], Sequence[float]]:
    """Return for each unit those that wait for it, and the microseconds from its start to the end of the step."""
    after: list[list[int]] = [[] for _ in units]
    for number, needed in enumerate(before):
        for one in needed:
            after[one].append(number)
    left = [0.0] * len(units)
    for number in reversed(range(len(units))):
        left[number] = units[number].micros + max((left[one] for one in after[number]), default=0.0)
    return after, left


def _best(
    before: Sequence[int], lanes: Sequence[int], free: Sequence[float], found: Assignment
) -> tuple[int, float]:
    """Return the lane where a unit begins first, and when."""
    begins = {
        lane: max([free[lane], *(found.end[b] + SYNC * (found.lane[b] != lane) for b in before)])
        for lane in lanes
    }
    latest = max(before, key=lambda b: (found.end[b], b), default=None)
    home = found.lane[latest] if latest is not None else 0
    lane = min(lanes, key=lambda one: (begins[one], one != home, -free[one], one))
    return lane, begins[lane]
