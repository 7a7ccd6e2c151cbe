"""Whether a step runs in branches, and on how many lanes: where that pays, and takes little memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from .listing import Timeline, listed
from .units import Memory, Unit

__all__ = ["Branches", "choose"]

Branches = Literal["auto"] | int

_MOST = 8
_GAIN = 1.1  # the least estimated gain that is worth it: estimates are rough
_SLACK = 0.05  # of the memory of a step
_ALWAYS = 2**26  # bytes


def choose(units: Sequence[Unit], kept: frozenset[Memory], *, asked: Branches, held: int) -> Timeline:
    """Choose a schedule: of those within bounds the fastest, on as few lanes as that takes.

    Args:
      units: The units.
      kept: Memory that leaves the step.
      asked: The option: the most lanes, or ``"auto"``.
      held: Bytes that the step holds besides temporaries.
    """
    line = listed(units, 1, kept)
    if asked == 1 or not all(unit.movable for unit in units):
        return line
    if asked != "auto":
        return listed(units, asked, kept)
    room = line.peak + max(_SLACK * (held + line.peak), _ALWAYS)
    best = line
    for lanes in range(2, _MOST + 1):
        one = listed(units, lanes, kept)
        if one.peak <= room and one.micros * (_GAIN if best is line else 1.03) <= best.micros:
            best = one
    return best
