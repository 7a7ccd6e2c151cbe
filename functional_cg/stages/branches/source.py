"""Write the code of a plan, units in the order of a schedule, and bind it to lanes, after a dry run on one."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from textwrap import indent
from typing import Any

from torch import Tensor

from ...concurrency.interrupts import uninterrupted
from ...messages.source import Location
from ...tensors.overlap import storage_key
from ..evaluate import AS_STRIDED, as_strided
from ..program import Instr, Var, vars_in
from .listing import Timeline, in_line
from .units import Memory, Unit

__all__ = [
    "Code", "Lanes", "Writer", "lines_of", "note", "numbered", "on_lanes", "rehearsed", "source_of", "target",
]  # fmt: skip

_GUARD = "except Exception as error:\n    note(error)\n    raise\n"


Run = Callable[[Sequence[Callable[[], Any]]], Sequence[Tensor]]


@dataclass(frozen=True, slots=True)
class Code:
    """What a function has beside its units.

    Attributes:
      function: Name of the user's function.
      first: What runs before all units.
      results: What it returns, as source.
      kept: The memory of that.
      known: Memory that is there before the run.
      kernels: Names of what it calls that does not pass by torch's dispatcher.
    """

    function: str
    first: Unit
    results: str
    kept: frozenset[Memory]
    known: Collection[Memory]
    kernels: Collection[str] = ()


class Lanes:
    """Where the calls of a branched plan run: by default, one lane. On a GPU, streams and the events between them.

    Entering begins on lane 0, and leaving ends there, after all lanes.
    """

    def __enter__(self) -> object: ...

    def __exit__(self, *error: object) -> None: ...

    def on(self, lane: int) -> None:
        """Run what follows on a lane."""

    def wait(self, unit: int) -> None:
        """Let the lane wait for a unit that was recorded."""

    def record(self, unit: int) -> None:
        """Let other lanes wait for all that the lane has run so far, under the number of its last unit."""

    def kernel(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        """Return what to call for a kernel that does not pass by torch's dispatcher."""
        return launch


class Writer:
    """Writes calls as source.

    Attributes:
      names: What the source refers to, besides variables.
      ops: The names of ops.
    """

    def __init__(self) -> None:
        self.names: dict[str, Any] = {}
        self.ops: dict[Any, str] = {}

    def line(self, instr: Instr, fixed: Collection[Var] = ()) -> str:
        """Return the statement of a call; a result that is one of the fixed variables is not bound again."""
        return f"{target(instr.out, fixed)}{self.call(instr, instr.op)}"

    def call(self, instr: Instr, op: Any) -> str:
        """Return the expression that calls an op in place of a call's own."""
        arguments = [self.literal(arg) for arg in instr.args]
        if op is AS_STRIDED:
            self.names["as_strided"] = as_strided
            return f"as_strided({instr.args[0].offset}, {', '.join(arguments)})"
        arguments += [f"{name}={self.literal(value)}" for name, value in instr.kwargs.items()]
        return f"{self._op(op)}({', '.join(arguments)})"

    def literal(self, value: Any) -> str:
        if isinstance(value, (Var, int, str, type(None))):
            return repr(value)
        if isinstance(value, float) and math.isfinite(value):
            return repr(value)
        if isinstance(value, list):
            return f"[{', '.join(map(self.literal, value))}]"
        if isinstance(value, tuple):
            return f"({''.join(self.literal(item) + ',' for item in value)})"
        name = f"k{len(self.names)}"
        self.names[name] = value
        return name

    def _op(self, op: Any) -> str:
        if op not in self.ops:
            name = "op_" + "".join(c if c.isalnum() else "_" for c in str(op))
            while name in self.names:
                name += "_"
            # The bare C++ entry, without OpOverload's Python frame.
            self.names[name], self.ops[op] = getattr(op, "_op", op), name
        return self.ops[op]


def target(out: Any, fixed: Collection[Var]) -> str:
    """Return the left-hand side that unpacks a call's result as the trace saw it.

    A result that is a static buffer is already bound, so it is skipped: ``native_dropout`` may return its argument.
    """

    def text(value: Any) -> str:
        if isinstance(value, Var):
            return "_" if value in fixed else repr(value)
        if isinstance(value, (list, tuple)) and value:
            return f"[{', '.join(map(text, value))}]"
        return "_"

    return f"{text(out)} = " if vars_in(out) else ""


def source_of(
    timeline: Timeline,
    code: Code,
    *,
    on_lanes: bool = False,
    functions: Sequence[str] = (),
    timed: bool = False,
) -> tuple[str, dict[int, Location]]:
    """Return the source of a function ``run(before)``, and the user's line for each of its lines.

    In one line, units that commit are one block, with what is to run before them; on lanes each commits in its place.

    Args:
      timeline: The schedule.
      code: What else the function has.
      on_lanes: Whether it runs on lanes, rather than in one line.
      functions: Names of functions that it calls, each an argument of it.
      timed: As for :func:`lines_of`.
    """
    lines = list(lines_of(timeline, code.first, on_lanes=on_lanes, timed=timed))
    body = "\n".join(f"    {line}" for line, _ in lines) or "    pass"
    start = f"def run({', '.join(['before', *(['*', *functions] if functions else [])])}):\n"
    calls = [call for unit in timeline.units if unit.commits for call in (*unit.lines, *["tick"] * timed)]
    end = f"    uninterrupted((*before, {', '.join(calls)}))\n"
    if on_lanes:
        start, end = f"{start}    uninterrupted(before)\n    with lanes:\n", ""
    guarded = indent(f"try:\n{body}\n{_GUARD}", "    " * (1 + on_lanes))
    return f"{start}{guarded}{end}    return {code.results}\n", numbered(lines, start.count("\n") + 2)


