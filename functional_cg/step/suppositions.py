"""Check that a state holds the values with which a step was traced.

A trace may read a buffer on the host that the step never changes. Whether a state still holds the value is clear from
its generation while only this step has updated it; else its value is compared, which waits for the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from ..call.signature import StateArgument, on_host
from ..errors import BakedValueError
from ..stages.program import Program

__all__ = ["Supposed"]

_SHOWN = 8  # elements


class Supposed:
    """The values with which a program was traced, to be compared unless only its capture has updated the states since.

    Args:
      program: The program.
      states: The states that it is bound to.
    """

    def __init__(self, program: Program, states: Sequence[StateArgument]) -> None:
        slots = [(state.arena, slot) for state in states for slot in range(state.start, state.stop)]
        self._values = [(one, *slots[program.slot_names.index(one.name)]) for one in program.suppositions]
        self._positions = [state.position for state in states]
        self._seen: list[tuple[weakref.ref[Any], int]] = []

    def __bool__(self) -> bool:
        return bool(self._values)

    def check(self, function: str) -> None:
        """Raise if a state holds another value.

        Raises:
          BakedValueError: Naming each buffer.
        """
        rows = []
        for one, arena, slot in self._values:
            whole = arena.plan.slots[slot].spec.placement is None
            value = on_host(arena, slot) if whole else None
            if value is None or not one.holds(value):
                rows.append(f"{one.name}  traced with {_text(one.value)}   got {_text(value)}")
        if rows:
            raise BakedValueError.of(
                function,
                "is called with another value of a buffer that it reads on the host; the state is unchanged.",
                rows=rows,
                why="Python runs when the step is traced, not when it is replayed: it went on with the old value.",
                fix="make a step for the new value, `graph_step(fn)`; or keep the decision on the device, "
                "`torch.where(flag, a, b)`.",
            )

    def holds(self, args: Sequence[Any]) -> bool:
        """Whether the states among the arguments hold them."""
        states = [args[position] for position in self._positions]
        same = len(self._seen) == len(states) and all(
            lease() is state._lease and generation == state._generation
            for (lease, generation), state in zip(self._seen, states, strict=True)
        )
        return same or all(one.holds(on_host(arena, slot)) for one, arena, slot in self._values)

    def keep(self, args: Sequence[Any], new: Any) -> None:
        """Note that they still hold them after a call, which returned a new state in place of the first or none."""
        first, *others = (args[position] for position in self._positions)
        states = (first if new is None else new, *others)
        self._seen = [(weakref.ref(state._lease), state._generation) for state in states]


def _text(value: Any) -> str:
    return "other values" if value is None or value.numel() > _SHOWN else str(value.tolist())
