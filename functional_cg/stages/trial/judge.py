"""Judge a compiled plan: do its results equal those of the program up to rounding?

The program is run as traced, call by call. A compiler rounds at different places, so results differ by rounding. How
much that can be is measured by running the program again with the results of its calls perturbed by an ulp
(:mod:`.ulps`). A leaf that differs by more than a few times what such runs show is not explained by rounding. Discrete
choices (a sampled token, a chosen route) flip in some of these runs, too: before anything is refused, further runs with
larger perturbations are made.
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
from .sketch import LARGE, Distance, distance, floor, known, magnitude, sketch
from .ulps import Shaker

__all__ = ["Difference", "Judge", "load_kernels", "miscompiled"]

# Runs that measure rounding: ulps by which results are perturbed, ulps for the arguments of deciding calls, and the
# factor by which a result may exceed the change that the run shows. If nothing flips, the change grows with the ulps,
# so all runs give about the same limit. In every other run, all elements of a result are perturbed in one direction.
_RUNS = (
    (1, 0, 8.0),
    (1, 0, 8.0),
    *((most, 8 * most, max(8.0 / most, 2.0)) for most in (1, 2, 4, 8, 16, 32) for _ in "1234"),
)


@dataclass(frozen=True, slots=True)
class Difference:
    """A result of a plan that differs from the program's by more than rounding.

    Attributes:
      name: Key path of the leaf or metric.
      greatest: The largest difference of an element.
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


def load_kernels(device: torch.device) -> None:
    """Compare some numbers on a GPU, because CUDA loads a kernel when it is first launched."""
    shaker = Shaker()
    with torch.cuda.device(device):
        for dtype in (torch.float32, torch.bfloat16):
            for count in (1, LARGE):
                numbers = torch.ones(count, dtype=dtype, device=device)
                before = sketch(numbers).cpu()
                shaker.move(numbers, 1, 1.0)
                known([magnitude(numbers), distance(before.to(device), sketch(numbers))])


def miscompiled(name: str, what: str, rows: Iterable[str], why: str) -> MiscompileError:
    """Return the error for a step that the compiler got wrong.

    Args:
      name: Name of the step.
      what: What the compiled step computes, and what happened to the state.
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
      together: ``together(flag)`` tells whether the flag is set on any rank of this comparison.

    Attributes:
      share: The largest accepted difference, as a fraction of what rounding explains.
    """

    def __init__(self, reference: Reference, together: Callable[[bool], bool]) -> None:
        self._reference, self._together = reference, together
        self.share = 0.0

    def limits(
        self, make: Callable[[], Iterable[Tensor]], buffers: Buffers, again: Callable[[], None]
    ) -> dict[int, Distance]:
        """Return the limits of the outputs that are too far from what the program computes on the buffers.

        Args:
          make: Makes the outputs; it may write the slots, and takes all the memory that there is.
          buffers: Slots, inputs and constants from before the call.
          again: Puts back what the slots held.
        """
        count = len(self._reference.outputs)
        expected: list[Any] = [
            None
        ] * count  # on the host, where they take nothing from whoever makes the outputs
        measured: list[Any] = [None] * count

        def keep(number: int, value: Tensor) -> None:
            expected[number], measured[number] = sketch(value).cpu(), magnitude(value)

        def compare(number: int, value: Tensor) -> None:
            measured[number] = distance(expected[number].to(value.device), sketch(value))

        self._reference.run(buffers, keep)
        specs = [out.var.spec for out in self._reference.outputs]
        limits = list(map(floor, known(measured), specs))
        off: list[Distance] = []
        dice = random.Random(0)
        for number, (most, decisions, factor) in enumerate(_RUNS):
            shaker = Shaker(most, decisions, leans=number % 2 == 0, dice=dice)
            again()
            self._reference.run(buffers, compare, shaker)
            limits = [
                limit.or_more(apart.times(factor))
                for limit, apart in zip(limits, known(measured), strict=True)
            ]
            if number == 0:  # without such a run, few results are within their limits
                for place, value in enumerate(make()):
                    compare(place, value)
                off = known(measured)
            if not self._together(not all(map(Distance.within, off, limits))):
                self.share = max([self.share, *map(Distance.share, off, limits)])
                return {}
        pairs = enumerate(zip(off, limits, strict=True))
        return {number: limit for number, (apart, limit) in pairs if not apart.within(limit)}

    def differences(self, values: Sequence[Tensor], buffers: Buffers) -> list[Difference]:
        """Return the differences from what the program computes on the buffers.

        All ranks agree on whether there are any; a rank whose own outputs are right returns none.

        Args:
          values: The outputs.
          buffers: Slots, inputs and constants from before the call.
        """
        try:
            wrong = self.limits(lambda: values, buffers, lambda: None)
            if not self._together(bool(wrong)):
                return []
            return self.described(wrong, values, self.expected(wrong, buffers))
        finally:
            self._reference.free()

    def expected(self, wrong: Collection[int], buffers: Buffers) -> dict[int, Tensor]:
        """Return some outputs as the program computes them, on the CPU."""
        kept: dict[int, Tensor] = {}

        def keep(number: int, value: Tensor) -> None:
            if number in wrong:
                kept[number] = value.to("cpu", copy=True)

        self._reference.run(buffers, keep)
        return kept

    def described(
        self, wrong: Mapping[int, Distance], got: Sequence[Tensor], expected: Mapping[int, Tensor]
    ) -> list[Difference]:
        """Describe wrong outputs.

        Args:
          wrong: The result of :meth:`limits`.
          got: The outputs.
          expected: The result of :meth:`expected` for them.
        """
        return [self._difference(n, _greatest(got[n].cpu(), expected[n].cpu()), wrong[n]) for n in wrong]

    def _difference(self, number: int, greatest: float, limit: Distance) -> Difference:
        out = self._reference.outputs[number]
        return Difference(out.name, greatest, limit.greatest, self._reference.site_of(out.var))


def _greatest(one: Tensor, other: Tensor) -> float:
    """Return the largest difference of an element."""
    wide = torch.complex128 if one.is_complex() else torch.float64
    apart = torch.where(one == other, 0.0, one.to(wide) - other.to(wide)).abs()
    return float(apart.nan_to_num(torch.inf).max())
