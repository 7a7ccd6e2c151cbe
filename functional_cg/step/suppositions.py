"""Check that a state holds the values with which a step was traced.

A trace may read a buffer on the host that the step never changes. Whether a state still holds the value is clear from
its generation while only this step has updated it; else its value is compared, which waits for the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from ..call.signature import Call, on_host
from ..concurrency.turns import Inner
from ..errors import BakedValueError
from ..stages.program import Program
from ..stages.run.replay import MISS, Bound
from ..state.handle import Handle

__all__ = ["on_same_values", "refuse_other_values"]

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


def on_same_values(run: Inner, program: Program, bound: Sequence[Bound]) -> Inner:
    """Restrict a capture's fast path to states that only it has updated since their values were compared.

    Args:
      run: ``run(args, kwargs)``; for any other state it now returns MISS, and so leaves it to the slow path.
      program: What was captured.
      bound: Its states.
    """
    if not program.suppositions:
        return run
    slots = [(b.arena, slot) for b in bound for slot in range(b.start, b.stop)]
    supposed = [(*slots[program.slot_names.index(one.name)], one) for one in program.suppositions]
    seen: list[tuple[weakref.ref[Any], int]] = []

    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) <= max(b.position for b in bound):
            return MISS
        states = [args[b.position] for b in bound]
        if not all(b.accepts(state) for b, state in zip(bound, states, strict=True)):
            return MISS
        now = [(state._lease, state._generation) for state in states]
        same = len(seen) == len(now) and all(
            lease() is here and generation == there
            for (lease, generation), (here, there) in zip(seen, now, strict=True)
        )
        if not same and not all(one.holds(on_host(arena, slot)) for arena, slot, one in supposed):
            return MISS
        result = run(args, kwargs)
        if result is not MISS:
            new = result[0] if isinstance(result[0], Handle) else states[0]
            after = [new, *states[1:]]
            seen[:] = [(weakref.ref(state._lease), state._generation) for state in after]
        return result

    return call
