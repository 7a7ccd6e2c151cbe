"""Compare two traces of a step: a difference is a host value that replay would freeze."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import zip_longest
from operator import attrgetter
from typing import Any, NamedTuple

from ...errors import BakedValueError
from ...pytree.sameness import same
from ...pytree.trees import static_values
from ...tensors.numbering import Numbers
from ...tree import path_string
from ..program import Constant, Instr, Program, Var
from ..sub_programs import SubProgram, calls_of, unrolled

__all__ = ["LITERAL", "Difference", "another_program", "another_run", "another_start", "refuse_cold"]

LITERAL = "literal"  # what the names of constants begin with that stand for literals
_STORAGE = attrgetter("storage")


def _same(a: Any, b: Any) -> bool:
    kind = type(a)
    if kind is not type(b):
        return False
    if kind is Var:
        return bool(a.index == b.index and a.spec == b.spec)
    if kind is list and {*map(type, a), *map(type, b)} == {Var}:  # what a sub-program is given
        return [var.index for var in a] == [var.index for var in b]
    if isinstance(a, float):
        return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(_same(a[name], b[name]) for name in a)
    try:
        return bool(a == b)
    except Exception:  # whatever a user's object raises
        return a is b


def _same_call(one: Instr | None, other: Instr | None) -> bool:
    if one is None or other is None:
        return False
    alike = one.op is other.op
    if isinstance(one.op, SubProgram) and isinstance(
        other.op, SubProgram
    ):  # of calls that were compared before
        alike = one.op.start == other.op.start
    return alike and _same(one.args, other.args) and _same(one.kwargs, other.kwargs)


class Difference(NamedTuple):
    """What differs between two traces.

    Attributes:
      rows: (name, in the first, in the second) of each part.
      what, why, fix: What a message says of two traces of one call.
    """

    rows: Sequence[tuple[str, object, object]]
    what: str = "two traces of it differ: a value on the host moved in between."
    why: str = "Replay would repeat the first trace for ever."
    fix: str = "pass what changes (time, counters, random numbers) as an input, or keep it in the state."

    def error(self, function: str) -> BakedValueError:
        """Return the error for a function whose traces for one call differ."""
        rows = [f"{name}  first {one}   then {other}" for name, one, other in self.rows]
        return BakedValueError.of(function, self.what, rows=rows, why=self.why, fix=self.fix)


def another_start(first: Program, second: Program) -> Difference | None:
    """Return the first call, or literal, of what the second trace has recorded so far that is not that of the first."""
    for known, instr in zip_longest(first.instrs[: len(second.instrs)], second.instrs):
        if not _same_call(known, instr):
            return _another_call(known, instr)
    for one, other in zip(first.constants, second.constants, strict=False):
        if other.name.startswith(LITERAL) and not one.holds(other.value):
            return Difference(
                [(f"{other.var.spec}, at {other.site}", "one value", "another")],
                "a tensor literal differs between two traces.",
                "Replay would use the value of the trace for ever.",
                "pass it as an input.",
            )
    return None


def _another_call(first: Instr | None, then: Instr | None) -> Difference:
    one, other = (f"{instr}, at {instr.site}" if instr else "nothing" for instr in (first, then))
    return Difference([("first call that differs", one, other)])


def another_run(first: Program, second: Program) -> Difference | None:
    """Return in what two traces differ: their calls, their literals, or what they return.

    Equal calls may make equal values that change places: each leaf has to be the same one of them.
    """
    found = another_start(first, second)
    if found is None and len(second.instrs) < len(first.instrs):
        found = _another_call(first.instrs[len(second.instrs)], None)
    if found is not None:
        return found
    leaves = zip(first.slot_names, first.new_state, second.new_state, strict=False)
    if moved := [(name, a, b) for name, a, b in leaves if not _same(a, b)]:
        return Difference(moved)
    results = zip(first.output_paths, first.outputs, second.outputs, strict=False)
    rows: list[tuple[str, object, object]]
    rows = [
        (path_string(path, "metrics"), repr(a), repr(b))
        for path, a, b in results
        if not (_same(a, b) if isinstance(a, Var) else same(b, a))
    ]
    shown = zip_longest(first.reports, second.reports)
    rows += [("what is shown", a, b) for a, b in shown if str(a) != str(b)]
    structures = first.output_def, second.output_def
    if structures[0] != structures[1] or not same(*(one and static_values(one) for one in structures)):
        rows.append(("structure of the metrics", "one", "another"))
    if rows:
        return Difference(
            rows,
            "returns Python values that differ between two traces.",
            "A Python value among the metrics comes back as it was at the trace.",
            "return a tensor; or add it to the `metrics` that the step returned, in the loop.",
        )
    return None


def another_program(first: Program, second: Program) -> Difference | None:
    """Return in what the program of a step differs from that of a later call; None if a replay serves both.

    A replay computes with the tensors that the first trace found, and with what the state held that it read on the
    host: those of the later call have to be the same.
    """
    if found := another_run(unrolled(first), unrolled(second)):
        return found
    tensors = zip_longest(first.constants + first.suppositions, second.constants + second.suppositions)
    rows: list[tuple[str, object, object]] = [
        (a.name if a else b.name, "one tensor", "another")
        for a, b in tensors
        if a is None or b is None or not (a.value is b.value or a.holds(b.value))
    ]
    if [id(table) for _, table in first.tables] != [id(table) for _, table in second.tables]:
        rows.append(("a cache", "one tensor", "another"))
    return Difference(rows) if rows else None


def refuse_cold(cold: Program, warm: Program, tables: Mapping[Var, Var]) -> None:
    """Raise if a run that filled caches returns anything else than a later run, which finds the tables there.

    Args:
      cold: The run that filled them.
      warm: A later run.
      tables: By the constant that a table is in the later run, its variable in the first one.
    Raises:
      BakedValueError: Naming what differs.
    """
    first = _numbered(cold, cold.constants, Numbers(Var, _STORAGE))
    later = Numbers(Var, _STORAGE, first.known)
    for constant, table in tables.items():
        later.name(constant, first.of(table))
    _numbered(warm, cold.constants, later, tables)
    pairs = list(zip_longest(_returned(cold, first), _returned(warm, later)))
    if cold.output_def != warm.output_def or not all(_same(one, other) for one, other in pairs):
        raise BakedValueError.of(
            warm.function,
            "returns something else when it fills a cache than when it finds it filled.",
            rows=[str((one or other)[0]) for one, other in pairs if not _same(one, other)],
            why="Replay would repeat what a later call computes.",
            fix="fill the cache before the first call of the step, by a call of the function that fills it.",
        )


def _numbered(
    program: Program, constants: Sequence[Constant], numbers: Numbers, tables: Collection[Var] = ()
) -> Numbers:
    """Number the values of a program; what it is given has the numbers of the run that has these constants.

    Tables have theirs already, whatever literal they are equal to.
    """
    for place, var in enumerate((*program.slots, *program.inputs)):
        numbers.name(var, numbers.number(place))
    for one in program.constants:
        twin = next((other for other in constants if other.holds(one.value)), None)
        if twin is not None and one.var not in tables:
            numbers.name(one.var, numbers.number(twin))
    for instr in calls_of(program.instrs):
        numbers.call(instr.op, instr.args, instr.kwargs, instr.outputs(), instr.writes)
    return numbers


def _returned(program: Program, numbers: Numbers) -> list[tuple[str, Any]]:
    """Return what leaves a step by name: the numbers of tensors, and other values."""
    named: list[tuple[str, Any]] = list(zip(program.slot_names, program.new_state, strict=False))
    paths = [path_string(path, "metrics") for path in program.output_paths]
    named += zip(paths, program.outputs, strict=True)
    named += ((str(report), one) for report in program.reports for one in report.values)
    return [(name, numbers.of(one) if isinstance(one, Var) else one) for name, one in named]
