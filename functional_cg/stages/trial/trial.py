"""The trial of a compiled plan: does it compute what the program says, on real values, before it may commit anything?

The judge is the program as it was traced, run call by call (:mod:`functional_cg.stages.trial.judge`).

Two steps are compared, the second from where the first has led: at the first a learning rate that warms up is zero, an
average is what it averages, and what is written too early is not seen.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ..plan import Buffers, ExecutionPlan, quiet
from .judge import Difference, Judge
from .reference import Reference
from .sketch import Distance, sketch

__all__ = ["Certificate", "Space", "Trial"]

_log = logging.getLogger("functional_cg")


@dataclass(frozen=True, slots=True)
class Certificate:
    """Whether a compiled plan was compared with its program. It prints as a line of ``explain()``.

    Attributes:
      certified: Whether it was, and computes the same.
      why_not: Why it was not.
      share: The largest difference, in parts of what rounding explains.
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
    """Static buffers with the values of a call, in which a trial may write.

    Attributes:
      buffers: The buffers.
    """

    buffers: Buffers

    def reset(self) -> None:
        """Put the values of the call into the slots again."""
        ...

    def room(self) -> int | None:
        """Bytes that the reference may take; None if that is no matter."""
        ...


class Trial:
    """A plan beside its program.

    Args:
      reference: The program.
      plan: The plan.
      together: ``together(flag)`` says whether the flag is set here, or on another rank that does the same.

    Attributes:
      lacking: Bytes that the program takes and that there is no room for; then nothing was compared.
    """

    def __init__(self, reference: Reference, plan: ExecutionPlan, together: Callable[[bool], bool]) -> None:
        self._reference, self._plan, self._together = reference, plan, together
        self._judge = Judge(reference, together)
        self._takes = 0
        self._advances = any(out.slot is not None for out in reference.outputs)
        self.lacking = 0

    @property
    def share(self) -> float:
        """The largest difference that was found, in parts of what rounding explains."""
        return self._judge.share

    def rehearse(self, buffers: Buffers, scratch: Sequence[Tensor]) -> None:
        """Compile the plan, and run it once, on other inputs: what it keeps of them shows in the trial.

        Inputs that may hold any value are zero, and the others what they are.

        Args:
          buffers: Static buffers with the values of the call, which stay as they are.
          scratch: Slots for a warm-up.
        """
        unchecked = self._reference.unchecked.inputs
        others = [
            torch.zeros_like(one) if free else one.clone()
            for one, free in zip(buffers.inputs, unchecked, strict=True)
        ]
        other = replace(buffers, inputs=others)
        with quiet():
            self._plan.bind(other)  # compiles it, for slots that do not overlap
            run = self._plan.bind(replace(other, slots=scratch))
            try:
                run(())
            except (
                Exception
            ) as error:  # zeros may be what the host's kernels refuse, such as a singular matrix
                _log.debug("not rehearsed: %s", error)

    def differences(self, space: Space) -> list[Difference]:
        """What the plan computes otherwise; empty if it is what the program says but for rounding, or was not compared.

        Args:
          space: Where the plan and the program run.
        """
        for leads in (self._stays, self._to_the_next_step):
            leads(space)
            got = [sketch(value) for value in self._made(space)]
            leads(space)
            room = space.room()
            kept = sum(one.nbytes for one in got)  # there will be as many of what is expected
            if room is not None and self._lacks(room - kept):
                return []
            wrong = self._judge.limits(got, space.buffers)
            if self._together(bool(wrong)):
                return self._described(wrong, space, leads)
            if not self._advances:
                break
        return []

    def _stays(self, space: Space) -> None:
        space.reset()

    def _to_the_next_step(self, space: Space) -> None:
        """Let the slots hold what the plan makes of them: it was right about the first step."""
        space.reset()
        self._made(space)

    def _lacks(self, room: int) -> bool:
        if not 0 < self._takes <= room:
            self._takes = self._reference.fit(room)
        if not self._together(self._takes > room):
            return False
        self.lacking = max(self._takes - room, 1)
        return True

    def _made(self, space: Space) -> list[Tensor]:
        """The outputs of the plan, in memory that the next run writes."""
        with quiet():
            metrics = self._plan.bind(space.buffers)(())
        return self._reference.made(metrics, space.buffers.slots)

    def _described(
        self, wrong: Mapping[int, Distance], space: Space, leads: Callable[[Space], None]
    ) -> list[Difference]:
        """What is wrong, in full: both run once more."""
        leads(space)
        expected = self._judge.expected(wrong, space.buffers)
        leads(space)
        return self._judge.described(wrong, self._made(space), expected)
