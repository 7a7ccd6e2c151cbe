"""Try a compiled plan on real values before it may commit: does it compute what the program says?

The plan is compared with the program as traced, run call by call (:mod:`functional_cg.stages.trial.judge`).

Two steps are compared, the second starting from the result of the first. The first alone hides errors: a learning rate
in warm-up is zero, an average equals the value averaged, and a write that comes too early goes unnoticed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, cast

import torch
from torch import Tensor

from ..plan import Buffers, ExecutionPlan, quiet
from ..program import Program
from .judge import Difference, Judge
from .reference import Output, Reference
from .sketch import Distance

__all__ = ["Certificate", "See", "Space", "Trial", "TrialOfFunctions"]

# Gets the calls of a function as a program, the arguments of a call, and what it returned.
See = Callable[[Program, Sequence[Tensor], Sequence[Tensor]], None]

_log = logging.getLogger("functional_cg")


@dataclass(frozen=True, slots=True)
class Certificate:
    """Whether a compiled plan was certified against its program. Prints as a line of ``explain()``.

    Attributes:
      certified: Whether it was compared and computes the same.
      why_not: Why it was not compared.
      share: The largest difference, as a fraction of what rounding explains.
    """

    certified: bool
    why_not: str = ""
    share: float = 0.0

    def __str__(self) -> str:
        if not self.certified:
            return f"not certified: {self.why_not}"
        found = (
            f"differences come to {self.share:.0%} of what rounding explains" if self.share else "bit by bit"
        )
        return f"certified: on the values of the first call it computes what its calls do one by one; {found}"


class Space(Protocol):
    """Static buffers with the values of a call, which a trial may write.

    Attributes:
      buffers: The buffers.
    """

    buffers: Buffers

    def reset(self, only: Sequence[bool] | None = None) -> None:
        """Restore the values of the call in the slots, or in some of them."""
        ...

    def room(self) -> int | None:
        """Return the bytes that the reference may take; None for no limit."""
        ...

    def host(self) -> int:
        """Return the bytes of host memory that it may take."""
        ...


class Shown(Protocol):
    """A plan whose compiled functions run several times each."""

    def watched(self, see: See) -> AbstractContextManager[None]:
        """Show some calls of each of them during a block."""
        ...


class Trial:
    """Compares a plan with its program.

    Args:
      reference: The program.
      plan: The plan.
      together: ``together(flag)`` tells whether the flag is set on any rank of this trial.

    Attributes:
      lacking: Bytes of memory that the reference lacks; if not 0, nothing was compared.
      share: The largest difference found, as a fraction of what rounding explains.
    """

    def __init__(self, reference: Reference, plan: ExecutionPlan, together: Callable[[bool], bool]) -> None:
        self._reference, self._plan, self._together = reference, plan, together
        self._judge = Judge(reference, together)
        self._ahead = 0  # steps of the plan that the slots have taken
        self._indices = [not free for free in reference.unchecked.slots]
        self._advances = any(out.slot is not None for out in reference.outputs)
        self.lacking, self.share = 0, 0.0

    def rehearse(self, buffers: Buffers, scratch: Sequence[Tensor]) -> None:
        """Compile the plan and run it once on other inputs, so that the trial exposes anything it keeps of them.

        Inputs that may hold any value are zeros; the others keep their values.

        Args:
          buffers: Static buffers with the values of the call, which are not changed.
          scratch: Slots for a warm-up.
        """
        unchecked = self._reference.unchecked.inputs
        others = [
            torch.zeros_like(one) if free else one.clone()
            for one, free in zip(buffers.inputs, unchecked, strict=True)
        ]
        other = replace(buffers, inputs=others)
        with quiet():
            self._plan.bind(other)  # compiles, for slots that do not overlap
            run = self._plan.bind(replace(other, slots=scratch))
            try:
                run(())
            except Exception as error:  # CPU kernels may refuse zeros, such as a singular matrix
                _log.debug("not rehearsed: %s", error)

    def differences(self, space: Space) -> list[Difference]:
        """Return what the plan computes differently; empty if only rounding differs, or if nothing was compared.

        Args:
          space: The buffers that the plan and the program run on.
        """
        try:
            return self._differences(space)
        finally:
            self._reference.free()

    def _differences(self, space: Space) -> list[Difference]:
        room = space.room()
        if room is not None and self._lacks(room, space.host()):
            return []
        for steps in (0, 1):
            back = partial(self._go_to, steps, space)
            back()
            wrong = self._judge.limits(partial(self._made, space), space.buffers, back)
            self.share = self._judge.share
            if self._together(bool(wrong)):
                return self._described(wrong, space, back)
            if not self._advances:
                break
        return []

    def _go_to(self, steps: int, space: Space) -> None:
        """Have the slots hold what they hold after so many steps of the plan, each of which was found right.

        Slots that may not hold any value stay as they are: nobody asked for a second step, and an index may then be
        behind the end of its table.
        """
        if self._ahead != steps:
            space.reset()
            self._ahead = 0
            for _ in range(steps):
                self._made(space)
        if steps:
            space.reset(self._indices)

    def _lacks(self, room: int, host: int) -> bool:
        takes = self._reference.fit(room, host=host)
        if not self._together(takes > room):
            return False
        self.lacking = max(takes - room, 1)
        return True

    def _made(self, space: Space) -> list[Tensor]:
        """Run the plan and return its outputs, in memory that the next run overwrites."""
        with quiet():
            metrics = self._plan.bind(space.buffers)(())
        self._ahead += 1
        return self._reference.made(metrics, space.buffers.slots)

    def _described(
        self, wrong: Mapping[int, Distance], space: Space, back: Callable[[], None]
    ) -> list[Difference]:
        """Describe the wrong outputs; runs both the plan and the program once more."""
        back()
        expected = self._judge.expected(wrong, space.buffers)
        return self._judge.described(wrong, self._made(space), expected)


class TrialOfFunctions(Trial):
    """Compares each compiled function of a plan with its calls, on what it gets in a run; all else are ATen calls.

    A function that runs for each micro-batch is compared as often whatever their number, and by each rank alone. One of
    its calls will do where memory is too little for the others.
    """

    def differences(self, space: Space) -> list[Difference]:
        found: list[Difference] = []
        lacks: dict[Program, int] = {}  # 0 for what was compared

        def see(part: Program, arguments: Sequence[Tensor], results: Sequence[Tensor]) -> None:
            outputs = [Output(f"{part.function}  {var.spec}", var) for var in part.outputs]
            reference, room = Reference(replace(part, outputs=[]), outputs), space.room()
            lack = 0 if room is None else max(reference.fit(room, host=space.host()) - room, 0)
            lacks[part] = min(lack, lacks.get(part, lack))
            if not lack:
                judge = Judge(reference, lambda flag: flag)
                found.extend(judge.differences(results, Buffers((), arguments, ())))
                self.share = max(self.share, judge.share)

        with cast("Shown", self._plan).watched(see):
            self._made(space)
        if self._together(bool(found)):
            return found
        lack = max(lacks.values(), default=0)
        if self._together(lack > 0):
            self.lacking = max(lack, 1)
        return []
