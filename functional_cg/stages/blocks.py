"""Blocks: calls that a trace records once, and that stand in it as one call of a template when they are made again.

A pipeline makes the calls of a stage for each micro-batch. No Python of the user runs in between, and what the calls
are given has the same layout each time, so a trace would find the same calls: all that is new are the variables. A
block whose calls could depend on more than that is recorded each time. One that sends, that prints, or that has
literals is copied call by call: what asks for such calls finds each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ..shards.transfers import is_between_ranks
from .program import Constant, Instr, Program, Report, Var, map_vars
from .template import Template
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
        self.known: dict[Hashable, _Block | None] = {}

    def recorded(
        self, name: Hashable, act: Callable[[list[Tensor]], list[Tensor]], given: Sequence[Any]
    ) -> list[Tensor]:
        """Compute a block on what it is given, tensors or variables; keep what is recorded of it."""
        variables, declared = self._variables, len(self._variables.declared)
        start = _Mark.of(self._program, variables)
        tensors = list(map(variables.tensor, given))
        out = act(tensors)
        end = _Mark.of(self._program, variables)
        described = list(map(variables.of, tensors)), list(map(variables.of, out))
        block = _Block.between(start, end, self._program, *described)
        # What was met for the first time is no part of the block.
        self.known[name] = block if declared == len(variables.declared) else None
        return out

    def again(self, name: Hashable, given: Sequence[Any], number: int) -> list[Any] | None:
        """Add the calls of a block once more; return what it computes, None if it has to be recorded.

        Args:
          name: Name of the block.
          given: What it is given, tensors or variables.
          number: How often it was made before.
        """
        block = self.known.get(name)
        if block is None:
            return None
        found = [one if type(one) is Var else self._described(one) for one in given]
        own = [var for var in found if var is not None]
        made = block.again(self._program, own, self._variables, number) if len(own) == len(found) else None
        back = dict(zip(own, given, strict=False))
        return None if made is None else [back.get(var, var) for var in made]

    def _described(self, value: Any) -> Var | None:
        """Return the variable of a tensor that a block is given; None if it is none of the trace, or not any more."""
        var = self._variables.of(value)
        return var if var is not None and self._variables.describes(var, value) else None


@dataclass(frozen=True, slots=True)
class _Mark:
    """How much of everything a trace has recorded."""

    variables: int
    storages: int
    calls: int
    constants: int
    reports: int

    @classmethod
    def of(cls, program: Program, variables: Variables) -> _Mark:
        counts = len(program.instrs), len(program.constants), len(program.reports)
        return cls(variables.count, variables.storages, *counts)


@dataclass(frozen=True, slots=True)
class _Block:
    """Calls that are made several times.

    Attributes:
      start: Where it began.
      end: Where it ended.
      given: The variables that are others each time.
      results: What it computed that others read; they may be given ones.
      calls: Its calls.
      literals: The constants that belong to its calls alone: literals, which a call may write.
      reports: What it prints or taps.
      template: Its calls as a template, with what that reads, and what it makes; None if they are copied.
    """

    start: _Mark
    end: _Mark
    given: Sequence[Var]
    results: Sequence[Var]
    calls: Sequence[Instr]
    literals: Sequence[Constant]
    reports: Sequence[Report]
    template: tuple[Template, Sequence[Var], Sequence[Var]] | None

    @classmethod
    def between(
        cls,
        start: _Mark,
        end: _Mark,
        program: Program,
        given: Sequence[Var | None],
        results: Sequence[Var | None],
    ) -> _Block | None:
        """Return the block of all that was recorded since a mark; None if it cannot be copied.

        It cannot if it reads or makes a tensor that has no variable, or if a call depends on more than the layout of
        what the block is given: one that writes it, which the rules may forbid, or that counts from where its memory
        begins.
        """
        calls = program.instrs[start.calls :]
        touched = (var for instr in calls for var in (*instr.writes, *_read_from_the_start(instr)))
        known = [var for var in given if var is not None], [var for var in results if var is not None]
        if len(known[0]) < len(given) or len(known[1]) < len(results):
            return None
        if any(var.storage < start.storages for var in touched):
            return None
        literals, reports = program.constants[start.constants :], program.reports[start.reports :]
        block = cls(start, end, *known, calls, literals, reports, None)
        return replace(block, template=block._template())

    def _template(self) -> tuple[Template, Sequence[Var], Sequence[Var]] | None:
        if len(self.calls) < 2 or self.literals or self.reports:
            return None
        if any(is_between_ranks(one.op) or one.checks for one in self.calls):
            return None
        first = self.start.variables
        read = (*self.given, *(var for one in self.calls for var in one.inputs()))
        reads = [var for var in dict.fromkeys(read) if var.index < first]
        makes = [var for var in dict.fromkeys(self.results) if var.index >= first]
        name = self.calls[0].region[0] if self.calls[0].region else self.calls[0].name
        return Template.of(name, reads, self.calls, makes, (self.start.calls, first)), reads, makes

    def again(
        self, program: Program, given: Sequence[Var], variables: Variables, number: int
    ) -> list[Var] | None:
        """Add the calls to a program once more; return what they compute, or None if they might be others.

        Args:
          program: The program.
          given: What takes the place of the given variables.
          variables: Numbers the others.
          number: How often the block was made before.
        """
        names = self._names(given)
        if names is None:
            return None
        made = range(self.start.storages, self.end.storages)
        later = names.begin(*variables.reserve(self.end.variables - self.start.variables, made))
        if self.template is not None:
            template, reads, makes = self.template
            call = template.call(list(map(names, reads)), list(map(names, makes)), later, number)
            program.instrs.append(call)
            return list(map(names, self.results))
        for literal in self.literals:
            constant = replace(literal, var=names(literal.var), name=f"literal {len(program.constants)}")
            program.constants.append(constant)
        for one in self.calls:
            region = None if one.region is None else (one.region[0], number)
            program.instrs.append(one.again(names, region))
        program.reports += [replace(report, values=map_vars(names, report.values)) for report in self.reports]
        return list(map(names, self.results))

    def _names(self, given: Sequence[Var]) -> _Names | None:
        """Return the variables of a copy; None if what is given lies otherwise than at first."""
        if len(given) != len(self.given):
            return None
        names = _Names(self.start)
        storages, moved = names.storages, names.moved
        for one, other in zip(self.given, given, strict=True):
            # Compared as objects first: a pipeline makes thousands of them, and nearly all are one.
            if one.spec is not other.spec and one.spec != other.spec:
                return None
            alike = (
                one.fills == other.fills
                and names.setdefault(one, other) is other
                and storages.setdefault(one.storage, other.storage) == other.storage
                and moved.setdefault(one.storage, other.offset - one.offset) == other.offset - one.offset
            )
            if not alike:
                return None
        return names


class _Names(dict[Var, Var]):
    """The variables of a copy, by those of the block.

    Args:
      start: Where the block began.

    Attributes:
      storages: The storages of what is given, by those of the block.
      moved: By storage of the block, how many elements further on it is read.
    """

    def __init__(self, start: _Mark) -> None:
        super().__init__()
        self._variables, self._storages = start.variables, start.storages
        self.storages: dict[int, int] = {}
        self.moved: dict[int, int] = {}
        self._later = self._storages_later = 0

    def begin(self, variable: int, storage: int) -> tuple[int, int]:
        """Number the variables that the copy makes, and their storages, from these on; return by how much later."""
        self._later, self._storages_later = variable - self._variables, storage - self._storages
        return self._later, self._storages_later

    def __missing__(self, var: Var) -> Var:
        if var.index < self._variables:  # of the surroundings, and the same each time
            return var
        storage, offset = var.storage, var.offset
        if storage >= self._storages:
            storage += self._storages_later
        elif storage in self.storages:
            storage, offset = self.storages[storage], offset + self.moved[storage]
        self[var] = made = Var(var.index + self._later, var.spec, storage, offset, var.fills)
        return made

    __call__ = dict.__getitem__


def _read_from_the_start(instr: Instr) -> Sequence[Var]:
    """Return what a call such as ``as_strided`` reads from where its memory begins."""
    counts = any(one.name == "storage_offset" for one in instr.op._schema.arguments)
    return instr.inputs() if counts else ()
