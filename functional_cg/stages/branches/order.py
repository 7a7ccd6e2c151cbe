"""Choose the order of a program's calls so that collectives run beside them.

A collective takes the link between ranks, other calls the device. Of the calls that may run next, that with the longest
way to the end of the step comes first: so the gradient of a weight waits for the time of a collective, unless its own
reduction is what the step waits for next. The order is a part of the program, whichever way that is lowered, and the
ranks compare it before a capture.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ..program import Instr, Program
from ..schedule import live_instrs
from .choice import allowance
from .costs import weigh
from .listing import Timeline, in_line, listed
from .races import refuse_races
from .units import LINK, Unit, units_of

__all__ = ["beside_collectives", "launches_of"]

_GAIN = 1.01  # the least estimated gain of another order: unlike lanes, it takes no workspaces and no waits


def launches_of(program: Program) -> list[Unit]:
    """Return the calls of a program as units, with what each probably takes in a compiled function."""
    return _weighed(program, fused=True)[1]


def _weighed(program: Program, *, fused: bool) -> tuple[Unit, list[Unit]]:
    """Return the calls of a program as units: views of what is there before all others, and the others.

    The link is no memory here: what occupies it is what the order is chosen for.
    """
    first, units = units_of(live_instrs(program), {})
    weigh(units, fused=fused)
    for unit in units:
        unit.writes -= {LINK}
    return first, units


def beside_collectives(program: Program, device: torch.device, held: int, memory: int | None = None) -> None:
    """Put the calls of a program with collectives into a better order, if one is known; note the order in the program.

    Args:
      program: A rewritten program.
      device: Where it runs.
      held: Bytes that the step holds besides temporaries.
      memory: The most bytes that calls take that run ahead of others; None for a share of the step's.
    """
    first, units = _weighed(program, fused=False)
    if not any(unit.link for unit in units) or any(unit.fixed for unit in units):
        return
    kept = frozenset(var.storage for var in (*program.results, *(new for _, new in program.updates)))
    line = in_line(units, kept)
    more = allowance(line, held, memory)
    found = listed(units, 2, kept, more)
    chosen = [units[place.unit] for place in found.places]
    if in_line(chosen, kept).peak > line.peak + more or found.micros * _GAIN > line.micros:
        program.notes.append("\n".join(["order: as traced", *_indented(line)]))
        return
    refuse_races(found, program.function)
    program.instrs = first.calls + list(_emitted(chosen, at_once=device.type == "cpu"))
    head = f"order: chosen, estimated {found.micros:,.0f} us, as traced {line.micros:,.0f} us"
    program.notes.append("\n".join([head, *_indented(found)]))


def _indented(timeline: Timeline) -> list[str]:
    return [f"  {text}" for text in timeline.collectives()]


def _emitted(units: Sequence[Unit], *, at_once: bool) -> Iterator[Instr]:
    """Yield the calls of units; a collective is waited for before the first call that touches what it touches.

    Args:
      units: The units, in their new order.
      at_once: Whether it is waited for at once.
    """
    under_way: list[Unit] = []
    for unit in units:
        touched = unit.reads | unit.writes
        late = [one for one in under_way if one.writes & touched or one.reads & unit.writes]
        for one in late:
            yield from one.calls[1:]
        under_way = [one for one in under_way if one not in late]
        if unit.link and not at_once:
            yield unit.calls[0]
            under_way.append(unit)
        else:
            yield from unit.calls
    for one in under_way:
        yield from one.calls[1:]
