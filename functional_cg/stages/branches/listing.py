"""Spread units of work over lanes: what waits for what, and when memory is free.

What runs where is chosen in ``assignment``. The result depends on the units alone.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...messages.units import size_of
from ...state.outline import count
from .assignment import Assignment, assign
from .costs import WORKSPACE
from .units import Memory, Unit, predecessors

__all__ = ["Place", "Timeline", "in_line", "listed"]

_MUCH = 2**20  # bytes from which a lane waits for memory that is about to be free
# Bytes of allocations, up to which torch's allocator takes them from segments of so many bytes; larger ones have their
# own. Each stream has segments of its own.
_SEGMENTS = ((2**20, 2**21), (10 * 2**20, 20 * 2**20), (math.inf, 2**21))


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
      estimated: Whether an estimate alone says that it is faster than one line.
      measured: What was measured, in words; empty if nothing was.
    """

    units: Sequence[Unit]
    places: Sequence[Place]
    lanes: int
    why: str = ""
    estimated: bool = False
    measured: str = ""

    @property
    def micros(self) -> float:
        """Estimated microseconds: to the end of the last unit, or what the whole device is busy for."""
        return max(max((p.end for p in self.places), default=0.0), sum(unit.busy for unit in self.units))

    @property
    def peak(self) -> int:
        """Bytes of temporaries: each lane keeps what it needs at most, since lanes share no memory."""
        return sum(_highest(self, lane) for lane in range(self.lanes))

    @property
    def taken(self) -> int:
        """Bytes that the allocator takes from the device for temporaries and workspaces: segments, by lane."""
        return self.workspaces + sum(
            -(-_highest(self, lane, least, most) // segment) * segment
            for lane in range(self.lanes)
            for (least, _), (most, segment) in itertools.pairwise(((0, 0), *_SEGMENTS))
        )

    @property
    def workspaces(self) -> int:
        """Bytes of workspaces for products: cuBLAS takes one for each stream."""
        return WORKSPACE * len({place.lane for place in self.places if self.units[place.unit].product})

    def __str__(self) -> str:
        if self.lanes == 1:
            return f"branches: none, {self.why or 'as asked for'}"
        line, waits = in_line(self.units), sum(len(place.waits) for place in self.places)
        links = sum(unit.link for unit in self.units)
        return (
            f"branches: {count(len(self.units), 'unit')} of work on {self.lanes} lanes with {count(waits, 'wait')}"
            + f", one of them for {count(links, 'collective')}" * bool(links)
            + f"; estimated {self.micros:,.0f} us, in one line {line.micros:,.0f} us; "
            + f"{self.measured}; " * bool(self.measured)
            + f"{size_of(max(self.taken - line.taken, 0))} of memory in addition, workspaces for products included"
        )

    def collectives(self, shown: int = 12) -> list[str]:
        """Return what collectives run beside, one line each, in their order, after a line that adds them up."""
        links = [place for place in self.places if self.units[place.unit].link]
        others = [place for place in self.places if not self.units[place.unit].link]
        beside = {
            link: [one for one in others if one.start < link.end and one.end > link.start] for link in links
        }
        alone = sum(_uncovered(link, of) for link, of in beside.items())
        total = sum(link.end - link.start for link in links)
        lines = [
            f"{count(len(links), 'collective')}, estimated {total:,.0f} us, {alone:,.0f} us of them beside no call"
        ]
        for link in links[:shown]:
            calls = Counter(self.units[one.unit].name for one in beside[link])
            names = [f"{name} x{times}" if times > 1 else name for name, times in calls.most_common(3)]
            more = [f"{calls.total() - sum(n for _, n in calls.most_common(3)):,} more"] * (len(calls) > 3)
            name = self.units[link.unit].name.partition("_into")[0].partition("_tensor")[0]
            lines.append(
                f"  {link.start:,.0f} to {link.end:,.0f} us: {name}, beside {', '.join([*names, *more]) or 'no call'}"
            )
        return lines + [f"  … and {len(links) - shown:,} more"] * (len(links) > shown)


def _uncovered(link: Place, others: Sequence[Place]) -> float:
    """Return the microseconds of a collective during which no other unit runs."""
    found, now = 0.0, link.start
    for one in sorted(others, key=lambda place: place.start):
        found, now = found + max(one.start - now, 0.0), max(now, one.end)
    return found + max(link.end - now, 0.0)


def in_line(units: Sequence[Unit], kept: frozenset[Memory] = frozenset()) -> Timeline:
    """Return the units one after another, on one lane; what a collective moves, it moves beside those that follow.

    Args:
      units: The units, in the order of the plan.
      kept: Memory that is never freed: what leaves the step.
    """
    before = predecessors(units) if any(unit.link for unit in units) else ()
    last = {memory: number for number, unit in enumerate(units) for memory in unit.reads | unit.writes}
    frees: dict[int, list[Memory]] = {}
    for memory in (memory for unit in units for memory in unit.made if memory not in kept):
        frees.setdefault(last[memory], []).append(memory)
    places: list[Place] = []
    now = link = 0.0
    for number, unit in enumerate(units):
        needed = (
            max((places[one].end for one in before[number] if units[one].link), default=0.0)
            if before
            else 0.0
        )
        start = max(now, needed, link if unit.link else 0.0)
        end = start + unit.micros
        now, link = (now, end) if unit.link else (end, link)
        places.append(Place(number, 0, (), False, tuple(frees.get(number, ())), start, end))
    return Timeline(units, places, 1)


def listed(
    units: Sequence[Unit],
    lanes: int,
    kept: frozenset[Memory] = frozenset(),
    ahead: float = math.inf,
    *,
    frugal: bool = True,
) -> Timeline:
    """Spread units over at most so many lanes.

    Args:
      units: The units, in the order of the plan.
      lanes: The most lanes; with collectives, one of them is theirs.
      kept: Memory that is never freed: what leaves the step.
      ahead: Bytes that units may allocate that run before others that precede them in the plan.
      frugal: Whether a lane waits for memory that is about to be free.
    """
    if lanes == 1:
        return in_line(units, kept)
    before = predecessors(units)
    found = assign(units, before, lanes, ahead)
    used = {lane: place for place, lane in enumerate(sorted({0, *found.lane}))}
    found.lane = [used[lane] for lane in found.lane]
    much = _MUCH if frugal else math.inf
    return Timeline(units, list(_placed(units, before, found, kept, much)), len(used))


class _Clocks:
    """What each lane comes after: by lane, the last turn of each other lane.

    Args:
      lanes: How many there are.
      lane_of: The lane of each unit.
      order: The units, turn by turn.
    """

    def __init__(self, lanes: int, lane_of: Sequence[int], order: Sequence[int]) -> None:
        self._lane_of, self._turn_of = lane_of, {number: turn for turn, number in enumerate(order)}
        self._now = [[-1] * lanes for _ in range(lanes)]
        self._then: dict[int, list[int]] = {}

    def wait(self, lane: int, units: Iterable[int]) -> list[int]:
        """Let a lane wait for units; return those that it does not come after anyway."""
        found = []
        for one in sorted(units, key=self._turn_of.__getitem__, reverse=True):
            turn = self._turn_of[one]
            if not self.covers(lane, {self._lane_of[one]: turn}):
                found.append(one)
                self._now[lane] = list(map(max, self._now[lane], self._then[turn]))
        return found

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
    found: Assignment,
    kept: frozenset[Memory],
    much: float = math.inf,
) -> Iterator[Place]:
    """Add waits, none for what a lane has waited for already, and free memory.

    A lane allocates from what it has freed itself. So memory is freed where the lane that allocated it comes after all
    units that touch it. A lane that allocates waits for that, if it is much memory and they are done by then: by an
    estimate, so a lane that need not save memory is better off without such waits.
    """
    lane_of, order, lanes = found.lane, found.order, 1 + max(found.lane, default=0)
    clocks = _Clocks(lanes, lane_of, order)
    waits: list[tuple[int, ...]] = []
    touched = _last_turns(units, lane_of, order)
    due: dict[int, list[Memory]] = {}
    for memory, turns in touched.items():
        due.setdefault(max(turns.values()), []).append(memory)
    home = {memory: lane_of[n] for n in order for memory in units[n].made}
    sizes = {memory: nbytes for unit in units for memory, nbytes in unit.made.items()}
    pending: list[list[Memory]] = [[] for _ in range(lanes)]
    frees: list[tuple[Memory, ...]] = []
    for turn, number in enumerate(order):
        lane = lane_of[number]
        waited = clocks.wait(lane, before[number])
        if sum(units[number].made.values()) >= much:
            for memory in (one for one in pending[lane] if sizes[one] >= much):
                using = [order[last] for last in touched[memory].values()]
                if all(found.end[one] <= found.start[number] for one in using):
                    waited += clocks.wait(lane, using)
        clocks.run(lane, turn)
        waits.append(tuple(sorted(waited)))
        for memory in due.get(turn, ()):
            if memory not in kept:
                pending[home[memory]].append(memory)
        free = tuple(memory for memory in pending[lane] if clocks.covers(lane, touched[memory]))
        pending[lane] = [memory for memory in pending[lane] if memory not in free]
        frees.append(free)
    recorded = {one for needed in waits for one in needed}
    for number, needed, free in zip(order, waits, frees, strict=True):
        start, end = found.start[number], found.end[number]
        yield Place(number, lane_of[number], needed, number in recorded, free, start, end)


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


def _highest(timeline: Timeline, lane: int, least: float = 0, most: float = math.inf) -> int:
    """Return the most bytes at one time of what a lane allocates, of sizes above the least up to the most."""
    sizes: dict[Memory, int] = {}
    changes: list[int] = []
    for place in timeline.places:
        if place.lane == lane:
            made = timeline.units[place.unit].made
            sizes |= {memory: nbytes if least < nbytes <= most else 0 for memory, nbytes in made.items()}
            changes.append(sum(sizes[memory] for memory in made))
            changes.append(-sum(sizes[memory] for memory in place.frees))
    return max(itertools.accumulate(changes), default=0)
