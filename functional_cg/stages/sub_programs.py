"""Sub-programs: calls that a program makes several times are an op, and each time is one call of it.

So what is done for each call of a program is done once for a stage of a pipeline, and not once for each micro-batch.
Whoever needs all ATen calls asks for them: :func:`unrolled`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from .program import Instr, Program, Var, live, written_storages

__all__ = [
    "SubProgram", "calls_of", "each_once", "first_unrolled", "inside_of", "rename", "rewrite_sub_programs", "unrolled",
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
    calls = [instr for instr in program.instrs if isinstance(instr.op, SubProgram)]
    if not calls:
        return {}
    renamed: dict[Var, Var] = {}
    _, used = live(program.instrs, [*program.results, *program.new_state])
    wanted: dict[SubProgram, set[int]] = {}
    for instr in calls:
        wanted.setdefault(instr.op, set()).update(n for n, var in enumerate(instr.out) if var in used)
    others = {one: _rewritten(one, sorted(places), act) for one, places in wanted.items()}
    instrs = []
    for instr in program.instrs:
        instr = rename(instr, renamed)
        if instr.op in others:
            given, *later = instr.args
            every = [*given, *instr.out]
            op, reads, makes, same = others[instr.op]
            renamed |= {every[number]: every[place] for number, place in same.items()}
            made = [every[number] for number in makes]
            writes = tuple(var for var in instr.writes if var in made)
            args = [given[number] for number in reads], *later
            instr = replace(instr, op=op, args=args, out=made, writes=writes)
        if instr.out or not isinstance(instr.op, SubProgram):
            instrs.append(instr)
    program.instrs = instrs
    return renamed


def _rewritten(
    sub_program: SubProgram, wanted: Sequence[int], act: Callable[[Program], None]
) -> tuple[SubProgram, Sequence[int], Sequence[int], Mapping[int, int]]:
    """Rewrite a sub-program. What it is given and its results, one after another, have numbers here.

    Returns:
      (other, reads, makes, same): the other sub-program, what that is given and its results, and for each further
      wanted result what it is.
    """
    part = sub_program.program().twin()
    count, results = len(part.inputs), part.outputs
    part.outputs = [results[number] for number in wanted]
    act(part)
    places = {var: number for number, var in enumerate(part.inputs)}
    found = {
        count + n: places.setdefault(var, count + n) for n, var in zip(wanted, part.outputs, strict=True)
    }
    makes = {var: place for var, place in places.items() if place >= count}
    calls, used = live(part.instrs, makes)
    reads = [number for number, var in enumerate(part.inputs) if var in used]
    other = sub_program.with_calls(calls, [part.inputs[number] for number in reads], list(makes))
    return other, reads, list(makes.values()), {one: place for one, place in found.items() if place != one}


def rename(instr: Instr, renamed: Mapping[Var, Var]) -> Instr:
    """Return a call that reads, and writes, what takes the place of variables."""
    if renamed.keys().isdisjoint(instr.inputs()):
        return instr
    writes = tuple(renamed.get(var, var) for var in instr.writes)
    return replace(instr.reading(lambda var: renamed.get(var, var)), writes=writes)


def calls_of(instrs: Iterable[Instr]) -> list[Instr]:
    """Return calls with those that a call of a sub-program stands for in its place."""
    return [one for instr in instrs for one in _unrolled(instr)]


def _unrolled(instr: Instr) -> list[Instr]:
    return instr.op.unrolled(instr) if isinstance(instr.op, SubProgram) else [instr]


def unrolled(program: Program) -> Program:
    """Return a program with each ATen call."""
    return replace(program, instrs=calls_of(program.instrs))


def inside_of(instrs: Iterable[Instr]) -> Iterator[Instr]:
    """Yield calls, in place of one of a sub-program the calls inside of it, with the variables of its own."""
    for instr in instrs:
        yield from instr.op.calls if isinstance(instr.op, SubProgram) else [instr]


def each_once(instrs: Iterable[Instr]) -> Iterator[Instr]:
    """Yield calls, those of each sub-program once, with the variables of its own."""
    first = {instr.op if isinstance(instr.op, SubProgram) else instr: instr for instr in instrs}
    return inside_of(first.values())


def first_unrolled(program: Program) -> Program:
    """Return a program with the ATen calls of each sub-program at its first call."""
    first = {instr.op: instr for instr in reversed(program.instrs)}
    every = (_unrolled(instr) if first[instr.op] is instr else [instr] for instr in program.instrs)
    return replace(program, instrs=[one for calls in every for one in calls])