def numbered(lines: Iterable[tuple[str, Location | None]], start: int) -> dict[int, Location]:
    """Return the user's line for lines of source, by their number; they begin with this one."""
    return {number: site for number, (_, site) in enumerate(lines, start) if site is not None}


def lines_of(
    timeline: Timeline, first: Unit, *, on_lanes: bool = False, timed: bool = False
) -> Iterator[tuple[str, Location | None]]:
    """Yield the lines of a schedule, each with the user's line; in one line without what commits.

    They use the names ``uninterrupted``, ``on``, ``wait`` and ``record`` of lanes, and ``tick`` if it is timed.

    Args:
      timeline: The schedule.
      first: What runs before all units.
      on_lanes: Whether it runs on lanes.
      timed: Whether it ticks after each unit.
    """
    names, lane, gone = _names(timeline), 0, set[str]()
    recorded = {one for place in timeline.places for one in place.waits}
    yield from ((line, None) for line in first.lines)
    for place in timeline.places:
        unit = timeline.units[place.unit]
        if unit.commits and not on_lanes:
            continue
        if place.lane != lane:
            lane = place.lane
            yield f"on({lane})", None
        for one in place.waits:
            yield f"wait({one})", None
        for line in _statements(unit):
            yield line, unit.site
        if place.unit in recorded:
            yield f"record({place.unit})", None
        # A name may stand for several values: it goes with the first of them.
        dead = dict.fromkeys(name for memory in place.frees for name in names[memory] if name not in gone)
        gone.update(dead)
        if dead:
            yield f"del {', '.join(dead)}", None
        if timed:
            yield "tick()", None


def _statements(unit: Unit) -> list[str]:
    return [f"uninterrupted(({', '.join(unit.lines)},))"] if unit.commits else unit.lines


def _names(timeline: Timeline) -> dict[Memory, list[str]]:
    """Return the names of values by the memory that they lie in."""
    names: dict[Memory, list[str]] = {}
    for memory, name in (pair for unit in timeline.units for pair in unit.defined):
        names.setdefault(memory, []).append(name)
    return names


def on_lanes(lanes: Lanes, timeline: Timeline, code: Code, names: Mapping[str, Any]) -> Run:
    """Return the units of a schedule, bound to lanes.

    Args:
      lanes: The lanes.
      timeline: The schedule.
      code: What else the function has.
      names: What the source refers to.
    """
    source, sites = source_of(timeline, code, on_lanes=True)
    scope = {**names, "lanes": lanes, "on": lanes.on, "wait": lanes.wait, "record": lanes.record}
    scope |= {"uninterrupted": uninterrupted, "note": partial(note, code.function, sites, lambda: None)}
    scope |= {kernel: lanes.kernel(scope[kernel]) for kernel in code.kernels}
    exec(compile(source, f"<branches of {code.function}>", "exec"), scope)
    return scope.pop("run")  # type: ignore[no-any-return]


def rehearsed(timeline: Timeline, code: Code, names: Mapping[str, Any], static: Iterable[Tensor]) -> Timeline:
    """Run units once, in one line; return their schedule, or one line if values lie elsewhere than the units say.

    What shares memory is known from a trace on fake tensors. Kernels that return an argument where the trace saw a new
    tensor, or copy where it saw a view, do no harm in a line. Between lanes they would: the order follows memory.

    Args:
      timeline: The schedule.
      code: What else the function has.
      names: What the source refers to: tensors of no value.
      static: Those of them that are there before the run.
    """
    scope, there = {**names, "uninterrupted": uninterrupted}, {storage_key(tensor) for tensor in static}
    named, found, surprise = _names(timeline), dict[int, Memory](), ""
    for unit, frees in [(code.first, ()), *((timeline.units[p.unit], p.frees) for p in timeline.places)]:
        try:
            exec("\n".join(_statements(unit)), scope)
        except Exception as error:
            note(code.function, {}, partial(getattr, unit, "site"), error)
            raise
        for memory, name in unit.defined:
            value = scope[name]
            if not isinstance(value, Tensor) or not value.untyped_storage().nbytes():
                continue
            key = storage_key(value)
            if memory in code.known or key in there:
                as_said = memory in code.known and key in there
            else:
                as_said = found[key] == memory if key in found else memory in unit.made
            if not as_said:
                surprise = surprise or unit.name
            found[key] = memory
            del value  # else the last one would outlive its memory
        for name in (name for memory in frees for name in named[memory]):
            scope.pop(name, None)
        found = {key: memory for key, memory in found.items() if memory not in frees}
    if not surprise:
        return timeline
    why = f"the kernel of `{surprise}` returns other memory than its trace says"
    return replace(in_line(timeline.units, code.kept), why=why)


def note(
    function: str,
    sites: Mapping[int, Location],
    raised_at: Callable[[], Location | None],
    error: Exception,
) -> None:
    """Add the user's line to an exception raised by a kernel (an index out of range, say)."""
    site, here = None, error.__traceback__
    plan = here and here.tb_frame.f_code.co_filename
    while here is not None and here.tb_frame.f_code.co_filename == plan:
        site, here = sites.get(here.tb_lineno, site), here.tb_next
    site = site or raised_at()
    error.add_note(
        f"`{function}`: raised by its replay{f', at {site}' if site else ''}; the state is unchanged."
    )
