"""Compile equal parts of a program once: sub-programs, or what lies between cuts where it repeats itself.

A part is what one compiled function runs. Between parts, values are handed on in memory, as they were made: a view of a
value is taken again in each part that reads it, and a cast to a wider dtype made again. The update of a leaf runs in
the part that makes its gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch

from ...state.outline import count
from ..fx_passes.cross_entropy import suit
from ..fx_passes.old_values import KEPT, LATER
from ..passes.out_of_place import write_out_of_place
from ..program import Instr, Program, Var, written_storages
from ..schedule import Schedule, schedule
from ..sub_programs import SubProgram
from ..trial.reference import Reference
from .early_updates import Leaf, by_leaf, joined
from .functions import Compiler, FunctionsPlan, Part, collects, compiled_once, grouped
from .repeats import cuts

__all__ = ["Parts", "by_sub_programs", "in_parts", "parts_of"]

T = TypeVar("T")
_CAST = torch.ops.aten._to_copy.default

_WORTH = 0.75  # of the calls may be left to compile; else one function is compiled faster


@dataclass
class Parts:
    """A program in parts.

    Attributes:
      alike: The parts, those that share a compiled function together.
      order: The parts in the order in which they run.
      after: Views that others read, taken after the parts.
      commits: Pairs (slot, new value) that no part writes.
    """

    alike: list[list[Part]]
    order: list[Part]
    after: list[Instr]
    commits: list[tuple[Var, Var]]


def in_parts(
    program: Program,
    device: torch.device,
    compiler: Compiler | None,
    reference: Reference,
    *,
    in_place: bool,
    least: int = 0,
) -> FunctionsPlan | None:
    """Return a plan that compiles equal parts of a program once; None if that would save too little.

    Args:
      program: A rewritten program.
      device: Where it runs.
      compiler: Compiles a part; None for inductor.
      reference: The program as traced.
      in_place: Whether the compiled functions write the slots.
      least: How many calls need not be compiled at least.
    """
    if not in_place:  # else it is prepared
        write_out_of_place(program)
    plan = schedule(program, fuse=() if in_place else None)
    parts = parts_of(program, plan, in_place=in_place, least=least)
    if parts is None:
        return None
    suits = suit if device.type != "cpu" and compiler is None else None
    heads, calls = compiled_once(parts.alike, compiler, device, program.function, in_order=False, suit=suits)
    checks = [instr for instr in plan.head if instr.checks]
    runs = [instr for part in parts.order for instr in calls[part]]
    return FunctionsPlan(
        program, plan, replace(plan, head=[*runs, *parts.after, *checks], commits=parts.commits), device,
        heads,
        copies=device.type == "cpu" and bool(plan.commits),
        shared=[_said(alike) for alike in parts.alike if len(alike) > 1],
        raised_at=reference.raises_at,
    )  # fmt: skip


def by_sub_programs(
    program: Program, device: torch.device, compiler: Compiler | None, reference: Reference
) -> FunctionsPlan:
    """Return a plan that runs titled sub-programs as compiled functions, in the order of the trace.

    What stands between them, such as transfers and sums, stays ATen calls. So the first call does not take longer with
    more micro-batches, and memory is allocated and freed in the order of the schedule.

    Args:
      program: A rewritten program.
      device: Where it runs.
      compiler: Compiles a sub-program; None for inductor.
      reference: The program as traced.
    """
    plan = schedule(program)
    titled = dict.fromkeys(one.op for one in plan.head if isinstance(one.op, SubProgram) and one.op.title)
    parts = {one: part for one in titled if (part := _as_part(one)) is not None}
    heads, calls = compiled_once(grouped(parts.values()), compiler, device, program.function)
    ops = {one: one.with_calls(calls[part], one.given, one.results) for one, part in parts.items()}
    head = [replace(instr, op=ops.get(instr.op, instr.op)) for instr in plan.head]
    return FunctionsPlan(
        program, plan, replace(plan, head=head), device, heads, one_by_one=True, raised_at=reference.raises_at
    )


def _as_part(sub_program: SubProgram) -> Part | None:
    """Return a sub-program as a part, which returns what others read or what that is a view of; None if it cannot.

    Views of what it gets compute nothing, and are taken before it.
    """
    found, born = Part([], name=sub_program.title), dict[Var, Instr]()
    for instr in sub_program.calls:
        if instr.is_view and born.keys().isdisjoint(instr.inputs()):
            found.before.append(instr)
        else:
            found.calls.append(instr)
            born |= dict.fromkeys(instr.outputs(), instr)
    found.inputs = list(
        dict.fromkeys(var for instr in found.calls for var in instr.inputs() if var not in born)
    )
    entering, bases = {var.storage for var in found.inputs}, dict[int, Var]()
    if not found.calls or not all(instr.outputs() for instr in found.calls):
        return None
    if any(var.storage in entering for var in born):  # its results lie in memory of others
        return None
    for var in sub_program.results:
        chain = [var] if var in born else []
        while chain and born[chain[-1]].is_view:
            chain.append(born[chain[-1]].inputs()[0])
        for base in chain[-1:]:
            if not base.fills or bases.setdefault(base.storage, base) is not base:
                return None
        found.after += [one for view in reversed(chain[:-1]) if (one := born[view]) not in found.after]
    found.outputs = list(bases.values())
    return found


def _said(alike: Sequence[Part]) -> str:
    """Return in words which calls share a function."""
    calls = count(len(alike[0].calls), "call")
    return f"compiled once: {len(alike)} x {calls}, {_where(alike[0])}; ...; {_where(alike[-1])}"


def _where(part: Part) -> str:
    """Return where the calls of a part come from: modules, or lines where there are none."""
    places = [one.origin.module or (str(one.site) if one.site else "") for one in part.calls]
    known = list(dict.fromkeys(filter(None, places))) or ["the update"]
    return known[0] if len(known) == 1 else f"{known[0]} to {known[-1]}"


def parts_of(program: Program, plan: Schedule, *, in_place: bool, least: int = 0) -> Parts | None:
    """Cut a program into parts; None if that is not worth it, or if the order of its calls matters otherwise.

    Args:
      program: A rewritten program.
      plan: Its schedule.
      in_place: Whether parts write slots themselves.
      least: How many calls need not be compiled at least.
    """
    if program.ranges or collects(program):
        return None
    values = _Values.of(program, plan)
    calls = [instr for instr in plan.head if not instr.checks and instr not in values.views]
    end = max((number for number, instr in enumerate(calls, 1) if instr.backward), default=len(calls))
    touched = {var.storage for instr in calls[end:] for var in (*instr.inputs(), *instr.outputs())}
    if values.written & (touched | values.static):
        return None
    divided = _divided(calls[:end], calls[end:], values)
    values.apart.update(_apart(divided, values))
    parts = [Part(values.with_views(calls)) for calls in divided]
    if in_place:
        _commit(parts, values)
    done = {old for part in parts for old, _ in part.commits}
    left = [(old, new) for old, new in plan.commits if old not in done]
    outside = [*values.outside, *(new for _, new in left)]
    after = values.taken(outside, values.views)
    if not _connect(parts, values, [*outside, *(var for instr in after for var in instr.inputs())]):
        return None
    alike = grouped(parts, {*program.slots})
    every = sum(len(part.calls) for part in parts)
    compiled = sum(len(same[0].calls) for same in alike)
    if compiled > _WORTH * every or every - compiled < least:
        return None
    return Parts(alike, parts, after, left)


def _divided(base: Sequence[Instr], rest: Sequence[Instr], values: _Values) -> list[list[Instr]]:
    """Return the calls of each part, without views.

    Args:
      base: The calls up to the end of the backward.
      rest: Those of the update.
      values: The values of the program.
    """
    plan = values.plan
    parts = _cut(base, _outside(cuts(base), base, values.written))
    born = {var.storage: number for number, part in enumerate(parts) for i in part for var in i.outputs()}
    read = {var.storage: number for number, part in enumerate(parts) for i in part for var in i.inputs()}
    target = {new.storage: old.storage for old, new in plan.commits}
    added: list[list[Leaf]] = [[] for _ in parts]
    for leaf in by_leaf(rest, [new for _, new in plan.commits]):
        made = {var.storage for var in leaf.call.outputs()}
        after = [born.get(var.storage, 0) for var in leaf.call.inputs()]
        after += [read.get(target[one], 0) for one in made if one in target]
        number = max(after, default=0)
        born |= dict.fromkeys(made, number)
        added[number].append(leaf)
    late = added.pop()
    parts = [[*part, *joined(leaves)] for part, leaves in zip(parts, [*added, []], strict=True)]
    pieces = _cut(late, cuts([leaf.call for leaf in late]))
    if len(pieces) > 1:
        return [*parts, *map(joined, pieces)]
    return [*parts[:-1], [*parts[-1], *joined(late)]]


def _outside(places: Sequence[int], calls: Sequence[Instr], written: set[int]) -> list[int]:
    """Return the places between the first and the last call on no storage that a call writes in place."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for number, instr in enumerate(calls):
        for storage in {var.storage for var in (*instr.inputs(), *instr.outputs())} & written:
            first.setdefault(storage, number)
            last[storage] = number
    depth = [0] * (len(calls) + 2)
    for storage, number in first.items():
        depth[number + 1] += 1
        depth[last[storage] + 1] -= 1
    inside = list(itertools.accumulate(depth))
    return [place for place in places if not inside[place]]


