"""Judge a compiled plan: do its results equal those of the program up to rounding?

The program is run as traced, call by call. A compiler rounds at different places, so results differ by rounding. How
much that can be is measured by running the program again with the results of its calls perturbed by an ulp
(:mod:`.ulps`). A leaf that differs by more than a few times what such runs show is not explained by rounding. Discrete
choices (a sampled token, a chosen route) flip in some of these runs, too: before anything is refused, further runs with
larger perturbations are made. What rounding explained once, as a part of a leaf's size, it explains at a later call.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import MiscompileError
from ...messages.source import Location
from ..plan import Buffers
from .reference import Reference, Watch
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
      greatest: The largest difference of an element; NaN for a result of another kind.
      rounding: How much of it rounding may explain.
      site: The user's line that computes it.
    """

    name: str
    greatest: float
    rounding: float
    site: Location | None

    def __str__(self) -> str:
        where = f", computed at {self.site}" if self.site is not None else ""
        if math.isnan(self.greatest):
            return f"{self.name}  is of another dtype or shape{where}"
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
        self._expected: list[Any] = [None] * len(reference.outputs)
        self._kinds: list[Any] = [None] * len(reference.outputs)  # dtypes and shapes
        self._sizes: list[Distance] = []
        self._known: list[Distance] = []  # what rounding has explained of each output, as a part of its size
        self.share = 0.0

    def expect(self, buffers: Buffers, *, on_host: bool = True, watch: Watch | None = None) -> None:
        """Run the program, and keep a sketch of each output.

        Args:
          buffers: Slots, inputs and constants from before the call.
          on_host: Whether to keep sketches on the host, where they take nothing from whoever makes the outputs.
          watch: Called for each call of the program with what it makes.
        """
        sizes: list[Any] = [None] * len(self._expected)

        def keep(number: int, value: Tensor) -> None:
            made, self._kinds[number] = sketch(value), (value.dtype, value.shape)
            self._expected[number], sizes[number] = made.cpu() if on_host else made, magnitude(value)

        self._reference.run(buffers, keep, watch=watch)
        self._sizes = known(sizes)

    def limits(
        self, outputs: Sequence[Tensor], buffers: Buffers, again: Callable[[], None], *, times: float = 1.0
    ) -> dict[int, Distance]:
        """Return the limits of the outputs that are too far from what the program is expected to make of the buffers.

        Args:
          outputs: The outputs, which ``again`` may overwrite.
          buffers: Slots, inputs and constants.
          again: Puts back what the slots held before.
          times: How many times as much as rounding explains is accepted.
        """
        off = self._apart(outputs)
        specs = [out.var.spec for out in self._reference.outputs]
        limits = list(map(floor, self._sizes, specs))
        if self._known:
            before = (part.by(size) for part, size in zip(self._known, self._sizes, strict=True))
            limits = [limit.or_more(one) for limit, one in zip(limits, before, strict=True)]
        dice = random.Random(0)
        for number in range(len(_RUNS) + 1):
            if not self._together(not all(map(Distance.within, off, (one.times(times) for one in limits)))):
                self.share = max([self.share, *map(Distance.share, off, limits)])
                return {}
            if number < len(_RUNS):
                most, decisions, factor = _RUNS[number]
                again()
                apart = self._shaken(buffers, Shaker(most, decisions, leans=number % 2 == 0, dice=dice))
                limits = [one.or_more(more.times(factor)) for one, more in zip(limits, apart, strict=True)]
                self._known = [one.over(size) for one, size in zip(limits, self._sizes, strict=True)]
        pairs = enumerate(zip(off, limits, strict=True))
        return {number: limit for number, (apart, limit) in pairs if not apart.within(limit.times(times))}

    def _shaken(self, buffers: Buffers, shaker: Shaker) -> list[Distance]:
        measured: list[Any] = [None] * len(self._expected)

        def compare(number: int, value: Tensor) -> None:
            measured[number] = distance(self._expected[number].to(value.device), sketch(value))

        self._reference.run(buffers, compare, shaker)
        return known(measured)

    def _apart(self, outputs: Sequence[Tensor]) -> list[Distance]:
        """Return how far outputs are from what is expected; infinitely, where they are of another kind."""
        alike = [(one.dtype, one.shape) == kind for one, kind in zip(outputs, self._kinds, strict=True)]
        pairs = zip(outputs, self._expected, alike, strict=True)
        found = iter(known([distance(want.to(one.device), sketch(one)) for one, want, same in pairs if same]))
        return [next(found) if same else Distance(math.inf, math.inf) for same in alike]

    def differences(
        self, values: Sequence[Tensor], buffers: Buffers, *, times: float = 1.0
    ) -> list[Difference]:
        """Return the differences from what the program computes on the buffers.

        All ranks agree on whether there are any; a rank whose own outputs are right returns none.

        Args:
          values: The outputs.
          buffers: Slots, inputs and constants from before the call.
          times: How many times as much as rounding explains is accepted.
        """
        self.expect(buffers)
        wrong = self.limits(values, buffers, lambda: None, times=times)
        return self.described(wrong, lambda: values, buffers) if self._together(bool(wrong)) else []

    def described(
        self, wrong: Mapping[int, Distance], make: Callable[[], Sequence[Tensor]], buffers: Buffers
    ) -> list[Difference]:
        """Describe wrong outputs; runs the program once more, on all ranks.

        Args:
          wrong: The result of :meth:`limits`.
          make: Makes the outputs once more; it may write the slots.
          buffers: Slots, inputs and constants from before the call.
        """
        kept: dict[int, Tensor] = {}

        def keep(number: int, value: Tensor) -> None:
            if number in wrong:
                kept[number] = value.to("cpu", copy=True)

        self._reference.run(buffers, keep)
        got = make()
        return [self._difference(n, got[n].cpu(), kept[n], wrong[n]) for n in wrong]

    def _difference(self, number: int, got: Tensor, wanted: Tensor, limit: Distance) -> Difference:
        out = self._reference.outputs[number]
        site = self._reference.site_of(out.var)
        if (got.dtype, got.shape) != (wanted.dtype, wanted.shape):
            return Difference(out.name, math.nan, limit.greatest, site)
        return Difference(out.name, _greatest(got, wanted), limit.greatest, site)


def _greatest(one: Tensor, other: Tensor) -> float:
    """Return the largest difference of an element."""
    wide = torch.complex128 if one.is_complex() else torch.float64
    apart = torch.where(one == other, 0.0, one.to(wide) - other.to(wide)).abs()
    return float(apart.nan_to_num(torch.inf).max())
