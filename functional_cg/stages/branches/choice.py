"""Whether a step runs in branches, and on how many lanes: where that pays, and takes little memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from ...messages.units import size_of
from .listing import Timeline, in_line, listed, longest_way
from .units import Memory, Unit

__all__ = ["Branches", "allowance", "choose", "in_advance"]

Branches = Literal["auto"] | int

_MOST = 8  # lanes, if nobody asks for more
_GAIN = 1.2  # the least estimated gain that is worth it: measured gains are a fifth to a half of it
_MORE = 1.03  # and that of further lanes
_SHARE = 0.05  # of the memory of a step, which branches may take in addition
_ALWAYS = 2**26  # bytes that they may take in any case: one more workspace, and as much for temporaries
_LITTLE = "since they would gain less than they cost"
_CHAIN = "each call needs the one before"


def choose(
    units: Sequence[Unit],
    kept: frozenset[Memory],
    *,
    asked: Branches,
    held: int,
    memory: int | None = None,
) -> Timeline:
    """Choose a schedule: of those within bounds the fastest, on as few lanes as that takes.

    Args:
      units: The units.
      kept: Memory that leaves the step.
      asked: The option: the most lanes, or ``"auto"``.
      held: Bytes that the step holds besides temporaries.
      memory: The option: the most bytes that lanes take in addition; None for a share of the step's with ``"auto"``,
        and otherwise for as many as they take.
    """
    line = in_line(units, kept)
    if why := in_advance(line, asked):
        return replace(line, why=why)
    more = allowance(line, held, memory)
    room = line.taken + more if asked == "auto" or memory is not None else math.inf
    best, why = line, _LITTLE if asked == "auto" else _CHAIN
    for lanes in range(2, _MOST + 1) if asked == "auto" else range(asked, 1, -1):
        tried = (listed(units, lanes, kept, more, frugal=frugal) for frugal in (False, True))
        one = next((one for one in tried if one.taken <= room), None)
        if one is None:
            why = f"more lanes would take over {size_of(int(more))} of memory"
        elif asked != "auto":
            return one if one.lanes > 1 else replace(line, why=why)
        elif one.micros * (_GAIN if best is line else _MORE) <= best.micros:
            best = one
    return replace(best, estimated=True) if best is not line else replace(line, why=why)


def in_advance(line: Timeline, asked: Branches) -> str:
    """Return why units run in one line, whatever a schedule might be; empty if only a schedule can tell.

    No schedule takes less than the longest way through the units, nor less than what keeps the whole device busy.

    Args:
      line: The units in a line.
      asked: The option: the most lanes, or ``"auto"``.
    """
    if why := next((unit.fixed for unit in line.units if unit.fixed), ""):
        return why
    longest = longest_way(line.units)
    if asked != "auto":
        return _CHAIN if longest >= sum(unit.micros for unit in line.units) else ""
    return _LITTLE if max(longest, sum(unit.busy for unit in line.units)) * _GAIN > line.micros else ""


def allowance(line: Timeline, held: int, memory: int | None) -> float:
    """Return the bytes that a step may take in addition to those of a line.

    Args:
      line: The line.
      held: Bytes that the step holds besides temporaries.
      memory: The option; None for a share of the step's memory.
    """
    return max(_SHARE * (held + line.taken), _ALWAYS) if memory is None else memory
