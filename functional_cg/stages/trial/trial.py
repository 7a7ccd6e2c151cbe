"""Try a compiled plan on real values before it may commit: does it compute what the program says?

The plan is compared with the program as traced, run call by call (:mod:`.judge`): in the first call on its values and
on others made from them (:mod:`.variants`), and at later calls on the values that they have by then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ...errors import FunctionalCGError
from ..evaluate import quiet
from ..plan import Buffers, Plan
from ..program import Program
from .judge import Difference, Judge
from .recorded import Recorded
from .reference import After, Output, Reference, ignore
from .space import Space
from .variants import KINDS, OVERFLOW, Finite, overflows

__all__ = ["Certificate", "Trial", "TrialOfFunctions"]


_log = logging.getLogger("functional_cg")
_GROSS = 8.0  # on values that nobody asked for, a mistake is this many times as much as rounding explains
_NAMED = 4  # calls that a certificate names


@dataclass(frozen=True, slots=True)
class Certificate:
    """Whether a compiled plan was certified against its program. Prints as a line of ``explain()``.

    Attributes:
      certified: Whether it was compared and computes the same.
      why_not: Why it was not compared.
      share: The largest difference, as a fraction of what rounding explains.
      calls: The calls at which it was compared; of many, the first ones and the last.
    """

    certified: bool
    why_not: str = ""
    share: float = 0.0
    calls: tuple[int, ...] = (1,)

    def also(self, call: int, share: float) -> Certificate:
        """Return a certificate for one more call."""
        before = self.calls[:_NAMED] if self.certified else ()
        return Certificate(certified=True, share=max(self.share, share), calls=(*before, call))

    def __str__(self) -> str:
        if not self.certified:
            return f"not certified: {self.why_not}"
        found = (
            f"differences come to {self.share:.0%} of what rounding explains" if self.share else "bit by bit"
        )
        named = [f"{call:,}" for call in self.calls]
        if len(named) > _NAMED:
            named[_NAMED - 1 : -1] = ["…"]
        calls = f"calls {', '.join(named)}" if self.calls != (1,) else "the first call"
        return f"certified: on the values of {calls} it computes what its calls do one by one; {found}"


class Trial:
    """Compares a plan with its program.

    Args:
      reference: The program.
      plan: The plan.
      together: ``together(flag)`` tells whether the flag is set on any rank of this trial.

    Attributes:
      lacking: Bytes of memory that the reference lacks; if not 0, nothing was compared.
      share: The largest difference found, as a fraction of what rounding explains.
      kind: Which values it was found on; empty for those of the call.
    """

    def __init__(self, reference: Reference, plan: Plan, together: Callable[[bool], bool]) -> None:
        self._reference, self._plan, self.together = reference, plan, together
        self._judge = Judge(reference, together)
        self.lacking, self.share, self.kind = 0, 0.0, ""

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
            except FunctionalCGError:
                raise
            except Exception as error:  # CPU kernels may refuse zeros, such as a singular matrix
                _log.debug("not rehearsed: %s", error)

    def differences(self, space: Space) -> list[Difference]:
        """Return what the plan computes differently on the values of a call, and on others made from them.

        It is empty if only rounding differs, or if nothing was compared.

        Args:
          space: The buffers that the plan and the program run on.
        """
        usual = Finite()
        _, found = self.compare(space, partial(self._run, space), after=usual)
        if self.together(bool(found)) or self.lacking:
            return found
        half = self.together(overflows(self._reference.program))
        for kind in (*KINDS, OVERFLOW) if half else KINDS:
            space.vary(kind)
            found = self._on_others(space, kind, usual)
            if self.together(bool(found)):
                self.kind = kind
                return found
        self.lacking = 0  # there was enough memory for the values of the call
        return []

    def compare(
        self,
        space: Space,
        run: Callable[[], Sequence[Tensor]],
        recorded: Recorded | None = None,
        after: After = ignore,
    ) -> tuple[Sequence[Tensor] | None, list[Difference]]:
        """Compare what a run makes of the values in the buffers.

        Args:
          space: The buffers.
          run: Runs the plan and returns the metrics, which a later run may overwrite; if memory is too little for a
            comparison, it does not run.
          recorded: The comparison, if it is recorded.
          after: Called for each call of the program with what it makes.
        Returns:
          The metrics, None if the slots do not hold what the run has made, and the differences.
        """
        if recorded is not None:
            self.lacking, expected = 0, recorded.expect()
        elif self._is_lacking(0 if space.ample else space.lacks(self._reference)):
            return None, []
        else:
            expected = self._reference.values(space.buffers, on_host=not space.ample, after=after)
        metrics = run()
        outputs = self._reference.made(metrics, space.buffers.slots)
        found = self._judge.compare(outputs, expected, space.buffers, space.reset, recorded=recorded)
        self.share = self._judge.share
        return (None if self._judge.runs else metrics), found

    def _on_others(self, space: Space, kind: str, usual: Finite) -> list[Difference]:
        """Return the differences on other values than those of the call.

        Args:
          space: The buffers, with values of this kind.
          kind: The kind.
          usual: What has watched the program on the values of the call.
        """
        finite, expected = Finite(), list[Tensor]()
        try:
            expected = self._reference.values(space.buffers, on_host=not space.ample, after=finite)
        except Exception as error:  # a kernel refuses the values
            _log.debug("not compared on %s values: %s", kind, error)
        (end, meet), (usual_end, usual_meet) = finite.found(), usual.found()
        if self.together(not expected or not end <= usual_end):
            return []
        judge, unclear = Judge(self._reference, self.together), finite.unclear(meet - usual_meet)
        made = self._reference.made(self._run(space), space.buffers.slots)
        outs = zip(self._reference.outputs, made, expected, strict=True)
        made = [other if out.var.storage in unclear else one for out, one, other in outs]
        return judge.compare(made, expected, space.buffers, partial(space.vary, kind), times=_GROSS)

    def _is_lacking(self, lack: int) -> bool:
        """Note the bytes that are lacking here; return whether any are, on any rank."""
        self.lacking = max(lack, 1) if self.together(lack > 0) else 0
        return bool(self.lacking)

    def _run(self, space: Space) -> Sequence[Tensor]:
        """Run the plan and return its metrics, in memory that the next run overwrites."""
        with quiet():
            return self._plan.bind(space.buffers)(())


class TrialOfFunctions(Trial):
    """Compares each compiled function of a plan with its calls, on the arguments of a run; the rest are ATen calls.

    Each rank compares a function alone, at its first and its last call, however many micro-batches there are. If memory
    is too little for one of these calls, the other one is enough.
    """

    def compare(
        self,
        space: Space,
        run: Callable[[], Sequence[Tensor]],
        recorded: Recorded | None = None,
        after: After = ignore,
    ) -> tuple[None, list[Difference]]:
        found = self._compared(space)
        space.reset()
        return None, found

    def _on_others(self, space: Space, kind: str, usual: Finite) -> list[Difference]:
        return self._compared(space, kind)

    def _compared(self, space: Space, kind: str = "") -> list[Difference]:
        found: list[Difference] = []
        lacks: dict[Program, int] = {}  # 0 for what was compared

        def see(part: Program, arguments: Sequence[Tensor], results: Sequence[Tensor]) -> None:
            outputs = [Output(f"{part.function}  {var.spec}", var) for var in part.outputs]
            reference = Reference(replace(part, outputs=[]), outputs)
            lack = space.lacks(reference)
            lacks[part] = min(lack, lacks.get(part, lack))
            numbers = (one for one in (*arguments, *results) if one.is_floating_point())
            if lack or (kind and not all(one.isfinite().all() for one in numbers)):
                return
            judge, buffers = Judge(reference, lambda flag: flag), Buffers((), arguments, ())
            expected, times = reference.values(buffers, on_host=True), _GROSS if kind else 1.0
            found.extend(judge.compare(results, expected, buffers, lambda: None, times=times))
            if not kind:
                self.share = max(self.share, judge.share)

        with self._plan.watched(see):
            self._run(space)
        self._is_lacking(max(lacks.values(), default=0))
        return found
