"""Templates: calls that a program makes several times stand in it once, and each further time as one call of them.

So what is done for each call of a program is done once for a stage of a pipeline, and not once for each micro-batch.
Whoever needs all ATen calls asks for them: :func:`unrolled`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .program import Instr, Program, Twins, Var, live, map_arguments

__all__ = ["Template", "calls_of", "merge_given", "rename", "rewrite_templates", "unrolled"]


class Template:
    """Calls that are made several times, as an op: ``results = template(given, variables, storages)``.

    It gets, besides, how much is added to the numbers of its variables and storages where it is made again.

    Args:
      name: Its name in texts.
      given: What it reads; others take their place each time.
      calls: The calls; they write nothing that they are given.
      results: What it computes that others read.

    Attributes:
      start: Numbers of the call and of the variable with which it began.
    """

    namespace = "fcg"
    tags = ()
    _schema = torch._C.parse_schema("fcg::again(Tensor[] given, int variables, int storages) -> Tensor[]")

    def __init__(
        self,
        name: str,
        given: Sequence[Var],
        calls: Sequence[Instr],
        results: Sequence[Var],
        start: tuple[int, int] = (0, 0),
    ) -> None:
        self.name, self.given, self.calls, self.results = name, given, calls, results
        self.start = start
        self._known: dict[Any, Any] = {}

    def __str__(self) -> str:
        return f"again.{self.name.replace(' ', '_')}"

    @classmethod
    def of(
        cls,
        name: str,
        given: Sequence[Var],
        calls: Sequence[Instr],
        results: Sequence[Var],
        start: tuple[int, int],
    ) -> Template:
        """Return a template with variables and calls of its own, which no rewrite of the program reaches."""
        new = Twins()
        own = [one.again(new, one.region) for one in calls]
        return cls(name, list(map(new, given)), own, list(map(new, results)), start)

    def with_calls(self, calls: Sequence[Instr], given: Sequence[Var], results: Sequence[Var]) -> Template:
        """Return the same template with other calls."""
        return Template(self.name, given, calls, results, self.start)

    def known(self, name: str, find: Callable[[Template], Any]) -> Any:
        """Return what is found of the template, once."""
        if name not in self._known:
            self._known[name] = find(self)
        return self._known[name]

    def program(self) -> Program:
        """Return the calls as a program of their own."""
        return Program(self.name, [], [], [*self.given], instrs=[*self.calls], outputs=[*self.results])

    def call(self, given: list[Var], results: list[Var], later: tuple[int, int], number: int) -> Instr:
        """Return a call of it.

        Args:
          given: What it is given.
          results: The variables of what it computes.
          later: What is added to the numbers of its variables and storages.
          number: How often it was made before.
        """
        first = self.calls[0]
        written = self.known("written", _written)
        pairs = zip(self.results, results, strict=True)
        writes = tuple(new for var, new in pairs if var.storage in written)
        region = None if first.region is None else (first.region[0], number)
        return Instr(
            self,
            (given, *later),
            {},
            results,
            writes,
            first.site,
            first.backward,
            first.inner,
            first.origin,
            region,
        )

    def unrolled(self, call: Instr) -> Iterator[Instr]:
        """Yield the calls that a call of it stands for."""
        given, variables, storages = call.args
        names: dict[Var, Var] = dict(zip(self.given, given, strict=True))
        lies = {
            one.storage: (other.storage, other.offset - one.offset) for one, other in reversed(names.items())
        }
        names |= zip(self.results, call.out, strict=True)

        def renamed(var: Var) -> Var:
            if var not in names:
                storage, moved = lies.get(var.storage, (var.storage + storages, 0))
                names[var] = Var(var.index + variables, var.spec, storage, var.offset + moved, var.fills)
            return names[var]

        number = 0 if call.region is None else call.region[1]
        for one in self.calls:
            yield one.again(renamed, None if one.region is None else (one.region[0], number))


def _written(template: Template) -> set[int]:
    return {var.storage for one in template.calls for var in one.writes}


def rewrite_templates(program: Program, act: Callable[[Program], None]) -> dict[Var, Var]:
    """Rewrite the calls of each template of a program, as far as its results are read.

    Args:
      program: The program; its templates become others.
      act: Rewrites such calls in place; what they compute may become what they are given.
    Returns:
      What takes the place of results that are none any more.
    """
    renamed: dict[Var, Var] = {}
    calls = [instr for instr in program.instrs if isinstance(instr.op, Template)]
    _, used = live(program.instrs, [*program.results, *program.new_state]) if calls else ([], set())
    wanted: dict[Template, set[int]] = {}
    for instr in calls:
        wanted.setdefault(instr.op, set()).update(n for n, var in enumerate(instr.out) if var in used)
    others = {one: _Rewritten.of(one, sorted(places), act) for one, places in wanted.items()}
    for instr in program.instrs if calls else ():
        rename(instr, renamed)
        if instr.op in others:
            others[instr.op].replaces(instr, renamed)
    if calls:
        program.instrs = [one for one in program.instrs if one.out or not isinstance(one.op, Template)]
    return renamed


def merge_given(program: Program) -> None:
    """Give a template once what each call of it gives it twice, as of a value and its ``detach``."""
    groups: dict[Template, list[Instr]] = {}
    for instr in program.instrs:
        if isinstance(instr.op, Template):
            groups.setdefault(instr.op, []).append(instr)
    for template, calls in groups.items():
        firsts: dict[tuple[Any, ...], Var] = {}
        columns = zip(*(instr.args[0] for instr in calls), strict=True)
        pairs = [
            (var, firsts.setdefault((var.storage, *column), var))
            for var, column in zip(template.given, columns, strict=True)
        ]
        if len(firsts) == len(pairs):
            continue
        for one in template.calls:
            rename(one, dict(pairs))
        kept = [place for place, (var, first) in enumerate(pairs) if var is first]
        own = template.with_calls(template.calls, [template.given[place] for place in kept], template.results)
        for instr in calls:
            instr.op = own
            instr.takes(([instr.args[0][place] for place in kept], *instr.args[1:]))


@dataclass(frozen=True)
class _Rewritten:
    """A template in place of another one.

    Attributes:
      template: The template.
      reads: Which of what the other one is given it gets.
      makes: Which of the other's results it computes.
      same: For each further one of the other's results, which one of what is given, or of what it makes, it is.
    """

    template: Template
    reads: Sequence[int]
    makes: Sequence[int]
    same: Mapping[int, tuple[str, int]]

    @classmethod
    def of(cls, template: Template, wanted: Sequence[int], act: Callable[[Program], None]) -> _Rewritten:
        part = template.program().twin()
        part.outputs = [part.outputs[number] for number in wanted]
        act(part)
        given = {var: number for number, var in enumerate(part.inputs)}
        makes: dict[Var, int] = {}
        same: dict[int, tuple[str, int]] = {}
        for number, var in zip(wanted, part.outputs, strict=True):
            if var in given:
                same[number] = "given", given[var]
            elif makes.setdefault(var, number) != number:
                same[number] = "made", makes[var]
        calls, used = live(part.instrs, makes)
        reads = [number for var, number in given.items() if var in used]
        own = template.with_calls(calls, [part.inputs[number] for number in reads], list(makes))
        return cls(own, reads, list(makes.values()), same)

    def replaces(self, instr: Instr, renamed: dict[Var, Var]) -> None:
        """Make a call of the other template one of this, and note which results are now what else."""
        given, *later = instr.args
        for number, (kind, place) in self.same.items():
            renamed[instr.out[number]] = (given if kind == "given" else instr.out)[place]
        instr.op = self.template
        instr.takes(([given[number] for number in self.reads], *later))
        instr.gives([instr.out[number] for number in self.makes])
        instr.writes = tuple(var for var in instr.writes if var in instr.outputs())


def rename(instr: Instr, renamed: Mapping[Var, Var]) -> None:
    """Let a call read, and write, what takes the place of variables."""
    if not renamed.keys().isdisjoint(instr.inputs()):
        instr.takes(*map_arguments(lambda var: renamed.get(var, var), instr))
        instr.writes = tuple(renamed.get(var, var) for var in instr.writes)


def calls_of(instrs: Iterable[Instr]) -> list[Instr]:
    """Return calls with those that a call of a template stands for in its place."""
    out: list[Instr] = []
    for instr in instrs:
        if isinstance(instr.op, Template):
            out += instr.op.unrolled(instr)
        else:
            out.append(instr)
    return out


def unrolled(program: Program) -> Program:
    """Return a program with each ATen call; the same one if it makes no calls of templates."""
    if not any(isinstance(instr.op, Template) for instr in program.instrs):
        return program
    return replace(program, instrs=calls_of(program.instrs))