def _cut(items: Sequence[T], places: Sequence[int]) -> list[list[T]]:
    pairs = zip([0, *places], [*places, len(items)], strict=True)
    return [[*items[start:end]] for start, end in pairs if start < end]


def _is_wider(instr: Instr, written: set[int]) -> bool:
    """Whether a call casts a value that does not change to a wider dtype."""
    if instr.op is not _CAST or not isinstance(instr.out, Var):
        return False
    (source,) = instr.inputs()
    return source.storage not in written and instr.out.spec.nbytes > source.spec.nbytes


@dataclass(frozen=True)
class _Values:
    """The values of a program.

    Attributes:
      makers: The call that makes each variable.
      static: Storages of slots, inputs and constants.
      written: Storages that some call writes in place.
      outside: What is read outside of the parts: by checks, by calls of the commit, and what leaves the step.
      plan: The schedule.
      apart: Views that are taken outside of the parts, as each part reads another one.
      views: The calls that compute nothing: all that they make lies in the memory of their arguments.
      free: What a part makes again instead of reading it: views, and casts to a wider dtype.
    """

    makers: dict[Var, Instr]
    static: set[int]
    written: set[int]
    outside: list[Var]
    plan: Schedule
    views: set[Instr]
    free: set[Instr]
    apart: set[Var] = field(default_factory=set)

    @classmethod
    def of(cls, program: Program, plan: Schedule) -> _Values:
        known = [*program.slots, *program.inputs, *(constant.var for constant in program.constants)]
        makers: dict[Var, Instr] = {}
        for instr in plan.head:
            for var in instr.outputs():
                makers.setdefault(var, instr)  # `native_dropout` may return its argument
        calls = [*(instr for instr in plan.head if instr.checks), *plan.fused]
        outside = [*plan.outputs, *(var for instr in calls for var in instr.inputs() if var in makers)]
        static, written = {var.storage for var in known}, written_storages(plan.head)
        views = {instr for instr in plan.head if instr.only_views}
        free = {instr for instr in plan.head if instr in views or _is_wider(instr, written)}
        return cls(makers, static, written, outside, plan, views, free)

    def taken(
        self, wanted: Iterable[Var], calls: Collection[Instr], at_hand: Collection[Var] = ()
    ) -> list[Instr]:
        """Return those of the calls that lead from values in memory, or at hand, to the wanted ones, in order."""
        found: dict[Instr, None] = {}
        for var in wanted:
            chain: list[Instr] = []
            front = [var]
            while front:
                one = front.pop()
                maker = None if one in at_hand else self.makers.get(one)
                if maker is not None and maker in calls and maker not in found:
                    chain.append(maker)
                    front += maker.inputs()
            found.update(dict.fromkeys(reversed(chain)))
        return list(found)

    def with_views(self, calls: Sequence[Instr], wanted: Sequence[Var] = ()) -> list[Instr]:
        """Return calls with the views and wider copies that they read, each in front of its first reader.

        Args:
          calls: The calls of a part.
          wanted: What else has to be there.
        """
        found: dict[Instr, None] = {}
        own = {var.storage for instr in calls if instr not in self.views for var in instr.outputs()}
        at_hand = {var for var in self.apart if var.storage not in own}
        for instr in calls:
            found.update(dict.fromkeys(self.taken(instr.inputs(), self.free, at_hand)))
            found[instr] = None
        found.update(dict.fromkeys(self.taken(wanted, self.free, at_hand)))
        return list(found)

    def pieces(self, var: Var) -> tuple[Var, ...]:
        """Return the views of a part of a value from which a variable is made by views, the largest one first."""
        found = []
        while (maker := self.makers.get(var)) in self.views:
            found += [] if var.fills else [var]
            var = next(one for one in maker.inputs() if one.storage == var.storage)
        return tuple(reversed(found))


