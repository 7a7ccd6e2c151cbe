"""Check that a state holds the values with which a step was traced.

A trace may read a buffer on the host that the step never changes. Whether a state still holds the value is clear from
its generation while only this step has updated it; else its value is compared, which waits for the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Self

from ..call.signature import Call, StateArgument, on_host
from ..errors import BakedValueError
from ..stages.program import Constant, Program
from ..state.arena import Arena

__all__ = ["Supposed", "refuse_other_values"]

_SHOWN = 8  # elements


def refuse_other_values(program: Program, call: Call) -> None:
    """Raise if a state does not hold a value with which the step was traced.

    Raises:
      BakedValueError: Naming each buffer.
    """
    rows = []
    for one in program.suppositions:
        value = call.value(program.slot_names.index(one.name))
        if value is None or not one.holds(value):
            rows.append(f"{one.name}  traced with {_text(one.value)}   got {_text(value)}")
    if rows:
        raise BakedValueError.of(
            program.function,
            "is called with another value of a buffer that it reads on the host; the state is unchanged.",
            rows=rows,
            why="Python runs when the step is traced, not when it is replayed: it went on with the old value.",
            fix="make a step for the new value, `graph_step(fn)`; or keep the decision on the device, "
            "`torch.where(flag, a, b)`.",
        )


def _text(value: Any) -> str:
    if value is None or value.numel() > _SHOWN:
        return "other values"
    return str(value.tolist())


class Supposed:
    """The values with which a program was traced, to be compared unless only its capture has updated the states since.

    Args:
      slots: Arena and slot of each, with its value.
      positions: Those of the states among the arguments.
    """

    def __init__(self, slots: Sequence[tuple[Arena, int, Constant]], positions: Sequence[int]) -> None:
        self._slots, self._positions = slots, positions
        self._seen: list[tuple[weakref.ref[Any], int]] = []

    @classmethod
    def of(cls, program: Program, states: Sequence[StateArgument]) -> Self | None:
        """Return those of a program for its states; None if there are none."""
        slots = [(state.arena, slot) for state in states for slot in range(state.start, state.stop)]
        supposed = [(*slots[program.slot_names.index(one.name)], one) for one in program.suppositions]
        return cls(supposed, [state.position for state in states]) if supposed else None

    def holds(self, args: Sequence[Any]) -> bool:
        """Whether the states among the arguments hold them."""
        states = [args[position] for position in self._positions]
        same = len(self._seen) == len(states) and all(
            lease() is state._lease and generation == state._generation
            for (lease, generation), state in zip(self._seen, states, strict=True)
        )
        return same or all(one.holds(on_host(arena, slot)) for arena, slot, one in self._slots)

    def keep(self, args: Sequence[Any], new: Any) -> None:
        """Note that they still hold them after a call, which returned a new state in place of the first or none."""
        first, *others = (args[position] for position in self._positions)
        states = (first if new is None else new, *others)
        self._seen = [(weakref.ref(state._lease), state._generation) for state in states]
