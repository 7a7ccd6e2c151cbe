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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import MiscompileError
from ...messages.source import Location
from ...state.arena import BufferSpec
from ..plan import Buffers
from .distances import Distances, between, rounded
from .recorded import Recorded
from .reference import Reference, Watch
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
      apart: How far it is from the program's, as a norm and by element; NaN for a result of another kind.
      limit: How much of it rounding may explain.
      spec: Its shape and dtype.
      site: The user's line that computes it.
    """

    name: str
    apart: Sequence[float]
    limit: Sequence[float]
    spec: BufferSpec
    site: Location | None

    def __str__(self) -> str:
        (norm, greatest), (explained, by_element) = self.apart, self.limit
        if math.isnan(norm):
            what = "is of another dtype or shape"
        elif not (self.spec.dtype.is_floating_point or self.spec.dtype.is_complex):
            of, explained = f"{round(norm**2):,} of {self.spec.numel:,}", round(explained**2)
            what = f"differs in {of} elements, of which rounding explains {explained:,}"
        elif greatest == math.inf:
            what = "is infinite or NaN in only one of the two"
        elif greatest > by_element:
            what = f"differs by {greatest:.3g}, of which rounding explains {by_element:.3g}"
        else:
            what = f"differs by {norm:.3g} in norm, of which rounding explains {explained:.3g}"
        return f"{self.name}  {what}{f', computed at {self.site}' if self.site is not None else ''}"


def load_kernels(device: torch.device) -> None:
    """Compare some numbers on a GPU, because CUDA loads a kernel when it is first launched."""
    shaker = Shaker()
    with torch.cuda.device(device):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            apart, numbers = Distances(), torch.ones(8, dtype=dtype, device=device)
            for number in range(2):
                apart.add(number, numbers, numbers.clone())
            apart.known(2)
            shaker.move(numbers, 1, 1.0)


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
        self._specs = [out.var.spec for out in reference.outputs]
        self._expected: Sequence[Any] = []
        self._recorded: Recorded | None = None
        self._part, self._least = rounded(self._specs)
        self._known = torch.zeros(())  # what rounding has explained of each output, as a part of its size
        self.share = 0.0

    def expect(self, buffers: Buffers, *, on_host: bool = True, watch: Watch | None = None) -> None:
        """Run the program, and keep its outputs for the next comparison.

        Args:
          buffers: Slots, inputs and constants from before the call.
          on_host: Whether to keep them on the host, where they take nothing from whoever makes the others.
          watch: Called for each call of the program with what it makes.
        """
        expected: list[Any] = [None] * len(self._specs)

        def keep(number: int, value: Tensor) -> None:
            own = self._reference.owns(number, value)
            expected[number] = value.to("cpu", copy=True) if on_host else value if own else value.clone()

        self._reference.run(buffers, keep, watch=watch)
        self._expected = expected

    def expect_recorded(self, recorded: Recorded) -> None:
        """Run the program as it was recorded, for the next comparison."""
        self._expected, self._recorded = recorded.expect(), recorded

    def forget(self) -> None:
        """Let go of what the program has made."""
        if self._recorded is not None:
            self._recorded.forget()
        self._expected, self._recorded = [], None

    def compare(
        self, outputs: Sequence[Tensor], buffers: Buffers, again: Callable[[], None], *, times: float = 1.0
    ) -> list[Difference]:
        """Return how outputs differ from what the program is expected to make of the buffers.

        All ranks agree on whether there are any differences; a rank whose own outputs are right returns none.

        Args:
          outputs: The outputs, which ``again`` may overwrite.
          buffers: Slots, inputs and constants.
          again: Puts back what the slots held before.
          times: How many times as much as rounding explains is accepted.
        """
        try:
            return self._differences(outputs, buffers, again, times)
        finally:
            self.forget()

    def _differences(
        self, outputs: Sequence[Tensor], buffers: Buffers, again: Callable[[], None], times: float
    ) -> list[Difference]:
        off, sizes = self._apart(outputs)
        known = (sizes * self._known).nan_to_num(0.0, math.inf)
        limits = torch.maximum(torch.maximum(sizes * self._part, self._least), known)
        dice = random.Random(0)
        for number in range(len(_RUNS) + 1):
            wrong = ~(off <= limits * times).all(1)
            if not self._together(bool(wrong.any())):
                shares = torch.where(limits > 0, off / limits, off)[limits.isfinite()]
                self.share = max(self.share, float(shares.max())) if shares.numel() else self.share
                return []
            if number < len(_RUNS):
                most, decisions, factor = _RUNS[number]
                again()
                if self._recorded is not None and number == 0:
                    apart = self._recorded.moved()
                else:
                    shaker = Shaker(most, decisions, leans=number % 2 == 0, dice=dice)
                    apart = self._shaken(buffers, shaker)
                # The norm of integers that differ is the root of their number.
                limits = torch.maximum(limits, apart * torch.where(self._part > 0, factor, factor**0.5))
                measured = (sizes > 0) & limits.isfinite()
                self._known = torch.where(measured, limits / sizes, self._known)
        outs, rows = self._reference.outputs, zip(off.tolist(), (limits * times).tolist(), strict=True)
        return [
            Difference(out.name, apart, limit, out.var.spec, self._reference.site_of(out.var))
            for out, (apart, limit), is_wrong in zip(outs, rows, wrong.tolist(), strict=True)
            if is_wrong
        ]

    def _shaken(self, buffers: Buffers, shaker: Shaker) -> Tensor:
        measured = Distances()
        self._reference.run(buffers, lambda n, value: measured.add(n, value, self._expected[n]), shaker)
        return measured.known(len(self._specs))[0]

    def _apart(self, outputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return how far outputs are from what is expected, and the size of that."""
        if self._recorded is not None:
            return self._recorded.apart(outputs)
        return between(outputs, self._expected).known(len(self._specs))
