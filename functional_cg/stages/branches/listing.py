"""Schedule units of work on lanes: what runs where and when, what waits for what, and when memory is free.

A list scheduler: whenever a lane is free, it takes the unit with the longest way to the end of the step. Collectives
run on the last lane, one after another: they occupy the link between ranks and not the device, so other lanes go on
meanwhile. What is read from them waits for them, and what is ready before passes it. Units run ahead of the order of
the plan only as far as there is room for what they allocate. The result depends on the units alone.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from ...messages.units import size_of
from ...state.outline import count
from .costs import SYNC, WORKSPACE
from .units import Clocks, Memory, Unit, predecessors

__all__ = ["Place", "Timeline", "in_line", "listed", "longest_way"]

_MUCH = 2**20  # bytes from which a lane waits for memory that is about to be free


@dataclass(frozen=True, slots=True)
class Place:
    """Where and when a unit runs.

    Attributes:
      unit: Its number in the plan.
      lane: Its lane.
      waits: Numbers of units on other lanes that the lane waits for before it.
      frees: Memory that is free after it.
      start: Estimated microseconds from the beginning of the step.
      end: Likewise.
    """

    unit: int
    lane: int
    waits: tuple[int, ...] = ()
    frees: tuple[Memory, ...] = ()
    start: float = 0.0
    end: float = 0.0


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
        sizes = {memory: nbytes for unit in self.units for memory, nbytes in unit.made.items()}
        changes: dict[int, list[int]] = {}
        for place in self.places:
            own = changes.setdefault(place.lane, [])
            own.append(sum(self.units[place.unit].made.values()))
            own.append(-sum(sizes[memory] for memory in place.frees))
        return sum(max(itertools.accumulate(own)) for own in changes.values())

    @property
    def taken(self) -> int:
        """Bytes of temporaries, and of workspaces for products: cuBLAS takes one for each stream."""
        return self.peak + WORKSPACE * len({p.lane for p in self.places if self.units[p.unit].product})

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
            + f"{size_of(max(self.taken - line.taken, 0))} of temporaries in addition, workspaces for products included"
        )

    def collectives(self, shown: int = 12) -> list[str]:
        """Return what collectives run beside, one line each, in their order, after a line that adds them up."""
        links = [place for place in self.places if self.units[place.unit].link]
        others = [place for place in self.places if not self.units[place.unit].link]
        lines, alone = [], 0.0
        for link in links:
            beside = [one for one in others if one.start < link.end and one.end > link.start]
            alone += _uncovered(link, beside)
            calls = Counter(self.units[one.unit].name for one in beside)
            names = [f"{name} x{times}" if times > 1 else name for name, times in calls.most_common(3)]
            more = [f"{calls.total() - sum(n for _, n in calls.most_common(3)):,} more"] * (len(calls) > 3)
            name = self.units[link.unit].name.partition("_into")[0].partition("_tensor")[0]
            lines.append(
                f"  {link.start:,.0f} to {link.end:,.0f} us: {name}, beside {', '.join([*names, *more]) or 'no call'}"
            )
        total = sum(link.end - link.start for link in links)
        head = f"{count(len(links), 'collective')}, estimated {total:,.0f} us, {alone:,.0f} us of them beside no call"
        rest = [f"  … and {len(links) - shown:,} more"] * (len(links) > shown)
        return [head, *lines[:shown], *rest]


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
    # On one lane, only a collective is waited for.
    collects = any(unit.link for unit in units)
    before: Sequence[Sequence[int]] = predecessors(units) if collects else [()] * len(units)
    places: list[Place] = []
    now = link = 0.0
    for number, unit in enumerate(units):
        arrived = max((places[one].end for one in before[number] if units[one].link), default=0.0)
        start = max(now, arrived, link if unit.link else 0.0)
        end = start + unit.micros
        now, link = (now, end) if unit.link else (end, link)
        places.append(Place(number, 0, start=start, end=end))
    return Timeline(units, list(_ordered(units, places, before, kept)), 1)


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
    places = _assigned(units, before, lanes, ahead)
    used = {lane: number for number, lane in enumerate(sorted({0, *(place.lane for place in places)}))}
    places = [replace(place, lane=used[place.lane]) for place in places]
    much = _MUCH if frugal else math.inf
    return Timeline(units, list(_ordered(units, places, before, kept, much)), len(used))


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
    """What units that run ahead of the order of the plan allocate, as long as others have yet to touch it.

    The first unit that has not run may always run: so there is always one that may, and at most ``limit`` bytes are
    taken in addition to what the line has at that unit.
    """

    def __init__(self, units: Sequence[Unit], limit: float) -> None:
        self._units, self._limit = units, limit
        self._front, self._taken = 0, 0
        self._done: set[int] = set()
        self._ahead: dict[Memory, int] = {}
        self._touching = Counter(memory for unit in units for memory in unit.reads | unit.writes)

    def has(self, number: int) -> bool:
        """Whether there is room for a unit."""
        made = sum(self._units[number].made.values())
        return not made or number == self._front or self._taken + made <= self._limit

    def run(self, number: int) -> None:
        """Take note of a unit that was assigned."""
        unit = self._units[number]
        self._ahead |= unit.made
        self._taken += sum(unit.made.values())
        for memory in unit.reads | unit.writes:
            self._touching[memory] -= 1
            if not self._touching[memory]:
                self._taken -= self._ahead.pop(memory, 0)
        self._done.add(number)
        while self._front in self._done:
            self._taken -= sum(self._ahead.pop(memory, 0) for memory in self._units[self._front].made)
            self._front += 1


def _assigned(
    units: Sequence[Unit], before: Sequence[Sequence[int]], lanes: int, ahead: float
) -> list[Place]:
    """Return where and when each unit runs, in the order in which lanes take them up; see :func:`listed`."""
    after, left = _ways(units, before)
    links = int(any(unit.link for unit in units))
    queues = _Queue(range(lanes - links)), _Queue(range(lanes - links, lanes))
    places: dict[int, Place] = {}
    free, room, held, now = [0.0] * lanes, _Room(units, ahead), list[int](), 0.0
    waiting = [len(needed) for needed in before]
    for number in (n for n in range(len(units)) if not waiting[n]):
        heapq.heappush(queues[units[number].link].coming, (0.0, number))
    while len(places) < len(units):
        queue = min(queues, key=lambda one: one.next(free))
        now = max(now, queue.next(free))
        while queue.coming and queue.coming[0][0] <= now + SYNC:
            _, number = heapq.heappop(queue.coming)
            heapq.heappush(queue.ready, (-left[number], number))
        _, number = heapq.heappop(queue.ready)
        if not room.has(number):
            held.append(number)
            continue
        lane, begin = _best([places[one] for one in before[number]], queue.lanes, free)
        start = max(begin, now)
        places[number] = Place(number, lane, start=start, end=start + units[number].micros)
        free[lane] = places[number].end
        room.run(number)
        for one in filter(room.has, tuple(held)):
            held.remove(one)
            heapq.heappush(queues[units[one].link].ready, (-left[one], one))
        for one in after[number]:
            waiting[one] -= 1
            if not waiting[one]:
                done = max(places[needed].end for needed in before[one])
                heapq.heappush(queues[units[one].link].coming, (done, one))
    return [*places.values()]


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


def _best(needed: Sequence[Place], lanes: Sequence[int], free: Sequence[float]) -> tuple[int, float]:
    """Return the lane where a unit begins first, and when."""
    begins = {
        lane: max([free[lane], *(place.end + SYNC * (place.lane != lane) for place in needed)])
        for lane in lanes
    }
    latest = max(needed, key=lambda place: (place.end, place.unit), default=None)
    home = latest.lane if latest is not None else 0
    lane = min(lanes, key=lambda one: (begins[one], one != home, -free[one], one))
    return lane, begins[lane]


def _ordered(
    units: Sequence[Unit],
    places: Sequence[Place],
    before: Sequence[Sequence[int]],
    kept: frozenset[Memory],
    much: float = math.inf,
) -> Iterator[Place]:
    """Add waits, none for what a lane has waited for already, and free memory.

    A lane allocates from what it has freed itself. So memory is freed where the lane that allocated it comes after all
    units that touch it. A lane that allocates much waits for that, if it is much memory and they are done by then: by
    an estimate, so a lane that need not save memory is better off without such waits.
    """
    clocks, end = Clocks(), {place.unit: place.end for place in places}
    sizes = {memory: nbytes for unit in units for memory, nbytes in unit.made.items() if memory not in kept}
    using: dict[Memory, list[int]] = {memory: [] for memory in sizes}
    home: dict[Memory, int] = {}
    for place in places:
        for memory in (units[place.unit].reads | units[place.unit].writes) & using.keys():
            using[memory].append(place.unit)
        home |= dict.fromkeys(units[place.unit].made, place.lane)
    due: dict[int, list[Memory]] = {}
    for memory, touching in using.items():
        due.setdefault(touching[-1], []).append(memory)
    pending: dict[int, list[Memory]] = defaultdict(list)
    for place in places:
        waits, own = clocks.wait(place.lane, before[place.unit]), pending[place.lane]
        if sum(units[place.unit].made.values()) >= much:
            for memory in (one for one in own if sizes[one] >= much):
                if all(end[one] <= place.start for one in using[memory]):
                    waits += clocks.wait(place.lane, using[memory])
        clocks.run(place.lane, place.unit)
        for memory in due.get(place.unit, ()):
            pending[home[memory]].append(memory)
        free = [memory for memory in own if all(clocks.covers(place.lane, one) for one in using[memory])]
        pending[place.lane] = [memory for memory in own if memory not in free]
        yield Place(place.unit, place.lane, tuple(sorted(waits)), tuple(free), place.start, place.end)
