"""Whether a step runs in branches, and on how many lanes: where that pays, and takes little memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from .listing import Timeline, listed
from .units import Memory, Unit

__all__ = ["Branches", "choose", "slack"]

Branches = Literal["auto"] | int

_MOST = 8  # lanes, if nobody asks for more
_GAIN = 1.2  # the least estimated gain that is worth it: measured gains are a fifth to a half of it
_MORE = 1.03  # and that of further lanes
_SLACK = 0.05  # of the memory of a step, which branches may take in addition
_ALWAYS = 3 * 2**26  # bytes that they may take in any case: workspaces for some lanes


def choose(units: Sequence[Unit], kept: frozenset[Memory], *, asked: Branches, held: int) -> Timeline:
    """Choose a schedule: of those within bounds the fastest, on as few lanes as that takes.

    Args:
      units: The units.
      kept: Memory that leaves the step.
      asked: The option: the most lanes, or ``"auto"``.
      held: Bytes that the step holds besides temporaries.
    """
    line = listed(units, 1, kept)
    why = next((unit.fixed for unit in units if unit.fixed), "")
    if asked == 1 or why:
        return replace(line, why=why)
    ahead = slack(line, held)
    if asked != "auto":
        best = listed(units, asked, kept, ahead)
        return best if best.lanes > 1 else replace(line, why="each call needs the one before")
    room = line.peak + line.workspaces + ahead
    best = line
    for lanes in range(2, _MOST + 1):
        one = listed(units, lanes, kept, ahead)
        gain = _GAIN if best is line else _MORE
        if one.peak + one.workspaces <= room and one.micros * gain <= best.micros:
            best = one
    return best if best is not line else replace(line, why="since they would gain less than they cost")


def slack(line: Timeline, held: int) -> float:
    """Return the bytes that a step may take in addition to those of a line.

    Args:
      line: The line.
      held: Bytes that the step holds besides temporaries.
    """
    return max(_SLACK * (held + line.peak), _ALWAYS)
