"""Compile equal parts of a program once: sub-programs, or what lies between cuts where it repeats itself.

A part is what one compiled function runs. Between parts, values lie in memory as they were made. A view of a whole
value is taken again inside of each part that reads it, and a cast to a wider dtype is made again: a kernel that reads
the narrow value reads less. A view of a piece, such as a layer of stacked weights, is taken outside, so that parts that
read other pieces are equal.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TypeVar

import torch

from ...state.outline import count
from ..fx_passes.canonical import CAST
from ..fx_passes.cross_entropy import suit
from ..fx_passes.old_values import KEPT, LATER
from ..passes.out_of_place import write_out_of_place
from ..plan import Plan
from ..program import Instr, Program, Var, written_storages
from ..schedule import Schedule, schedule
from ..sub_programs import SubProgram
from ..trial.reference import Reference
from .early_updates import Leaf, by_leaf, joined
from .functions import Compiler, Part, collects, compiled_once, grouped
from .repeats import cuts

__all__ = ["by_sub_programs", "in_parts"]

T = TypeVar("T")

_WORTH = 0.75  # of the calls may be left to compile; else one function is compiled faster


def in_parts(
    program: Program,
    device: torch.device,
    compiler: Compiler | None,
    reference: Reference,
    *,
    in_place: bool,
    least: int = 0,
) -> Plan | None:
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
    values = _Values.of(program, plan)
    divided = None if program.ranges or collects(program) else _divided(values)
    parts = None if divided is None else _parts(divided, values, in_place=in_place)
    if parts is None:
        return None
    alike = grouped(parts, {*program.slots})
    every, compiled = (sum(len(part.calls) for part in some) for some in (parts, [one for one, *_ in alike]))
    if compiled >= _WORTH * every or every - compiled < least:
        return None
    calls = compiled_once(alike, compiler, device, program.function, in_order=False)
    done = {old for part in parts for old, _ in part.commits}
    commits = [(old, new) for old, new in plan.commits if old not in done]
    checks = [instr for instr in plan.head if instr.checks]
    runs = [*(instr for part in parts for instr in calls[part]), *checks]
    lowered = Plan(program, plan, replace(plan, head=runs, commits=commits), raised_at=reference.raises_at)
    lowered.shared = [_said(same) for same in alike if len(same) > 1]
    for head in lowered.heads if compiler is None and device.type != "cpu" else ():
        suit(head.graph.graph)
        head.graph.recompile()
    return lowered


def by_sub_programs(
    program: Program, device: torch.device, compiler: Compiler | None, reference: Reference
) -> Plan:
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
    found: dict[SubProgram, Part] = {}
    for one in dict.fromkeys(instr.op for instr in plan.head):
        if isinstance(one, SubProgram) and one.title and all(instr.outputs() for instr in one.calls):
            own = one.program()
            values = _Values.of(own, schedule(own))
            for part in _parts([values.calls], values) or ():
                part.name, found[one] = one.title, part
    calls = compiled_once(grouped(found.values()), compiler, device, program.function)
    ops = {one: one.with_calls(calls[part], one.given, one.results) for one, part in found.items()}
    head = [replace(instr, op=ops.get(instr.op, instr.op)) for instr in plan.head]
    lowered = Plan(program, plan, replace(plan, head=head), raised_at=reference.raises_at)
    lowered.one_by_one = True
    return lowered


def _said(alike: Sequence[Part]) -> str:
    """Return in words which calls share a function."""
    calls = count(len(alike[0].calls), "call")
    return f"compiled once: {len(alike)} x {calls}, {_where(alike[0])}; ...; {_where(alike[-1])}"


def _where(part: Part) -> str:
    """Return where the calls of a part come from: modules, or lines where there are none."""
    places = [one.origin.module or (str(one.site) if one.site else "") for one in part.calls]
    known = list(dict.fromkeys(filter(None, places))) or ["the update"]
    return known[0] if len(known) == 1 else f"{known[0]} to {known[-1]}"


@dataclass(frozen=True)
class _Values:
    """The values of a program.

    Attributes:
      plan: Its schedule.
      calls: What parts compute: the calls of its head without checks and views.
      views: The views of its head, by the variables that they make.
      again: What a part makes itself rather than read it: views, and casts to a wider dtype.
      static: Storages of slots, inputs and constants.
      written: Storages that some call writes in place.
      outside: What is read outside of the parts: by checks, by calls of the commit, and what leaves the step.
    """

    plan: Schedule
    calls: list[Instr]
    views: dict[Var, Instr]
    again: dict[Var, Instr]
    static: set[int]
    written: set[int]
    outside: list[Var]

    @classmethod
    def of(cls, program: Program, plan: Schedule) -> _Values:
        known = [*program.slots, *program.inputs, *(constant.var for constant in program.constants)]
        views = {var: instr for instr in plan.head if instr.only_views for var in instr.outputs()}
        calls = [instr for instr in plan.head if not (instr.checks or instr.only_views)]
        made = {var for instr in plan.head for var in instr.outputs()}
        others = [*(instr for instr in plan.head if instr.checks), *plan.fused]
        outside = [*plan.outputs, *(var for instr in others for var in instr.inputs() if var in made)]
        written = written_storages(plan.head)
        again = views | {instr.out: instr for instr in calls if _widens(instr, written)}
        return cls(plan, calls, views, again, {var.storage for var in known}, written, outside)

    def views_to(self, wanted: Iterable[Var]) -> list[Instr]:
        """Return the views that lead from memory to variables, in order."""
        return _leading_to(wanted, self.views)

    def with_views(self, calls: Sequence[Instr], wanted: Sequence[Var] = ()) -> list[Instr]:
        """Return the calls of a part with what it makes again, each in front of its first reader.

        Args:
          calls: The calls.
          wanted: What else has to be there.
        """
        pieces = _pieces(calls)
        found: dict[Instr, None] = {}
        for instr in calls:
            found |= dict.fromkeys([*_leading_to(instr.inputs(), self.again, pieces), instr])
        return list(found | dict.fromkeys(_leading_to(wanted, self.again, pieces)))


def _leading_to(
    wanted: Iterable[Var], makers: Mapping[Var, Instr], at_hand: Collection[Var] = ()
) -> list[Instr]:
    """Return those of some calls that lead from memory, or from what is at hand, to variables, in order."""
    found: dict[Instr, None] = {}
    for var in wanted:
        if var in makers and var not in at_hand:
            made = makers[var]
            found |= dict.fromkeys([*_leading_to(made.inputs(), makers, at_hand), made])
    return list(found)


def _widens(instr: Instr, written: Collection[int]) -> bool:
    """Whether a call casts a value that does not change to a wider dtype."""
    sources = instr.inputs() if instr.op is CAST else ()  # of a number, none
    return any(one.storage not in written and instr.out.spec.nbytes > one.spec.nbytes for one in sources)


def _pieces(calls: Sequence[Instr]) -> set[Var]:
    """Return the pieces of others' values that calls read."""
    own = {var.storage for instr in calls if not instr.only_views for var in instr.outputs()}
    read = {var for instr in calls for var in instr.inputs()}
    return {var for var in read if not var.fills and var.storage not in own}


