"""What a plan of ATen calls takes from the allocator and gives back, in order, as far as it is large."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate

from ..branches.listing import Timeline
from ..branches.units import GIVEN, Memory
from ..plan import Plan
from ..program import Instr
from ..sub_programs import SubProgram, each_once
from ..work import beside, flops_of

__all__ = ["LARGE", "Event", "events", "highest", "multiplies"]

Event = tuple[Memory, int]  # memory, and its bytes: negative where it is freed

LARGE = 2**20  # above which a value lies in a segment for large ones
_BESIDE = -1  # in place of memory: what a kernel takes while it runs


def events(plan: Plan) -> list[Event]:
    """Return when a plan allocates and frees its large temporaries, in order; not the workspace of products."""
    inside = {
        sub_program: list(_along(line, {}, dict.fromkeys((var.storage for var in sub_program.given), 0)))
        for sub_program, line in plan.sub_programs.items()
    }
    return list(_along(plan.timeline, inside, {}))


def highest(found: Sequence[Event]) -> int:
    """Return the most bytes that live at one time."""
    return max(accumulate(size for _, size in found), default=0)


def multiplies(plan: Plan) -> bool:
    """Whether a plan multiplies matrices."""
    return any(map(flops_of, each_once([*plan.schedule.head, *plan.schedule.fused])))


def _along(
    timeline: Timeline, inside: Mapping[SubProgram, Sequence[Event]], alive: dict[Memory, int]
) -> Iterator[Event]:
    """Yield what units allocate and free.

    Args:
      timeline: The units.
      inside: What sub-programs allocate and free; what they are given they free with 0 bytes.
      alive: The memory that is there, with its bytes.
    """
    handed: Collection[Memory] = ()
    for place in timeline.places:
        unit = timeline.units[place.unit]
        if unit.call is not None and isinstance(unit.call.op, SubProgram):
            yield from _again(unit.call, inside[unit.call.op], handed, alive)
        else:
            large = {memory: size for memory, size in unit.made.items() if size > LARGE}
            yield from large.items()
            alive |= large
            if unit.call is not None and (size := beside(unit.call)) > LARGE:
                yield from ((_BESIDE, size), (_BESIDE, -size))
        handed = place.frees if GIVEN in unit.writes else ()
        for memory in () if handed or unit.commits else place.frees:
            if memory in alive:
                yield memory, -alive.pop(memory)


def _again(
    instr: Instr, inside: Sequence[Event], handed: Collection[Memory], alive: dict[Memory, int]
) -> Iterator[Event]:
    """Yield what a call of a sub-program allocates and frees: its function frees what is handed over to it.

    Args:
      instr: The call.
      inside: What the sub-program allocates and frees.
      handed: The memory that nobody else holds.
      alive: As for :func:`_along`.
    """
    sub_program, (given, _, later) = instr.op, instr.args
    lies = {mine.storage: var.storage for mine, var in zip(sub_program.results, instr.out, strict=True)}
    lies |= {mine.storage: var.storage for mine, var in zip(sub_program.given, given, strict=True)}
    last = {lies[one]: number for number, (one, size) in enumerate(inside) if not size}
    for number, (one, size) in enumerate(inside):
        if one not in lies:
            yield (one if one == _BESIDE else one + later), size
        elif size:
            alive[lies[one]] = size
            yield lies[one], size
        elif lies[one] in handed and lies[one] in alive and last[lies[one]] == number:
            yield lies[one], -alive.pop(lies[one])
