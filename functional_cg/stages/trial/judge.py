"""Judge a compiled plan: do its results equal those of the program up to rounding?

The program runs as traced, call by call. A compiler rounds in other places, so its results differ. To learn by how
much they may differ, the judge runs the program again and perturbs the results of its calls by an ulp (:mod:`.ulps`).
Rounding does not explain a leaf that differs by more than a few times what such runs show. Some of these runs also flip
discrete choices (a sampled token, a chosen route), so the judge makes further runs with larger perturbations before it
refuses anything. If rounding explained a difference once, as a part of a leaf's size, the judge accepts as large a part
at later calls without measuring again.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import MiscompileError
from ...messages.source import Location
from ...state.arena import BufferSpec
from ..plan import Buffers
from .distances import between, rounded
from .recorded import Recorded
from .reference import Reference
from .ulps import Shaker

__all__ = ["Difference", "Judge", "miscompiled"]

_log = logging.getLogger("functional_cg")
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


def miscompiled(name: str, what: str, rows: Iterable[str], why: str) -> MiscompileError:
    """Return the error for a step that was compiled incorrectly.

    Args:
      name: Name of the step.
      what: What the compiled step computes, and whether the state has changed.
      rows: The differences, one per line.
      why: When and how it was compared.
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
      runs: How many perturbed runs the last comparison took that found no difference.
    """

    def __init__(self, reference: Reference, together: Callable[[bool], bool]) -> None:
        self._reference, self._together = reference, together
        explained = [rounded(out.var.spec) for out in reference.outputs]
        self._part, self._least = torch.tensor(explained, dtype=torch.float64).view(-1, 3).split([1, 2], 1)
        self._known = torch.zeros(())  # what rounding has explained of each output, as a part of its size
        self.share, self.runs = 0.0, 0

    def compare(
        self,
        outputs: Sequence[Tensor],
        expected: Sequence[Tensor],
        buffers: Buffers,
        again: Callable[[], None],
        *,
        recorded: Recorded | None = None,
        times: float = 1.0,
    ) -> list[Difference]:
        """Return how outputs differ from those of the program.

        All ranks agree on whether there are any differences; a rank whose own outputs are right returns none.

        Args:
          outputs: The outputs, which ``again`` may overwrite.
          expected: Those of the program.
          buffers: Slots, inputs and constants.
          again: Restores the values that the slots held before.
          recorded: The comparison, if it is recorded.
          times: How many times as much as rounding explains is accepted.
        """
        if recorded is None:
            off, sizes = between(outputs, expected).known(len(outputs))
        else:
            off, sizes = recorded.apart()
        known = (sizes * self._known).nan_to_num(0.0, math.inf)
        limits = torch.maximum(torch.maximum(sizes * self._part, self._least), known)
        dice = random.Random(0)
        for number in range(len(_RUNS) + 1):
            wrong = ~(off <= limits * times).all(1)
            if not self._together(bool(wrong.any())):
                shares = (off / limits).nan_to_num(0.0, 0.0)  # 0 of 0, or any part of what is unlimited
                self.share, self.runs = max([self.share, *shares.view(-1).tolist()]), number
                return []
            if number < len(_RUNS):
                most, decisions, factor = _RUNS[number]
                again()
                try:
                    if recorded is not None and number == 0:
                        moved = recorded.moved()
                    else:
                        shaker = Shaker(most, decisions, leans=number % 2 == 0, dice=dice)
                        moved, _ = self._reference.moved(buffers, expected, shaker).known(len(expected))
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:  # a kernel refuses perturbed values, which then explain nothing
                    _log.debug("not perturbed: %s", error)
                    continue
                # The norm of integers that differ is the root of their number.
                limits = torch.maximum(limits, moved * torch.where(self._part > 0, factor, factor**0.5))
                measured = (sizes > 0) & limits.isfinite()
                self._known = torch.where(measured, limits / sizes, self._known)
        outs, rows = self._reference.outputs, zip(off.tolist(), (limits * times).tolist(), strict=True)
        return [
            Difference(out.name, apart, limit, out.var.spec, self._reference.site_of(out.var))
            for out, (apart, limit), is_wrong in zip(outs, rows, wrong.tolist(), strict=True)
            if is_wrong
        ]
