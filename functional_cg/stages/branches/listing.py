"""Spread units of work over lanes: list scheduling by the longest way to the end.

Ready units are taken in the order of the time that is left from their start to the end of the step; each goes to the
lane where it can begin first. The result depends on the units alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...messages.units import size_of
from ...state.outline import count
from .costs import SYNC, WORKSPACE
from .units import Memory, Unit, predecessors

__all__ = ["Place", "Timeline", "in_line", "listed"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where and when a unit runs.

    Attributes:
      unit: Its number in the plan.
      lane: Its lane.
      waits: Numbers of units on other lanes that the lane waits for before it.
      records: Whether another lane waits for it.
      frees: Memory that is free after it.
      start: Estimated microseconds from the beginning of the step.
      end: Likewise.
    """

    unit: int
    lane: int
    waits: tuple[int, ...]
    records: bool
    frees: tuple[Memory, ...]
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The final schedule: units, and their places in the order in which a capture meets them.

    Attributes:
      units: The units, in the order of the plan.
      places: Their places.
      lanes: The number of lanes in use.
      why: If it is one, why; empty if nothing else was asked for.
    """

    units: Sequence[Unit]
    places: Sequence[Place]
    lanes: int
    why: str = ""

    @property
    def micros(self) -> float:
        """Estimated microseconds: to the end of the last unit, or what the whole device is busy for."""
        return max(max((p.end for p in self.places), default=0.0), sum(unit.busy for unit in self.units))

    @property
    def peak(self) -> int:
        """Bytes of temporaries: each lane keeps what it needs at most, since lanes share no memory."""
        return sum(_highest(self, lane) for lane in range(self.lanes))

    @property
    def workspaces(self) -> int:
        """Bytes of workspaces for products: cuBLAS takes one for each stream."""
        return WORKSPACE * len({place.lane for place in self.places if self.units[place.unit].product})

    def __str__(self) -> str:
        if self.lanes == 1:
            return f"branches: none, {self.why or 'as asked for'}"
        waits = sum(len(place.waits) for place in self.places)
        alone = sum(unit.micros for unit in self.units)
        return (
            f"branches: {count(len(self.units), 'unit')} of work on {self.lanes} lanes with {count(waits, 'wait')}; "
            f"estimated {self.micros:,.0f} us, in one line {alone:,.0f} us; "
            f"{size_of(self.workspaces)} of workspaces for products"
        )


def in_line(units: Sequence[Unit], kept: frozenset[Memory] = frozenset()) -> Timeline:
    """Return the units one after another, on one lane."""
    return listed(units, 1, kept)


def listed(units: Sequence[Unit], lanes: int, kept: frozenset[Memory] = frozenset()) -> Timeline:
    """Spread units over at most so many lanes.

    Args:
      units: The units, in the order of the plan.
      lanes: The most lanes.
      kept: Memory that is never freed: what leaves the step.
    """
    before = predecessors(units)
    where, start = _assigned(units, before, lanes)
    order = sorted(range(len(units)), key=lambda n: (start[n], where[n][1]))
    lane_of = [lane for lane, _ in where]
    places = list(_placed(units, before, lane_of, start, order, kept))
    return Timeline(units, places, 1 + max(lane_of, default=0))


def _assigned(
    units: Sequence[Unit], before: Sequence[Sequence[int]], lanes: int
) -> tuple[list[tuple[int, int]], list[float]]:
    """Return for each unit its lane and its turn in the assignment, and when it starts."""
    after: list[list[int]] = [[] for _ in units]
    for number, found in enumerate(before):
        for one in found:
            after[one].append(number)
    left = [0.0] * len(units)
    for number in reversed(range(len(units))):
        left[number] = units[number].micros + max((left[one] for one in after[number]), default=0.0)
    waiting = [len(found) for found in before]
    ready = [(-left[n], n) for n in range(len(units)) if not waiting[n]]
    heapq.heapify(ready)
    free = [0.0] * lanes
    where: list[tuple[int, int]] = [(0, 0)] * len(units)
    start, end = [0.0] * len(units), [0.0] * len(units)
    turn = 0
    while ready:
        _, number = heapq.heappop(ready)
        begins = [
            max([free[lane], *(end[b] + SYNC * (where[b][0] != lane) for b in before[number])])
            for lane in range(lanes)
        ]
        latest = max(before[number], key=lambda b: (end[b], b), default=None)
        home = where[latest][0] if latest is not None else 0
        lane = min(range(lanes), key=lambda one: (begins[one], one != home, -free[one], one))
        start[number], turn = begins[lane], turn + 1
        where[number] = lane, turn
        free[lane] = end[number] = start[number] + units[number].micros
        for one in after[number]:
            waiting[one] -= 1
            if not waiting[one]:
                heapq.heappush(ready, (-left[one], one))
    return where, start


class _Clocks:
    """What each lane comes after: by lane, the last turn of each other lane."""

    def __init__(self, lanes: int) -> None:
        self._now = [[-1] * lanes for _ in range(lanes)]
        self._then: dict[int, list[int]] = {}

    def wait(self, lane: int, turn: int) -> None:
        """Let a lane wait for what ran in a turn."""
        self._now[lane] = list(map(max, self._now[lane], self._then[turn]))

    def run(self, lane: int, turn: int) -> None:
        """Let a lane run something in a turn."""
        self._now[lane][lane] = turn
        self._then[turn] = list(self._now[lane])

    def covers(self, lane: int, turns: Mapping[int, int]) -> bool:
        """Whether a lane comes after these turns, by lane."""
        return all(self._now[lane][other] >= turn for other, turn in turns.items())


def _placed(
    units: Sequence[Unit],
    before: Sequence[Sequence[int]],
    lane_of: Sequence[int],
    start: Sequence[float],
    order: Sequence[int],
    kept: frozenset[Memory],
) -> Iterator[Place]:
    """Add waits, none for what a lane has waited for already, and free memory.

    A lane allocates from what it has freed itself. So memory is freed where the lane that allocated it comes after all
    units that touch it.
    """
    lanes = 1 + max(lane_of, default=0)
    clocks, turn_of = _Clocks(lanes), {number: turn for turn, number in enumerate(order)}
    waits: list[tuple[int, ...]] = []
    touched = _last_turns(units, lane_of, order)
    due: dict[int, list[Memory]] = {}
    for memory, turns in touched.items():
        due.setdefault(max(turns.values()), []).append(memory)
    home = {memory: lane_of[n] for n in order for memory in units[n].made}
    pending: list[list[Memory]] = [[] for _ in range(lanes)]
    frees: list[tuple[Memory, ...]] = []
    for turn, number in enumerate(order):
        lane, found = lane_of[number], []
        for one in sorted(before[number], key=turn_of.__getitem__, reverse=True):
            if not clocks.covers(lane, {lane_of[one]: turn_of[one]}):
                found.append(one)
                clocks.wait(lane, turn_of[one])
        clocks.run(lane, turn)
        waits.append(tuple(sorted(found)))
        for memory in due.get(turn, ()):
            if memory not in kept:
                pending[home[memory]].append(memory)
        free = tuple(memory for memory in pending[lane] if clocks.covers(lane, touched[memory]))
        pending[lane] = [memory for memory in pending[lane] if memory not in free]
        frees.append(free)
    waited = {one for found in waits for one in found}
    for number, needed, free in zip(order, waits, frees, strict=True):
        end = start[number] + units[number].micros
        yield Place(number, lane_of[number], needed, number in waited, free, start[number], end)


def _last_turns(
    units: Sequence[Unit], lane_of: Sequence[int], order: Sequence[int]
) -> dict[Memory, dict[int, int]]:
    """Return for each memory that a unit allocates, by lane, the last turn of a unit that touches it."""
    last: dict[Memory, dict[int, int]] = {}
    for turn, number in enumerate(order):
        for memory in units[number].made:
            last[memory] = {}
        for memory in units[number].reads | units[number].writes:
            if memory in last:
                last[memory][lane_of[number]] = turn
    return last


def _highest(timeline: Timeline, lane: int) -> int:
    sizes: dict[Memory, int] = {}
    alive = most = 0
    for place in timeline.places:
        if place.lane == lane:
            made = timeline.units[place.unit].made
            sizes |= made
            alive += sum(made.values())
            most = max(most, alive)
            alive -= sum(sizes[memory] for memory in place.frees)
    return most
