"""Buffers of modules whose values a trace takes as known, because the step never writes them.

A forward may ask the host for a flag that it keeps in a buffer, such as whether a quantiser is on. The trace reads it
from the state that the step was called with, and the program says so: a call with a state that holds another value
does not fit it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from ...errors import HostSyncError
from ...messages.source import Location, user_frame
from ..program import Constant, Program, Var, written_storages
from .known import aside_from_modes

__all__ = ["Supposed"]


class Supposed:
    """What one trace has supposed.

    Args:
      program: The program, which lists the suppositions.
      value: Returns what a slot holds; None if nobody knows.
      buffers: Returns the variables of the buffers that modules were given.
    """

    def __init__(
        self,
        program: Program,
        value: Callable[[int], Tensor | None],
        buffers: Callable[[], Iterable[Var | None]],
    ) -> None:
        self._program, self._value, self._buffers = program, value, buffers
        self._sites: dict[str, str] = {}

    def value_of(self, var: Var) -> Tensor | None:
        """Return what a variable holds if it is a slot, and a buffer that a module was given; else None."""
        found = next((one for one in self._program.suppositions if one.var == var), None)
        if found is None and var in self._program.slots and var in self._buffers():
            number = self._program.slots.index(var)
            value = aside_from_modes(lambda: self._value(number))
            if value is not None:
                found = Constant(var, value, self._program.slot_names[number])
                self._program.suppositions.append(found)
                self._sites[found.name] = _site()
        return None if found is None else found.value

    def refuse_written(self) -> None:
        """Raise if the step changes a buffer whose value it was traced with.

        Raises:
          HostSyncError: Naming the buffer and the line that asked for its value.
        """
        program, written = self._program, written_storages(self._program.instrs)
        for one in program.suppositions:
            number = program.slots.index(one.var)
            returned = program.new_state[number] if number < len(program.new_state) else one.var
            if _place(returned) != _place(one.var) or one.var.storage in written:
                raise HostSyncError.of(
                    program.function,
                    f"asks for the value of `{one.name}` on the host, and changes it.",
                    rows=[self._sites[one.name]],
                    why="Replay repeats kernels, not Python: what is decided now would be decided for ever.",
                    fix="compute both sides and select, `torch.where(flag, a, b)`; if it is set once, as by an "
                    "initialisation from data, run the module on a first batch before `from_module`.",
                )


def _place(var: Var) -> Any:
    return var.storage, var.offset, var.spec


def _site() -> str:
    frame = user_frame()
    return str(Location(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)) if frame else ""