def _divided(values: _Values) -> list[list[Instr]] | None:
    """Cut the calls of a program into those of parts; None if their order matters otherwise.

    A call of the update goes into the first part behind what it reads, and behind the readers of the leaf that it
    replaces: so a gradient lives no longer than the part that makes it.
    """
    calls, written = values.calls, values.written
    end = max((number for number, instr in enumerate(calls, 1) if instr.backward), default=len(calls))
    base, update = calls[:end], calls[end:]
    if written & (values.static | {var.storage for instr in update for var in _touched(instr)}):
        return None
    spans: dict[int, tuple[int, int]] = {}  # what is written lives in one part
    for number, instr in enumerate(base):
        for storage in {var.storage for var in _touched(instr)} & written:
            spans[storage] = spans.get(storage, (number, number))[0], number
    places = [one for one in cuts(base) if not any(first < one <= last for first, last in spans.values())]
    parts = _cut(base, places)
    born = {var.storage: n for n, part in enumerate(parts) for instr in part for var in instr.outputs()}
    read = {var.storage: n for n, part in enumerate(parts) for instr in part for var in instr.inputs()}
    target = {new.storage: old.storage for old, new in values.plan.commits}
    added: list[list[Leaf]] = [[] for _ in parts]
    for leaf in by_leaf(update, [new for _, new in values.plan.commits]):
        made = [var.storage for var in leaf.call.outputs()]
        after = [born.get(var.storage, 0) for var in leaf.call.inputs()]
        number = max([*after, *(read.get(target.get(one, one), 0) for one in made)], default=0)
        born |= dict.fromkeys(made, number)
        added[number].append(leaf)
    late = _cut(added[-1], cuts([leaf.call for leaf in added[-1]])) if added else []
    if len(late) > 1:
        added[-1:] = [[], *late]
    return [[*part, *joined(leaves)] for part, leaves in zip_longest(parts, added, fillvalue=())]