def _apart(divided: Sequence[Sequence[Instr]], values: _Values) -> Iterator[Var]:
    """Yield the pieces of values of which each part reads others, such as the layers of stacked weights.

    Pieces of one piece count, too: half of the features, of which each turn of a loop reads its row.
    """
    nested: dict[int, list[set[tuple[Var, ...]]]] = {}
    for calls in divided:
        own: dict[int, set[tuple[Var, ...]]] = {}
        for var in {var for instr in calls for var in instr.inputs()}:
            if (pieces := values.pieces(var)) and var.storage not in values.written:
                own.setdefault(var.storage, set()).add(pieces)
        for storage, found in own.items():
            nested.setdefault(storage, []).append(found)
    for parts in nested.values():
        for depth in range(max(len(pieces) for found in parts for pieces in found)):
            sets = [{pieces[: depth + 1][-1] for pieces in found} for found in parts]
            if not set.intersection(*sets):
                yield from set.union(*sets)
                break


def _commit(parts: Sequence[Part], values: _Values) -> None:
    """Let the part that makes a new value write its slot, if no later part reads it, nor a piece of it this one."""
    born = {var.storage: part for part in reversed(parts) for i in part.calls for var in i.outputs()}
    number = {part: n for n, part in enumerate(parts)}
    last: dict[int, int] = {}
    for part, n in number.items():
        for var in (var for instr in part.calls for var in instr.inputs()):
            last[var.storage] = max(last.get(var.storage, 0), n + (var in values.apart))
    kept = {var.storage for var in values.outside}
    kept |= {new.storage for _, new in values.plan.commits if new.storage in values.static}
    for old, new in values.plan.commits:
        home = born.get(new.storage)
        if home is None or new.storage in values.static or old.storage in kept:
            continue
        if number[home] >= last.get(old.storage, 0):
            home.commits.append((old, new))
            home.calls = values.with_views(home.calls, [new])


