"""Guards: all that a step has taken from the host when it was traced; each call asks whether it is still so.

What a replay cannot follow is refused: constants that were written, modules that were changed, modes of torch, process
groups that have ended. Of another host value it is not known whether it matters: the step is traced again, and goes on
if its program is the same.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from ..ambient.torch_modes import refuse_ambient_modes
from ..call.signature import StateArgument
from ..errors import FunctionalCGError
from ..shards.groups import Groups
from ..stages.program import Program
from ..stages.trace.twice import another_program
from ..stages.watch.host_watch import HostWatch, refusal
from .constants import Constants
from .log import log
from .suppositions import Supposed

__all__ = ["Guards"]

_OFTEN = 3  # traces that one value has caused


class Guards:
    """What a lowered step has taken from the host.

    Args:
      program: The traced calls before any rewrite.
      watch: The host values that it has read, and the modes of torch.
      declared: The declared constants.
      groups: The process groups on a GPU.

    Attributes:
      unchanged: Returns whether all is as it was, but for the values of states; a call asks it.
      watch: The host values as they were when the step was last traced.
      groups: The process groups.
    """

    def __init__(self, program: Program, watch: HostWatch, declared: Constants, groups: Groups) -> None:
        self.groups = groups
        self._program, self._function = program, program.function
        self._constants = Constants.remembered(program.function, program.tables), declared
        self._causes: Counter[str] = Counter()
        self._adopt(program, watch)

    def _adopt(self, program: Program, watch: HostWatch) -> None:
        originals = dict.fromkeys(one.original for one in program.applications)
        self.watch, self._fixed = watch, [*originals, *filter(None, (*self._constants, self.groups))]
        every = [one.unchanged for one in (watch, *self._fixed)]
        self.unchanged: Callable[[], bool] = functools.reduce(_both, every)

    def check(self, states: Sequence[StateArgument], again: Callable[[], tuple[Program, HostWatch]]) -> bool:
        """Raise if the host has changed such that the step would do something else now.

        Args:
          states: The states of the call.
          again: Traces the step for the call.
        Returns:
          Whether it was traced again.
        Raises:
          BakedValueError: Naming each value, as traced and as it is now, and what the step does now. If a first call
            would be refused for that, its error is the cause.
        """
        changed: list[tuple[str, object, object]] = []
        if not self.unchanged():
            refuse_ambient_modes(self._function)
            for one in self._fixed:
                one.check(self._function)
            # What changed before without effect comes last: the fix is for the first.
            changed = sorted(self.watch.differences(), key=lambda row: self._causes[row[0]])
            # A trace tells nothing of modes: kernels read them.
            if modes := self.watch.other_modes():
                raise refusal(self._function, changed + modes)
        Supposed(self._program, states).check(self._function)
        if changed:
            self._confirm(changed, again)
        return bool(changed)

    def _confirm(
        self, changed: Sequence[tuple[str, Any, Any]], again: Callable[[], tuple[Program, HostWatch]]
    ) -> None:
        """Trace the step again; take what it reads now for what it has read, if the program is the same."""
        start = time.perf_counter()
        try:
            program, watch = again()
        except FunctionalCGError as error:  # what a first call is refused for
            text = str(error).partition("\n")[0].removeprefix(f"`{self._function}`: ")
            raise refusal(self._function, changed, [f"the step now {text}"]) from error
        if difference := another_program(self._program, program):
            rows = [f"{name}  traced {one}   now {other}" for name, one, other in difference.rows[:1]]
            raise refusal(self._function, changed, rows)
        self._adopt(program, watch)
        if (
            not watch.unchanged()
        ):  # it is another value while a step is traced, as a collector that is switched off
            raise refusal(self._function, watch.differences())
        names = list(dict.fromkeys(name for name, *_ in changed))
        self._causes.update(names)
        often = [name for name in names if self._causes[name] == _OFTEN]
        if often:
            log.warning(
                "%s: %s changed before each of %d calls, and the step reads it: such a call traces the step again, "
                "%.2f s, to see that it does the same. To fix: pass it as an input, or do not read it in the step.",
                self._function,
                ", ".join(f"`{name}`" for name in often),
                _OFTEN,
                time.perf_counter() - start,
            )


def _both(one: Callable[[], bool], two: Callable[[], bool]) -> Callable[[], bool]:
    return lambda: one() and two()
