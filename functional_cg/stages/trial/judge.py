"""The judge of a compiled plan: are its results those of the program, but for rounding?

The program is run as it was traced, call by call. A compiler rounds elsewhere, so the results differ, by as much as
rounding makes of them: by how much is found out by running the program again, with what its calls return moved by an
ulp (:mod:`.ulps`). A leaf that lies further off than a few times what such runs do is not rounding.
What jumps (a token that is drawn, a route that is taken) jumps in some of these runs, too: before anything is refused,
more of them look further.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import MiscompileError
from ...messages.source import Location
from ..plan import Buffers
from .reference import Reference
from .sketch import Distance, distance, floor, known, sketch
from .ulps import Shaker

__all__ = ["Difference", "Judge", "miscompiled"]

# Runs that measure rounding: by how many ulps results are moved, and what is decided by; how many times what such a
# run makes of a result it may lie off. Where nothing jumps, what a run makes of it grows with the ulps: each of them
# says the same then. In every other run the results of a call are moved the same way.
_RUNS = (
    (1, 0, 8.0),
    (1, 0, 8.0),
    *((most, 8 * most, max(8.0 / most, 2.0)) for most in (1, 2, 4, 8, 16, 32) for _ in "1234"),
)


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
        if self.greatest == math.inf:
            return f"{self.name}  is infinite or NaN in only one of the two{where}"
        return f"{self.name}  differs by {self.greatest:.3g}, of which rounding explains {self.rounding:.3g}{where}"


def miscompiled(name: str, what: str, rows: Iterable[str], why: str) -> MiscompileError:
    """The error for a step that was compiled to something else.

    Args:
      name: The step.
      what: What it computes, and what has become of the state.
      rows: What differs.
      why: When it was compared.
    """
    return MiscompileError.of(
        name,
        f"what the compiler made of it computes {what}",
        rows=list(rows),
        why=why,
        fix='`lowering="aten"` runs these calls as they are; please report it, with the step.',
    )


class Judge:
    """Compares results with those of a program.

    Args:
      reference: The program.
      together: ``together(flag)`` says whether the flag is set here, or on another rank that does the same.

    Attributes:
      share: The largest difference that was found and is none, in parts of what rounding explains.
    """

    def __init__(self, reference: Reference, together: Callable[[bool], bool]) -> None:
        self._reference, self._together = reference, together
        self.share = 0.0

    def limits(self, got: Sequence[Tensor], buffers: Buffers) -> dict[int, Distance]:
        """Which outputs are too far from what the program makes of the buffers, with how far they may be.

        Args:
          got: Sketches of the outputs.
          buffers: Slots, inputs and constants from before the call.
        """
        count = len(self._reference.outputs)
        expected: list[Any] = [None] * count
        measured: list[Any] = [None] * count

        def keep(number: int, value: Tensor) -> None:
            expected[number], measured[number] = sketch(value), floor(value)

        def compare(number: int, value: Tensor) -> None:
            measured[number] = distance(expected[number], sketch(value))

        self._reference.run(buffers, keep)
        limits, off = known(measured), known(list(map(distance, got, expected)))
        dice = random.Random(0)
        for number, (most, decisions, factor) in enumerate(_RUNS):
            if not self._together(not all(map(Distance.within, off, limits))):
                self.share = max([self.share, *map(Distance.share, off, limits)])
                return {}
            shaker = Shaker(most, decisions, leans=number % 2 == 1, dice=dice)
            self._reference.run(buffers, compare, shaker)
            limits = [
                limit.or_more(apart.times(factor))
                for limit, apart in zip(limits, known(measured), strict=True)
            ]
        pairs = enumerate(zip(off, limits, strict=True))
        return {number: limit for number, (apart, limit) in pairs if not apart.within(limit)}

    def differences(self, values: Sequence[Tensor], buffers: Buffers) -> list[Difference]:
        """What differs from what the program makes of the buffers; empty on all ranks, or on none that differs.

        Args:
          values: The outputs.
          buffers: Slots, inputs and constants from before the call.
        """
        wrong = self.limits(list(map(sketch, values)), buffers)
        if not self._together(bool(wrong)):
            return []
        return self.described(wrong, values, self.expected(wrong, buffers))

    def expected(self, wrong: Collection[int], buffers: Buffers) -> dict[int, Tensor]:
        """Some outputs as the program says, on the host."""
        kept: dict[int, Tensor] = {}

        def keep(number: int, value: Tensor) -> None:
            if number in wrong:
                kept[number] = value.to("cpu", copy=True)

        self._reference.run(buffers, keep)
        return kept

    def described(
        self, wrong: Mapping[int, Distance], got: Sequence[Tensor], expected: Mapping[int, Tensor]
    ) -> list[Difference]:
        """What is wrong, in full.

        Args:
          wrong: What :meth:`limits` has found.
          got: The outputs.
          expected: What :meth:`expected` says of them.
        """
        return [self._difference(n, _greatest(got[n].cpu(), expected[n].cpu()), wrong[n]) for n in wrong]

    def _difference(self, number: int, greatest: float, limit: Distance) -> Difference:
        out = self._reference.outputs[number]
        return Difference(out.name, greatest, limit.greatest, self._reference.site_of(out.var))


def _greatest(one: Tensor, other: Tensor) -> float:
    """The greatest difference of an element."""
    wide = torch.complex128 if one.is_complex() else torch.float64
    apart = torch.where(one == other, 0.0, one.to(wide) - other.to(wide)).abs()
    return float(apart.nan_to_num(torch.inf).max())