def _without_waits(calls: Sequence[Instr]) -> list[Instr]:
    """Return calls that wait for no value of another part: it is there."""
    born = {var for instr in calls for var in instr.outputs()}
    return [
        replace(instr, op=KEPT, args=instr.args[:1])
        if instr.op is LATER and instr.args[1] not in born
        else instr
        for instr in calls
    ]


def _connect(parts: Sequence[Part], values: _Values, outside: Iterable[Var]) -> bool:
    """Find what parts read and hand on; whether all of that is values as they were made."""
    seen = set[Instr]()
    for part in parts:
        order = {var: n for n, var in enumerate(var for i in part.calls for var in i.outputs())}
        part.commits.sort(key=lambda pair: order[pair[1]])
        born = set[Var]()
        read: dict[Var, None] = {}
        part.calls = _without_waits(part.calls)
        for instr in part.calls:
            read.update(dict.fromkeys(var for var in instr.inputs() if var not in born))
            born.update(instr.outputs())
        read.update(dict.fromkeys(old for old, _ in part.commits))
        part.inputs = list(read)
        part.before = [
            i for i in values.taken(filter(values.apart.__contains__, read), values.views) if i not in seen
        ]
        seen.update(part.before)
    wanted = {var for part in parts for var in part.inputs} | {*outside}
    wanted |= {var for instr in seen for var in instr.inputs()}
    leaving = set(values.plan.outputs)
    for part in parts:
        made = dict.fromkeys(var for i in part.calls if i not in values.views for var in i.outputs())
        own = [var for var in made if var in wanted and var not in part.inputs]
        part.outputs = sorted(own, key=lambda var: var not in leaving)
        part.metrics = sum(var in leaving for var in own)
        if any(not var.fills or var.storage in values.static for var in own):
            return False
    return True