def _touched(instr: Instr) -> Iterable[Var]:
    return (*instr.inputs(), *instr.outputs())


def _cut(items: Sequence[T], places: Sequence[int]) -> list[list[T]]:
    pairs = zip([0, *places], [*places, len(items)], strict=True)
    return [[*items[start:end]] for start, end in pairs if start < end]


def _parts(
    divided: Sequence[Sequence[Instr]], values: _Values, *, in_place: bool = False
) -> list[Part] | None:
    """Return parts, with what they read and hand on; None if some of that is not a value as it was made.

    Args:
      divided: The calls of each, without views.
      values: The values of the program.
      in_place: Whether parts write slots themselves.
    """
    parts = [Part(values.with_views(calls)) for calls in divided if calls]
    if in_place:
        _commit(parts, values)
    seen = set[Instr]()
    for part in parts:
        order = {var: n for n, var in enumerate(var for i in part.calls for var in i.outputs())}
        part.commits.sort(key=lambda pair: order[pair[1]])
        part.calls = [_without_wait(instr, order) for instr in part.calls]
        read = [var for instr in part.calls for var in instr.inputs() if var not in order]
        part.inputs = list(dict.fromkeys([*read, *(old for old, _ in part.commits)]))
        part.before = [view for view in values.views_to(part.inputs) if view not in seen]
        seen.update(part.before)
    done = {old for part in parts for old, _ in part.commits}
    leaving = [*values.outside, *(new for old, new in values.plan.commits if old not in done)]
    for part in parts[-1:]:
        part.after = [view for view in values.views_to(leaving) if view not in seen]
        seen.update(part.after)
    wanted = {var for part in parts for var in part.inputs}.union(leaving)
    wanted |= {var for view in seen for var in view.inputs()}
    for part in parts:
        made = dict.fromkeys(var for i in part.calls if not i.only_views for var in i.outputs())
        own = [var for var in made if var in wanted and var not in part.inputs]
        part.outputs = sorted(own, key=lambda var: var not in values.plan.outputs)
        part.metrics = sum(var in values.plan.outputs for var in own)
        others = values.static | {var.storage for var in part.inputs}
        if len({var.storage for var in own} - others) < len(own) or not all(var.fills for var in own):
            return None
    return parts


def _commit(parts: Sequence[Part], values: _Values) -> None:
    """Let the part that makes a new value write its slot, if no later part reads it, nor a piece of it this one."""
    born = {
        var.storage: n for n, part in reversed([*enumerate(parts)]) for i in part.calls for var in i.outputs()
    }
    last: dict[int, int] = {}
    for n, part in enumerate(parts):
        pieces = _pieces(part.calls)
        for var in (var for instr in part.calls for var in instr.inputs()):
            last[var.storage] = max(last.get(var.storage, 0), n + (var in pieces))
    commits = [(old, new) for old, new in values.plan.commits if new.storage not in values.static]
    kept = {var.storage for var in values.outside}
    kept |= {new.storage for _, new in values.plan.commits if new.storage in values.static}
    for old, new in commits:
        home = born.get(new.storage)
        if home is not None and old.storage not in kept and home >= last.get(old.storage, 0):
            parts[home].commits.append((old, new))
            parts[home].calls = values.with_views(parts[home].calls, [new])


def _without_wait(instr: Instr, made: Collection[Var]) -> Instr:
    """Return a call that waits for no value of another part: it is there."""
    waits = instr.op is LATER and instr.args[1] not in made
    return replace(instr, op=KEPT, args=instr.args[:1]) if waits else instr
