"""Refuse a schedule with a race: the last word on what a capture will run.

It knows the final schedule alone: what runs on which lane, in which order, what waits for what, what is freed when.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...errors import CaptureError
from .listing import Place, Timeline
from .units import Memory

__all__ = ["refuse_races"]

Clock = dict[int, int]  # by lane, how many of its units have run


def refuse_races(timeline: Timeline, name: str) -> None:
    """Check that units that touch the same memory, and one of them writes it, run in the order of the plan.

    Args:
      timeline: The schedule.
      name: Name of the user's function.
    Raises:
      CaptureError: If they may run at the same time, or in another order; or if memory is freed that a unit may
        still touch.
    """
    order, plan = [place.unit for place in timeline.places], list(range(len(timeline.units)))
    if sorted(order) != plan:
        raise _error(name, "a unit of work is missing, or runs twice")
    if timeline.lanes == 1 and order == plan:  # nothing can be out of order
        _refuse_early_frees(timeline, name)
        return
    after: dict[int, Clock] = {}  # by unit: what has run once it has
    recorded: set[int] = set()
    lanes: dict[int, Clock] = {}
    written: dict[Memory, Place] = {}
    touched: dict[Memory, list[Place]] = {}  # since then
    allocated: dict[Memory, int] = {}
    for place in timeline.places:
        unit, clock = timeline.units[place.unit], dict(lanes.get(place.lane, {}))
        for one in place.waits:
            if one not in recorded:
                raise _error(name, f"{unit.name} waits for what runs later, or is not recorded")
            clock = {lane: max(clock.get(lane, 0), after[one].get(lane, 0)) for lane in clock | after[one]}
        for memory in unit.reads | unit.writes:
            known = [*touched.get(memory, ())] if memory in unit.writes else []
            known += [written[memory]] if memory in written else []
            for other in known:
                if other.unit > place.unit or not _covers(clock, after[other.unit], other.lane):
                    raise _error(
                        name, f"{timeline.units[other.unit].name} and {unit.name} touch the same memory"
                    )
            if allocated.get(memory) == -1:
                raise _error(name, f"{unit.name} touches memory that is free")
        clock[place.lane] = clock.get(place.lane, 0) + 1
        lanes[place.lane] = after[place.unit] = clock
        if place.records:
            recorded.add(place.unit)
        allocated |= dict.fromkeys(unit.made, place.lane)
        for memory in unit.writes:
            written[memory], touched[memory] = place, []
        for memory in unit.reads - unit.writes:
            touched.setdefault(memory, []).append(place)
        for memory in place.frees:
            used = [*touched.get(memory, ()), *([written[memory]] if memory in written else [])]
            here = allocated.get(memory) == place.lane
            if not here or not all(_covers(clock, after[other.unit], other.lane) for other in used):
                raise _error(name, f"memory is free after {unit.name}, but may still be in use")
            allocated[memory] = -1


def _refuse_early_frees(timeline: Timeline, name: str) -> None:
    free = set[Memory]()
    for place in timeline.places:
        unit = timeline.units[place.unit]
        if not (free.isdisjoint(unit.reads) and free.isdisjoint(unit.writes)):
            raise _error(name, f"{unit.name} touches memory that is free")
        free.update(place.frees)


def _covers(clock: Mapping[int, int], other: Mapping[int, int], lane: int) -> bool:
    """Whether what has run includes the last unit of a lane in another clock."""
    return clock.get(lane, 0) >= other[lane]


def _error(name: str, found: str) -> CaptureError:
    return CaptureError.of(
        name,
        f"the branches of its graph are not ordered: {found}; the state is unchanged.",
        why="The result would depend on which of them the device finishes first.",
        fix="`branches=1` runs the step in one line. Please report it: this is a mistake of the library.",
    )
