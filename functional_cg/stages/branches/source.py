"""Write the code that a capture runs: units in the order of a schedule, and what lanes and a rehearsal must know."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from .listing import Timeline
from .units import Memory, Unit

__all__ = ["Defined", "on_lanes", "pairs"]

Defined = Sequence[tuple[Memory, str]]  # memory, and the name of a value in it


def on_lanes(
    timeline: Timeline,
    variables: Mapping[Memory, Collection[str]],
    defined: Mapping[Unit, Defined],
    *,
    rehearsed: bool,
    entering: Sequence[str] = (),
) -> Iterator[tuple[str, Unit | None]]:
    """Yield the lines of a schedule, each with its unit if it belongs to one.

    They use the names ``on``, ``wait`` and ``record`` of the lanes, and ``units``, ``places`` and ``rehearsal``.

    Args:
      timeline: The schedule.
      variables: For memory that is freed, the names that keep it alive.
      defined: What each unit defines.
      rehearsed: Whether a rehearsal is told of all that is defined and freed.
      entering: What each lane runs when it goes on.
    """
    lane = 0
    for line in entering:
        yield line, None
    for position, place in enumerate(timeline.places):
        unit = timeline.units[place.unit]
        if place.lane != lane:
            lane = place.lane
            for line in (f"on({lane})", *entering):
                yield line, None
        for one in place.waits:
            yield f"wait({one})", None
        for line in unit.lines:
            yield line, unit
        if rehearsed:
            yield f"rehearsal.defined(units[{place.unit}], {pairs(defined.get(unit, ()))})", None
        if place.records:
            yield f"record({place.unit})", None
        dead = [name for memory in place.frees for name in variables[memory]]
        if dead:
            yield f"del {', '.join(dict.fromkeys(dead))}", None
        if rehearsed:
            yield f"rehearsal.freed(places[{position}].frees)", None


def pairs(defined: Defined) -> str:
    """Return the source of what is defined, as a rehearsal gets it."""
    return f"[{', '.join(f'({memory!r}, {name})' for memory, name in defined)}]"
