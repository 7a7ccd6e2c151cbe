"""Refuse a schedule with a race: the last word on what a capture will run.

It knows the final schedule alone: what runs on which lane, in which order, what waits for what, what is freed when.
"""

from __future__ import annotations

from ...errors import CaptureError
from .listing import Timeline
from .units import Clocks, Memory

__all__ = ["refuse_races"]


def refuse_races(timeline: Timeline, name: str) -> None:
    """Check that units that touch the same memory, and one of them writes it, run in the order of the plan.

    Args:
      timeline: The schedule.
      name: Name of the user's function.
    Raises:
      CaptureError: If they may run at the same time, or in another order; or if memory is freed that a unit may
        still touch.
    """
    units, clocks, run = timeline.units, Clocks(), set[int]()
    if sorted(place.unit for place in timeline.places) != list(range(len(units))):
        raise _error(name, "a unit of work is missing, or runs twice")
    writer: dict[Memory, int] = {}
    readers: dict[Memory, list[int]] = {}  # since then
    home: dict[Memory, int | None] = {}  # the lane that allocated it; None once it is free
    for place in timeline.places:
        unit = units[place.unit]
        if not run.issuperset(place.waits):
            raise _error(name, f"{unit.name} waits for what runs later")
        clocks.wait(place.lane, place.waits)
        for memory in unit.reads | unit.writes:
            others = [writer[memory]] if memory in writer else []
            others += readers.get(memory, ()) if memory in unit.writes else ()
            for other in others:
                if other > place.unit or not clocks.covers(place.lane, other):
                    raise _error(name, f"{units[other].name} and {unit.name} touch the same memory")
            if home.get(memory, place.lane) is None:
                raise _error(name, f"{unit.name} touches memory that is free")
        clocks.run(place.lane, place.unit)
        run.add(place.unit)
        home |= dict.fromkeys(unit.made, place.lane)
        for memory in unit.writes:
            writer[memory], readers[memory] = place.unit, []
        for memory in unit.reads - unit.writes:
            readers.setdefault(memory, []).append(place.unit)
        for memory in place.frees:
            touching = [writer[memory], *readers[memory]] if memory in writer else readers.get(memory, [])
            here = home.get(memory) == place.lane
            if not here or not all(clocks.covers(place.lane, other) for other in touching):
                raise _error(name, f"memory is free after {unit.name}, but may still be in use")
            home[memory] = None


def _error(name: str, found: str) -> CaptureError:
    return CaptureError.of(
        name,
        f"the branches of its graph are not ordered: {found}; the state is unchanged.",
        why="The result would depend on which of them the device finishes first.",
        fix="`branches=1` runs the step in one line. Please report it: this is a mistake of the library.",
    )
