"""Choose the order of a program's calls so that collectives run beside them.

A collective takes the link between ranks, other calls the device. Of the calls that may run next, that with the longest
way to the end of the step comes first: so the gradient of a weight waits for the time of a collective, unless its own
reduction is what the step waits for next. The order is a part of the program, whichever way that is lowered, and the
ranks compare it before a capture.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..lifetimes import storage_bytes
from ..program import Instr, Program, Var
from ..schedule import live_instrs
from .choice import allowance
from .costs import weighed
from .listing import Timeline, in_line, listed
from .races import refuse_races
from .units import LINK, Memory, Unit, accesses, ordered

__all__ = ["beside_collectives", "launches_of"]

_GAIN = 1.01  # the least estimated gain of another order: unlike lanes, it takes no workspaces and no waits


@dataclass(frozen=True, slots=True)
class _Calls:
    """The calls of a program as units.

    Attributes:
      units: The units.
      views: Views of what is there before all calls.
      of: The calls of each unit: one, and the views of what it makes; of a collective, also what waits for it. A view
        that waits for another value, too, is a unit that takes no time.
    """

    units: list[Unit]
    views: list[Instr]
    of: dict[Unit, list[Instr]]

    @classmethod
    def among(cls, instrs: Sequence[Instr], *, fused: bool = False) -> _Calls:
        sizes, owner, found = storage_bytes(instrs), dict[Var, int](), cls([], [], {})
        made, marks = set[Memory](), dict[int, Memory]()
        for instr in instrs:
            owners = {owner[var] for var in instr.inputs() if var in owner}
            if instr.only_views and not owners:
                found.views.append(instr)
                continue
            if not instr.only_views or len({var.storage for var in instr.inputs()}) > 1:
                reads, writes = accesses(instr)
                number, before = len(found.units), frozenset(marks[one] for one in owners if one in marks)
                writes |= ordered(instr) - {LINK}
                unit = Unit(instr.name, [], reads | before, writes, site=instr.site)
                if instr.only_views:  # it waits for another value, too, and what reads it waits for it
                    marks[number] = f"view {number}"
                    unit.writes |= {marks[number]}
                else:
                    weighed(unit, instr, fused=fused)
                    unit.made |= {one: sizes[one] for one in writes - reads - made if one in sizes}
                    made |= unit.made.keys()
                owners = {number}
                found.units.append(unit)
                found.of[unit] = []
            owner |= dict.fromkeys(instr.outputs(), max(owners))
            found.of[found.units[max(owners)]].append(instr)
        return found


def launches_of(program: Program) -> list[Unit]:
    """Return the calls of a program as units, with what each probably takes in a compiled function."""
    return _Calls.among(live_instrs(program), fused=True).units


def beside_collectives(program: Program, device: torch.device, held: int, memory: int | None = None) -> None:
    """Put the calls of a program with collectives into a better order, if one is known; note the order in the program.

    Args:
      program: A rewritten program.
      device: Where it runs.
      held: Bytes that the step holds besides temporaries.
      memory: The most bytes that calls take that run ahead of others; None for a share of the step's.
    """
    calls = _Calls.among(live_instrs(program))
    units = calls.units
    if not any(unit.link for unit in units) or any(unit.fixed for unit in units):
        return
    kept = frozenset(var.storage for var in (*program.results, *(new for _, new in program.updates)))
    line = in_line(units, kept)
    more = allowance(line, held, memory)
    found = listed(units, 2, kept, more)
    if found.peak > line.peak + more or found.micros * _GAIN > line.micros:
        program.notes.append("\n".join(["order: as traced", *_indented(line)]))
        return
    refuse_races(found, program.function)
    ordered = [units[place.unit] for place in found.places]
    program.instrs = calls.views + list(_emitted(ordered, calls.of, at_once=device.type == "cpu"))
    head = f"order: chosen, estimated {found.micros:,.0f} us, as traced {line.micros:,.0f} us"
    program.notes.append("\n".join([head, *_indented(found)]))


def _indented(timeline: Timeline) -> list[str]:
    return [f"  {text}" for text in timeline.collectives()]


def _emitted(units: Sequence[Unit], of: Mapping[Unit, Sequence[Instr]], *, at_once: bool) -> Iterator[Instr]:
    """Yield the calls of units; a collective is waited for before the first call that touches what it touches.

    Args:
      units: The units, in their new order.
      of: The calls of each unit.
      at_once: Whether it is waited for at once.
    """
    under_way: list[Unit] = []
    for unit in units:
        touched = unit.reads | unit.writes
        late = [one for one in under_way if one.writes & touched or one.reads & unit.writes]
        for one in late:
            yield from of[one][1:]
        under_way = [one for one in under_way if one not in late]
        if unit.link and not at_once:
            yield of[unit][0]
            under_way.append(unit)
        else:
            yield from of[unit]
    for one in under_way:
        yield from of[one][1:]
