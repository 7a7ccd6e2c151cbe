"""Blocks: calls that a trace records once, and adds to its program once more each time when they are made again.

A pipeline makes the calls of a stage for each micro-batch. No Python of the user runs in between, and what the calls
are given has the same layout each time, so a trace would find the same calls: all that is new are the variables. A
block whose calls could depend on more than that is recorded each time.

In the finished program each time is one call of a sub-program. A block that sends or that checks is copied call by
call: what asks for such calls finds each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ..shards.transfers import is_between_ranks
from .program import Instr, Program, Report, Twins, Var, layouts_of, map_vars, written_storages
from .sub_programs import SubProgram
from .variables import Variables

__all__ = ["Blocks"]


class Blocks:
    """The blocks of a trace.

    Args:
      program: What is traced.
      variables: Its variables.

    Attributes:
      known: The blocks by name; None for those that cannot be copied.
    """

    def __init__(self, program: Program, variables: Variables) -> None:
        self._program, self._variables = program, variables
        self._recorded: list[tuple[int, Instr]] = []
        self.known: dict[Hashable, _Block | None] = {}

    def recorded(
        self, name: Hashable, act: Callable[[list[Tensor]], list[Tensor]], given: Sequence[Any], title: str
    ) -> list[Tensor]:
        """Compute a block on what it is given, tensors or variables; keep what is recorded of it."""
        variables, declared = self._variables, len(self._variables.declared)
        start = self._counts()
        tensors = list(map(variables.tensor, given))
        out = act(tensors)
        described = list(map(variables.of, tensors)), list(map(variables.of, out))
        # What was met for the first time is no part of the block.
        known = declared == len(variables.declared)
        self.known[name] = block = self._since(start, title, *described) if known else None
        if block is not None and block.is_one_call:
            self._recorded.append((start[0], block.sub_program.call([*block.reads], [*block.makes], (0, 0))))
        return out

    def _counts(self) -> tuple[int, ...]:
        """Return the numbers of calls, variables, storages, constants and reports so far."""
        program, variables = self._program, self._variables
        counts = len(program.instrs), variables.count, variables.storages
        return *counts, len(program.constants), len(program.reports)

    def _since(
        self, start: tuple[int, ...], title: str, given: Sequence[Var | None], results: Sequence[Var | None]
    ) -> _Block | None:
        """Return the block of all that was recorded since :meth:`_counts`; None if it cannot be copied.

        It cannot if it reads or makes a tensor that has no variable, if it writes or returns a literal, or if a call
        depends on more than the layout of what the block is given: one that writes it, which the rules may forbid, or
        that counts from where its memory begins.
        """
        program, (call, variable, storage, constant, report) = self._program, start
        calls, reports = program.instrs[call:], program.reports[report:]
        touched = (var for instr in calls for var in (*instr.writes, *_read_from_the_start(instr)))
        known = [var for var in given if var is not None]
        made = [var for var in results if var is not None]
        if len(known) < len(given) or len(made) < len(results):
            return None
        fixed = {one.var for one in program.constants[constant:]}
        # What it returns, others may write.
        others_each_time = written_storages(calls) | {var.storage for var in made}
        if any(var.storage < storage for var in touched) or any(v.storage in others_each_time for v in fixed):
            return None
        read = dict.fromkeys((*known, *(var for one in calls for var in one.inputs())))
        reads = [var for var in read if var.index < variable or var in fixed]
        told = dict.fromkeys((*made, *(var for one in reports for var in one.values)))
        makes = [var for var in told if var.index >= variable and var not in fixed]
        new = Twins()
        own = [one.again(new) for one in calls]
        sub_program = SubProgram(title, list(map(new, reads)), own, list(map(new, makes)), (call, variable))
        shown = [replace(one, values=map_vars(new, one.values)) for one in reports]
        storages = range(storage, self._variables.storages)
        count = self._variables.count - variable
        return _Block(
            storages, count, known, layouts_of(known), reads, makes, sub_program, list(map(new, made)), shown
        )

    def again(self, name: Hashable, given: Sequence[Any]) -> list[Any] | None:
        """Add the calls of a block once more; return what it computes, None if it has to be recorded.

        Args:
          name: Name of the block.
          given: What it is given, tensors or variables.
        """
        block = self.known.get(name)
        own = [one if type(one) is Var else self._described(one) for one in given]
        if block is None or not block.fits(own):
            return None
        back = dict(zip(own, given, strict=True))
        return [back.get(var, var) for var in block.again(self._program, own, self._variables)]

    def fold(self) -> None:
        """Let one call stand for the calls of each block that was recorded, too; the trace has to be at its end."""
        for start, call in reversed(self._recorded):
            self._program.instrs[start : start + len(call.op.calls)] = [call]

    def _described(self, value: Any) -> Var | None:
        """Return the variable of a tensor that a block is given; None if it is none of the trace, or not any more."""
        var = self._variables.of(value)
        return var if var is not None and self._variables.describes(var, value) else None


@dataclass(frozen=True, slots=True)
class _Block:
    """Calls that are made several times.

    Attributes:
      storages: The numbers of the storages that it made.
      count: How many variables it made.
      given: The variables that are others each time.
      layouts: How these lie.
      reads: Those, and what it reads besides.
      makes: What it computes that others read.
      sub_program: Its calls, which have variables of their own; so have the following ones.
      results: What it returned: some of what it makes or was given.
      reports: What it prints or taps.
    """

    storages: range
    count: int
    given: Sequence[Var]
    layouts: Hashable
    reads: Sequence[Var]
    makes: Sequence[Var]
    sub_program: SubProgram
    results: Sequence[Var]
    reports: Sequence[Report]

    @property
    def is_one_call(self) -> bool:
        """Whether a call of a sub-program stands for the block."""
        calls = self.sub_program.calls
        return len(calls) > 1 and not any(is_between_ranks(one.op) or one.checks for one in calls)

    def again(self, program: Program, given: Sequence[Var | None], variables: Variables) -> list[Var]:
        """Add the calls to a program once more; return what they compute.

        Args:
          program: The program.
          given: What takes the place of the given variables.
          variables: Numbers the others.
        """
        variable, storage = variables.reserve(self.count, self.storages)
        later = variable - self.sub_program.start[1], storage - self.storages.start
        names: dict[Var, Any] = dict(zip(self.given, given, strict=True))
        reads = [names.get(var, var) for var in self.reads]
        new = self.sub_program.naming(reads, later)
        if self.is_one_call:
            program.instrs.append(
                self.sub_program.call(reads, list(map(new, self.sub_program.results)), later)
            )
        else:
            program.instrs += [one.again(new) for one in self.sub_program.calls]
        program.reports += [replace(one, values=map_vars(new, one.values)) for one in self.reports]
        return list(map(new, self.results))

    def fits(self, given: Sequence[Var | None]) -> bool:
        """Whether other variables lie as those that the block was given at first."""
        known = [var for var in given if var is not None]
        return len(known) == len(given) and layouts_of(known) == self.layouts


def _read_from_the_start(instr: Instr) -> Sequence[Var]:
    """Return what a call such as ``as_strided`` reads from where its memory begins."""
    counts = any(one.name == "storage_offset" for one in instr.op._schema.arguments)
    return instr.inputs() if counts else ()
