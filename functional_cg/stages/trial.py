"""The trial of a compiled plan: does it compute what the program says, on real values, before it may commit anything?

The judge is the program as it was traced, run call by call. A compiler rounds elsewhere, so the results differ, by as
much as rounding makes of them: by how much is found out by running the program again, with what its calls return moved
by an ulp (:mod:`functional_cg.stages.ulps`). A leaf that lies further off than a few times what such runs do is not
rounding. What jumps (a token that is drawn, a route that is taken) jumps in some of these runs, too: before anything is
refused, more of them look further.

Two steps are compared, the second from where the first has led: at the first a learning rate that warms up is zero, an
average is what it averages, and what is written too early is not seen.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ..overlap import storage_key
from ..source import Location
from .lower import Buffers, ExecutionPlan, quiet
from .reference import Reference
from .sketch import Distance, distance, floor, sketch
from .ulps import Shaker

__all__ = ["Certificate", "Difference", "Space", "Trial"]

_log = logging.getLogger("functional_cg")
# Runs that measure rounding: by how many ulps results are moved, and what is decided by; how many times what such a
# run makes of a result it may lie off. Where nothing jumps, what a run makes of it grows with the ulps: each of them
# says the same then.
_RUNS = (
    (1, 0, 8.0),
    (1, 0, 8.0),
    *((most, 8 * most, max(8.0 / most, 2.0)) for most in (1, 2, 4, 8) for _ in "1234"),
)


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


@dataclass(frozen=True, slots=True)
class Difference:
    """A result that is not what the program says.

    Attributes:
      name: Key path of the leaf or metric.
      greatest: The greatest difference of an element.
      rounding: How much of it rounding may explain.
      site: The user's line that computes it.
    """

    name: str
    greatest: float
    rounding: float
    site: Location | None

    def __str__(self) -> str:
        where = f", computed at {self.site}" if self.site is not None else ""
        return f"{self.name}  differs by {self.greatest:.3g}, of which rounding explains {self.rounding:.3g}{where}"


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
      share: The largest difference that was found, in parts of what rounding explains.
    """

    def __init__(self, reference: Reference, plan: ExecutionPlan, together: Callable[[bool], bool]) -> None:
        self._reference, self._plan, self._together = reference, plan, together
        self._slots = [
            (place, out.slot) for place, out in enumerate(reference.outputs) if out.slot is not None
        ]
        self.lacking = 0
        self.share = 0.0

    def rehearse(self, buffers: Buffers, scratch: Sequence[Tensor]) -> None:
        """Compile the plan, and run it once, on other inputs: what it keeps of them shows in the trial.

        Args:
          buffers: Static buffers with the values of the call, which stay as they are.
          scratch: Slots for a warm-up.
        """
        zeros = replace(buffers, inputs=[torch.zeros_like(one) for one in buffers.inputs])
        with quiet():
            self._plan.bind(zeros)  # compiles it, for slots that do not overlap
            run = self._plan.bind(replace(zeros, slots=scratch))
            try:
                run(())
            except (
                Exception
            ) as error:  # zeros may be what a kernel of the host refuses, such as a singular matrix
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
            if room is not None and self._lacks(room):
                return []
            wrong = self._compared(got, space.buffers)
            if self._together(bool(wrong)):
                return self._described(wrong, space, leads)
            if not self._slots:
                break
        return []

    def _stays(self, space: Space) -> None:
        space.reset()

    def _to_the_next_step(self, space: Space) -> None:
        """Let the slots hold what the program makes of them."""
        space.reset()
        slots, values = space.buffers.slots, self._reference.run(space.buffers)
        memory = {storage_key(slot) for slot in slots}
        # All at once: what is another slot's old value is copied before that is written.
        new = {slot: values[place] for place, slot in self._slots}
        new = {slot: value.clone() if storage_key(value) in memory else value for slot, value in new.items()}
        for slot, value in new.items():
            slots[slot].copy_(value)

    def _lacks(self, room: int) -> bool:
        needed = self._reference.fit(room)
        if not self._together(needed > room):
            return False
        self.lacking = max(needed - room, 1)
        return True

    def _made(self, space: Space) -> list[Tensor]:
        """The outputs of the plan, in memory that the next run writes."""
        with quiet():
            metrics = iter(self._plan.bind(space.buffers)(()))
        slots = space.buffers.slots
        return [next(metrics) if out.slot is None else slots[out.slot] for out in self._reference.outputs]

    def _compared(self, got: Sequence[Tensor], buffers: Buffers) -> dict[int, Distance]:
        """Which outputs are too far from what the program makes of the buffers, with how far they may be."""
        expected, limits = [], []
        for value in self._reference.run(buffers):
            expected.append(sketch(value))
            limits.append(floor(value))
        off = list(map(distance, got, expected))
        device = next((one.device for one in (*got, *expected) if not one.is_cpu), torch.device("cpu"))
        generator, dice = torch.Generator(device).manual_seed(0), random.Random(0)
        for most, decisions, factor in _RUNS:
            if not self._together(not all(map(Distance.within, off, limits))):
                self.share = max([self.share, *map(Distance.share, off, limits)])
                return {}
            moved = self._reference.run(
                buffers, Shaker(generator, most, decisions, dice, self._reference.chunk)
            )
            for number, value in enumerate(moved):
                limits[number] = limits[number].or_more(
                    distance(expected[number], sketch(value)).times(factor)
                )
        return {
            n: limit
            for n, (apart, limit) in enumerate(zip(off, limits, strict=True))
            if not apart.within(limit)
        }

    def _described(
        self, wrong: Mapping[int, Distance], space: Space, leads: Callable[[Space], None]
    ) -> list[Difference]:
        """What is wrong, in full: both run once more."""
        leads(space)
        values = self._reference.run(space.buffers)
        kept = {number: values[number].cpu() for number in wrong}
        leads(space)
        values = self._made(space)
        found = []
        for number, limit in wrong.items():
            out, greatest = self._reference.outputs[number], _greatest(values[number].cpu(), kept[number])
            found.append(Difference(out.name, greatest, limit.greatest, self._reference.site_of(out.var)))
        return found


def _greatest(one: Tensor, other: Tensor) -> float:
    """The greatest difference of an element."""
    wide = torch.complex128 if one.is_complex() else torch.float64
    apart = torch.where(one == other, 0.0, one.to(wide) - other.to(wide)).abs()
    return float(apart.nan_to_num(torch.inf).max())
