"""Compare two traces of a step: a difference is a host value that replay would freeze."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from itertools import zip_longest
from typing import Any

from torch import Tensor

from ...errors import BakedValueError
from ...messages.source import Location
from ...state.arena import BufferSpec
from ...tree import path_string
from ..program import Instr, Program, Var, live, map_vars
from ..sub_programs import SubProgram, calls_of

__all__ = ["refuse_another_call", "refuse_another_literal", "refuse_another_result", "refuse_another_start"]


def _same(a: Any, b: Any) -> bool:
    kind = type(a)
    if kind is not type(b):
        return False
    if kind is Var:
        return bool(a.index == b.index)
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


def _same_op(one: Any, other: Any) -> bool:
    """Whether two ops are one, or sub-programs of calls that were compared before."""
    if isinstance(one, SubProgram) and isinstance(other, SubProgram):
        return one.start == other.start
    return one is other


def refuse_another_call(first: Program, number: int, instr: Instr) -> None:
    """Raise if a call differs from the call of the same number in the first trace."""
    known = first.instrs[number] if number < len(first.instrs) else None
    if (
        known is None
        or not _same_op(known.op, instr.op)
        or not _same(known.args, instr.args)
        or not _same(known.kwargs, instr.kwargs)
    ):
        raise _difference(first.function, known, instr)


def _difference(function: str, first: Instr | None, then: Instr | None) -> BakedValueError:
    rows = [
        f"{when}  {f'{instr}   at {instr.site}' if instr else 'nothing'}"
        for when, instr in (("first", first), ("then ", then))
    ]
    return BakedValueError.of(
        function,
        "two traces of it differ: a value on the host moved in between.",
        rows=rows,
        why="Replay would repeat the first trace for ever.",
        fix="pass what changes (time, counters, random numbers) as an input, or keep it in the state.",
    )


def refuse_another_literal(first: Program, number: int, value: Tensor, site: Location | None) -> None:
    """Raise if a literal differs from the one of the same number in the first trace."""
    if number >= len(first.constants) or not first.constants[number].holds(value):
        raise BakedValueError.of(
            first.function,
            "a tensor literal differs between two traces.",
            rows=[f"{BufferSpec.of(value)}, at {site}"],
            why="Replay would use the value of the trace for ever.",
            fix="pass it as an input.",
        )


def refuse_another_start(cold: Program, warm: Program, tables: Mapping[Var, Var]) -> None:
    """Raise if a run that filled caches did more than that: it makes the same calls as later runs, and the tables.

    Args:
      cold: The run that filled them.
      warm: A later run.
      tables: By its variable in the first run, the constant that a table is in the later one.
    Raises:
      BakedValueError: If the rest differs.
    """
    twins = dict(tables)
    for one, other in ((cold.slots, warm.slots), (cold.inputs, warm.inputs)):
        twins |= dict(zip(one, other, strict=True))
    results = [*cold.new_state, *cold.results]
    calls, used = live(_besides(calls_of(cold.instrs), set(tables), results), results)
    others, used_again = live(calls_of(warm.instrs), [*warm.new_state, *warm.results])
    literals = [one for one in cold.constants if one.var in used - tables.keys()]
    again = [one for one in warm.constants if one.var in used_again - {*tables.values()}]
    twins |= {
        one.var: other.var for one, other in zip(literals, again, strict=False) if one.holds(other.value)
    }

    def renamed(value: Any) -> Any:
        return map_vars(lambda var: twins.get(var, var), value)

    for call, then in zip_longest(calls, others):
        if call is None or then is None or call.op is not then.op:
            raise _difference(warm.function, call, then)
        given = (renamed(call.args), {name: renamed(value) for name, value in call.kwargs.items()})
        specs = [[var.spec for var in one.outputs()] for one in (call, then)]
        if specs[0] != specs[1] or not _same(given, (then.args, then.kwargs)):
            raise _difference(warm.function, call, then)
        twins |= dict(zip(call.outputs(), then.outputs(), strict=True))
    returned = renamed(cold.new_state), renamed(cold.outputs)
    if cold.output_def != warm.output_def or not _same(returned, (warm.new_state, warm.outputs)):
        raise _difference(warm.function, None, None)


def _besides(calls: Sequence[Instr], tables: Set[Var], results: Sequence[Var]) -> list[Instr]:
    """Return the calls but those that only serve to make the tables."""
    wanted, making = {var.storage for var in tables}, set[int]()
    readers: dict[Var, list[int]] = {}
    for number in reversed(range(len(calls))):
        for var in calls[number].inputs():
            readers.setdefault(var, []).append(number)
        if wanted.intersection(var.storage for var in (*calls[number].outputs(), *calls[number].writes)):
            making.add(number)
            wanted.update(var.storage for var in calls[number].inputs())
    for number in sorted(making, reverse=True):
        made = [var for var in calls[number].outputs() if var not in tables]
        if any(var in results or not making.issuperset(readers.get(var, ())) for var in made):
            making.remove(number)  # its result is used otherwise, too
    return [call for number, call in enumerate(calls) if number not in making]


def refuse_another_result(first: Program, second: Program) -> None:
    """Raise if the second trace ends earlier than the first, or returns different values."""
    if len(second.instrs) < len(first.instrs):
        raise _difference(first.function, first.instrs[len(second.instrs)], None)
    rows = [
        f"{path_string(path, 'metrics')}  first {a!r}   then {b!r}"
        for path, a, b in zip(first.output_paths, first.outputs, second.outputs, strict=False)
        if not _same(a, b)
    ]
    rows += [
        f"first {a}   then {b}" for a, b in zip_longest(first.reports, second.reports) if str(a) != str(b)
    ]
    if rows or first.output_def != second.output_def:
        raise BakedValueError.of(
            first.function,
            "returns Python values that differ between two traces.",
            rows=rows,
            why="A Python value among the metrics comes back as it was at the trace.",
            fix="return a tensor; or add it to the `metrics` that the step returned, in the loop.",
        )
