"""Find the first call of a step that makes a NaN or an infinity.

The traced calls run one by one on copies of the values of a call. Infinities that the code writes as numbers, such as
the ``-inf`` of a mask, are there on purpose, and what counts is a call that makes a NaN of them. Of other calls those
count that make a NaN or an infinity of finite numbers. A call is reported if a result of the step depends on it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..call.signature import Call
from ..shards.peers import among, on_any, together
from ..shards.transfers import WAITS, is_between_ranks
from ..stages.evaluate import assigned, evaluate, quiet
from ..stages.lifetimes import last_uses
from ..stages.plan import Buffers
from ..stages.program import Instr, Program, Var, numbers_in
from ..stages.sub_programs import unrolled
from ..state.arena import BufferSpec
from .lowered import Lowered
from .profile.measure import location_of, phases
from .profile.result import LocatedCall
from .report import Part, Report

__all__ = ["Nonfinite", "NonfiniteCall", "find_nonfinite"]

_NAMED = 4  # results that a report names
_SHOWN = 3  # calls that it shows


@dataclass(frozen=True, slots=True)
class NonfiniteCall(LocatedCall):
    """A call that makes a NaN or an infinity: what :class:`LocatedCall` says, and its values.

    Attributes:
      made: What it makes, in words: dtype, shape, and how many elements are not finite.
      reads: What it reads, in words: dtype, shape, name if it has one, and the range of its elements.
    """

    made: str
    reads: tuple[str, ...]


@dataclass(frozen=True, repr=False)
class Nonfinite(Report):
    """What is not finite in a call of a step, and where it comes from. False if all results are finite.

    Attributes:
      function: The name of the step.
      calls: The calls that make the first NaN or infinity, in the order in which they run.
      given: What is not finite and no call here has made, in words: leaves, inputs, constants, values of other ranks.
      results: The names of metrics and of new leaves that are not finite.
      compiled: Whether only the compiled step makes them, and the traced calls do not.
      number: Of the call in a recording, see :func:`functional_cg.record`.
    """

    function: str
    calls: tuple[NonfiniteCall, ...] = ()
    given: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    compiled: bool = False
    number: int | None = None

    def __bool__(self) -> bool:
        return bool(self.results)

    def report(self) -> Sequence[Part]:
        if not self:
            if not self.given:
                return [f"{self.function}: all results are finite"]
            title = f"{self.function}: no call makes a NaN or an infinity; what is not finite is older:"
            return [title, *(f"  {one}" for one in self.given)]
        more = f" and {len(self.results) - _NAMED:,} more" if len(self.results) > _NAMED else ""
        name = self.function if self.number is None else f"{self.function}, call {self.number:,}"
        title = f"{name}: not finite: {', '.join(self.results[:_NAMED])}{more}"
        if self.compiled:
            return [title, "  The compiled step makes them; its traced calls, run one by one, are finite."]
        shown = [
            [
                ("  first call" if number == 0 and not self.given else "  then", f"{call.op} -> {call.made}"),
                ("  in", f"{call.phase}, {call.module}"),
                ("  line", f"{call.line}  {call.source}"),
                *(("  reads", one) for one in call.reads),
            ]
            for number, call in enumerate(self.calls[:_SHOWN])
        ]
        hidden = len(self.calls) - len(shown)
        rest = [f"  and {hidden:,} more calls, in `.calls`"] if hidden else []
        return [title, *(f"  given: {one}" for one in self.given), *shown, *rest]


def find_nonfinite(call: Call, lowered: Lowered) -> Nonfinite:
    """Run a call that fits a lowered step on copies of its values, and find the first call that is not finite.

    On several ranks, all of them have to look into the same call.

    Raises:
      RankError: If they do not.
    """
    program, name, mesh = unrolled(lowered.reference.program), call.function, lowered.mesh
    together(mesh, name, f"look for what is not finite in `{name}`")

    def fresh() -> Buffers:
        return lowered.buffers(call, [state.arena.copy() for state in call.states])[0]

    with among(mesh, name), quiet():
        found = _Search(program, call.layout.live_names).run(fresh(), name)
        if not lowered.plan.compiled or on_any(mesh, name, bool(found)):
            return found
        buffers = fresh()
        made = lowered.reference.made(lowered.plan.bind(buffers)(()), buffers.slots)
        bad = [out.name for out, one in zip(lowered.reference.outputs, made, strict=True) if any(_holds(one))]
        return Nonfinite(name, results=tuple(bad), compiled=bool(bad))


class _Search:
    """Runs the calls of a program, and follows what is not finite from call to call.

    Args:
      program: The program, with each ATen call.
      inputs: Names of its inputs.
    """

    def __init__(self, program: Program, inputs: Sequence[str]) -> None:
        self._program = program
        constants = [(one.var, one.name) for one in program.constants]
        named = [
            *zip(program.slots, program.slot_names, strict=True),
            *zip(program.inputs, inputs, strict=True),
        ]
        self._names: Mapping[Var, str] = dict([*named, *constants])
        self._phases = phases(program.instrs)
        self._ranks = any(is_between_ranks(instr.op) for instr in program.instrs)
        # By storage: the calls that it comes from, -1 for what was given. And those with infinities on purpose.
        self._from: dict[int, frozenset[int]] = {}
        self._on_purpose: set[int] = set()
        self._calls: dict[int, NonfiniteCall] = {}
        self._given: list[str] = []
        self._infinities: list[str] = []

    def run(self, buffers: Buffers, function: str) -> Nonfinite:
        """Run the program on these buffers, which it may change."""
        program = self._program
        bound = [*program.slots, *program.inputs, *(constant.var for constant in program.constants)]
        every = [*buffers.slots, *buffers.inputs, *buffers.constants]
        values: dict[Var, Tensor] = dict(zip(bound, every, strict=True))
        for var, tensor in values.items():
            has_nan, has_inf = _holds(tensor)
            if has_nan:
                self._from[var.storage] = frozenset({-1})
                self._given.append(self._in_words(var, tensor))
            elif has_inf:
                self._on_purpose.add(var.storage)
                self._infinities.append(self._in_words(var, tensor))
        leaves = zip(program.slot_names, program.slots, program.new_state, strict=False)
        results = [*program.named_results(), *((name, new) for name, _, new in leaves)]
        kept, drop = {var for _, var in results}, last_uses(program.instrs)
        for number, instr in enumerate(program.instrs):
            self._make(number, instr, values)
            for var in drop.get(number, ()):
                if var not in kept:
                    del values[var]
        bad = {name: var for name, var in results if any(_holds(values[var]))}
        come_from = sorted(frozenset().union(*(self._from.get(var.storage, ()) for var in bad.values())))
        given = self._given if -1 in come_from else []
        if any(var.storage not in self._from for var in bad.values()):
            given = [*given, *(self._infinities or ["infinite numbers in the code"])]
        calls = tuple(self._calls[number] for number in come_from if number >= 0)
        return Nonfinite(function, calls, tuple(dict.fromkeys(given)), tuple(bad))

    def _make(self, number: int, instr: Instr, values: dict[Var, Tensor]) -> None:
        between = is_between_ranks(instr.op)  # what is on its way to other ranks cannot be looked at
        come_from = frozenset[int]().union(
            *(
                self._from[var.storage]
                for var in dict.fromkeys(instr.inputs())
                if var.storage in self._from and (between or any(_holds(values[var])))
            )
        )
        numbers = numbers_in([instr.args, *instr.kwargs.values()])
        purpose = any(isinstance(one, float) and math.isinf(one) for one in numbers) or any(
            var.storage in self._on_purpose and _holds(values[var])[1] for var in instr.inputs()
        )
        reads = {var: values[var] for var in dict.fromkeys(instr.inputs()) if var not in instr.writes}
        values.update(
            (var, one)
            for var, one in assigned(instr.out, evaluate(instr, values.__getitem__))
            if one is not None
        )
        if between and instr.op not in WAITS:
            self._from |= {var.storage: come_from for var in (*instr.outputs(), *instr.writes) if come_from}
            return
        if instr.name.removeprefix("new_").startswith("empty"):
            return
        for var in dict.fromkeys((*instr.outputs(), *instr.writes)):
            if var not in values:  # a result that the kernel leaves out
                continue
            has_nan, has_inf = _holds(values[var])
            if not (has_nan or has_inf):
                if var.fills:
                    self._from.pop(var.storage, None)
                    self._on_purpose.discard(var.storage)
            elif purpose and not (has_nan or come_from):
                self._on_purpose.add(var.storage)
            else:
                arrived = between or instr.is_view  # a view of bytes, as which numbers are sent
                new = come_from or {-1 if arrived else number}
                self._from[var.storage] = self._from.get(var.storage, frozenset()) | new
                if arrived and not come_from:
                    source = "another rank" if self._ranks else "bits that are read as numbers"
                    self._given.append(f"from {source}, at {instr.origin.line}")
                elif not come_from and number not in self._calls:
                    seen = self._in_words(var, values[var]), tuple(map(self._in_words, reads, reads.values()))
                    self._calls[number] = NonfiniteCall(*location_of(instr, self._phases[instr]), *seen)

    def _in_words(self, var: Var, tensor: Tensor) -> str:
        spec, _, _ = str(BufferSpec.of(tensor)).partition("@")
        return "  ".join(filter(None, (self._names.get(var, ""), spec, _contents(tensor))))


def _holds(tensor: Tensor) -> tuple[bool, bool]:
    """Whether a tensor holds NaN, and whether it holds infinities; one of another stage has no values here."""
    if tensor.is_meta or tensor.itemsize < 2 or not (tensor.is_floating_point() or tensor.is_complex()):
        return False, False
    if bool(tensor.isfinite().all()):
        return False, False
    return bool(tensor.isnan().any()), bool(tensor.isinf().any())


def _contents(tensor: Tensor) -> str:
    """Return in words how many elements are not finite, where the first of them is, and the range of the others."""
    if tensor.is_meta or not tensor.numel() or (tensor.itemsize < 2 and tensor.is_floating_point()):
        return ""
    numbers = tensor.abs() if tensor.is_complex() else tensor
    if not numbers.is_floating_point():
        wide = numbers.long()
        return f"{int(wide.min())} to {int(wide.max())}"
    wrong = ~numbers.isfinite()
    kinds = {"nan": numbers.isnan(), "inf": numbers.isposinf(), "-inf": numbers.isneginf()}
    counts = [f"{kind} in {int(flags.sum()):,}" for kind, flags in kinds.items() if bool(flags.any())]
    parts = []
    if counts:
        where = f", first at {wrong.nonzero()[0].tolist()}" if tensor.dim() else ""
        parts.append(f"{', '.join(counts)} of {tensor.numel():,}{where}")
    finite = numbers[~wrong]
    if finite.numel():
        low, high = float(finite.min()), float(finite.max())
        parts.append(f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}")
    return "; ".join(parts)
