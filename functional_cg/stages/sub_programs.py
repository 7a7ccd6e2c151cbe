"""Sub-programs: calls that a program makes several times are an op, and each time is one call of it.

So what is done for each call of a program is done once for a stage of a pipeline, and not once for each micro-batch.
Whoever needs all ATen calls asks for them: :func:`unrolled`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .program import Instr, Program, Var, live, map_arguments, written_storages

__all__ = [
    "SubProgram", "calls_of", "each_once", "first_unrolled", "rename", "rewrite_sub_programs", "unrolled",
]  # fmt: skip


class SubProgram:
    """Calls that a program makes several times, as an op: ``results = sub_program(given, variables, storages)``.

    It gets, besides, how much is added to the numbers of its variables and storages where it is made again.

    Args:
      title: Name of the function that a compiler makes of it; empty if it makes none.
      given: What it reads; others take their place each time.
      calls: The calls; they write nothing that they are given.
      results: What it computes that others read.
      start: Numbers of the call and of the variable with which it began.
    """

    namespace = "fcg"
    tags = ()
    _schema = torch._C.parse_schema("fcg::again(Tensor[] given, int variables, int storages) -> Tensor[]")

    def __init__(
        self,
        title: str,
        given: Sequence[Var],
        calls: Sequence[Instr],
        results: Sequence[Var],
        start: tuple[int, int] = (0, 0),
    ) -> None:
        self.title, self.given, self.calls, self.results = title, given, calls, results
        self.start = start
        self._known: dict[Any, Any] = {}

    def __str__(self) -> str:
        return f"again.{(self.title or self.calls[0].name).replace(' ', '_')}"

    def with_calls(self, calls: Sequence[Instr], given: Sequence[Var], results: Sequence[Var]) -> SubProgram:
        """Return the same sub-program with other calls."""
        return SubProgram(self.title, given, calls, results, self.start)

    def known(self, name: str, find: Callable[[SubProgram], Any]) -> Any:
        """Return what is found of the sub-program, once."""
        if name not in self._known:
            self._known[name] = find(self)
        return self._known[name]

    def program(self) -> Program:
        """Return the calls as a program of their own."""
        return Program(self.title, [], [], [*self.given], instrs=[*self.calls], outputs=[*self.results])

    def call(self, given: list[Var], results: list[Var], later: tuple[int, int]) -> Instr:
        """Return a call of it.

        Args:
          given: What it is given.
          results: The variables of what it computes.
          later: What is added to the numbers of its variables and storages.
        """
        first = self.calls[0]
        written = self.known("written", lambda one: written_storages(one.calls))
        pairs = zip(self.results, results, strict=True)
        writes = tuple(new for var, new in pairs if var.storage in written)
        told = first.site, first.backward, first.inner, first.origin
        return Instr(self, (given, *later), {}, results, writes, *told)

    def naming(
        self, given: Sequence[Var], later: Sequence[int], made: Iterable[Var] = ()
    ) -> Callable[[Var], Var]:
        """Return what gives each variable the one that a call has in its place.

        Args:
          given: What the call is given.
          later: What is added to the numbers of variables and storages.
          made: What it computes, if that has variables.
        """
        names: dict[Var, Var] = dict(zip(self.given, given, strict=True))
        lies = {
            one.storage: (other.storage, other.offset - one.offset) for one, other in reversed(names.items())
        }
        names |= zip(self.results, made, strict=False)

        def named(var: Var) -> Var:
            if var not in names:
                storage, moved = lies.get(var.storage, (var.storage + later[1], 0))
                names[var] = Var(var.index + later[0], var.spec, storage, var.offset + moved, var.fills)
            return names[var]

        return named

    def unrolled(self, call: Instr) -> list[Instr]:
        """Return the calls that a call of it stands for."""
        given, *later = call.args
        new = self.naming(given, later, call.out)
        return [one.again(new) for one in self.calls]


def rewrite_sub_programs(program: Program, act: Callable[[Program], None]) -> dict[Var, Var]:
    """Rewrite the calls of each sub-program of a program, as far as its results are read.

    Args:
      program: The program; its sub-programs become others.
      act: Rewrites such calls in place; what they compute may become what they are given.
    Returns:
      What takes the place of results that are none any more.
    """
    renamed: dict[Var, Var] = {}
    calls = [instr for instr in program.instrs if isinstance(instr.op, SubProgram)]
    _, used = live(program.instrs, [*program.results, *program.new_state]) if calls else ([], set())
    wanted: dict[SubProgram, set[int]] = {}
    for instr in calls:
        wanted.setdefault(instr.op, set()).update(n for n, var in enumerate(instr.out) if var in used)
    others = {one: _Rewritten.of(one, sorted(places), act) for one, places in wanted.items()}
    for instr in program.instrs if calls else ():
        rename(instr, renamed)
        if instr.op in others:
            others[instr.op].replaces(instr, renamed)
    if calls:
        program.instrs = [one for one in program.instrs if one.out or not isinstance(one.op, SubProgram)]
    return renamed


@dataclass(frozen=True)
class _Rewritten:
    """A sub-program in place of another one.

    Attributes:
      sub_program: The sub-program.
      reads: Which of what the other one is given it gets.
      makes: Which of the other's results it computes.
      same: For each further one of the other's results, which of what is given, followed by the results, it is.
    """

    sub_program: SubProgram
    reads: Sequence[int]
    makes: Sequence[int]
    same: Mapping[int, int]

    @classmethod
    def of(cls, sub_program: SubProgram, wanted: Sequence[int], act: Callable[[Program], None]) -> _Rewritten:
        part = sub_program.program().twin()
        part.outputs = [part.outputs[number] for number in wanted]
        act(part)
        count = len(part.inputs)
        places = {var: number for number, var in enumerate(part.inputs)}
        found = [places.setdefault(var, count + n) for n, var in zip(wanted, part.outputs, strict=True)]
        same = {n: place for n, place in zip(wanted, found, strict=True) if place != count + n}
        makes = {var: place - count for var, place in places.items() if place >= count}
        calls, used = live(part.instrs, makes)
        reads = [number for number, var in enumerate(part.inputs) if var in used]
        own = sub_program.with_calls(calls, [part.inputs[number] for number in reads], list(makes))
        return cls(own, reads, list(makes.values()), same)

    def replaces(self, instr: Instr, renamed: dict[Var, Var]) -> None:
        """Make a call of the other sub-program one of this, and note which results are now what else."""
        given, *later = instr.args
        every = [*given, *instr.out]
        renamed |= {instr.out[number]: every[place] for number, place in self.same.items()}
        instr.op = self.sub_program
        instr.takes(([given[number] for number in self.reads], *later))
        instr.gives([instr.out[number] for number in self.makes])
        instr.writes = tuple(var for var in instr.writes if var in instr.outputs())


def rename(instr: Instr, renamed: Mapping[Var, Var]) -> None:
    """Let a call read, and write, what takes the place of variables."""
    if not renamed.keys().isdisjoint(instr.inputs()):
        instr.takes(*map_arguments(lambda var: renamed.get(var, var), instr))
        instr.writes = tuple(renamed.get(var, var) for var in instr.writes)


def calls_of(instrs: Iterable[Instr]) -> list[Instr]:
    """Return calls with those that a call of a sub-program stands for in its place."""
    out: list[Instr] = []
    for instr in instrs:
        if isinstance(instr.op, SubProgram):
            out += instr.op.unrolled(instr)
        else:
            out.append(instr)
    return out


def unrolled(program: Program) -> Program:
    """Return a program with each ATen call."""
    return replace(program, instrs=calls_of(program.instrs))


def each_once(instrs: Iterable[Instr]) -> Iterator[Instr]:
    """Yield calls, those of each sub-program once, with the variables of its own."""
    for one in dict.fromkeys(instr.op if isinstance(instr.op, SubProgram) else instr for instr in instrs):
        yield from one.calls if isinstance(one, SubProgram) else [one]


def first_unrolled(program: Program) -> Program:
    """Return a program with the ATen calls of each sub-program at its first call."""
    seen = set[Any]()
    out: list[Instr] = []
    for instr in program.instrs:
        first = isinstance(instr.op, SubProgram) and instr.op not in seen
        out += instr.op.unrolled(instr) if first else [instr]
        seen.add(instr.op)
    return replace(program, instrs=out)
