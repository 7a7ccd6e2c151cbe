"""Tell forward, backward and update of a step apart."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from ...stages.program import Instr

__all__ = ["PHASES", "Phase", "phases"]

Phase = Literal["forward", "backward", "update"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "update")


def phases(instrs: Iterable[Instr]) -> dict[Instr, Phase]:
    """Return the phase of each call.

    Calls of autograd's backward are the backward, what it recomputes included. Calls of an optimizer are the update,
    and so is all that is computed from gradients where nothing is differentiated: a clip, a norm, an update by hand.
    The rest is the forward; a module's calls are, even if its parameters were updated in the same step.
    """
    found: dict[Instr, Phase] = {}
    after: set[int] = set()  # storages of what was computed from gradients
    for instr in instrs:
        late = not after.isdisjoint(var.storage for var in instr.inputs())
        if instr.backward:
            found[instr] = "backward"
        elif instr.origin.forward:
            found[instr] = "forward"
        else:
            found[instr] = "update" if late or instr.inner else "forward"
        if instr.backward or late:
            after.update(var.storage for var in (*instr.outputs(), *instr.writes))
    return found
