"""A plan of ATen calls that a capture spreads over lanes; everywhere else it runs in one line."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

from ...messages.source import Location
from ..lifetimes import storage_bytes
from ..plan import AtenPlan, Buffers, ExecutionPlan, Run, note, staged_line
from ..program import Program, Var
from ..schedule import Schedule
from .costs import copy_micros, weighed
from .listing import Timeline, in_line
from .races import refuse_races
from .rehearsal import Rehearsal
from .source import on_lanes, pairs
from .units import Memory, Unit, accesses, after_checks

__all__ = ["Branched", "BranchedPlan", "Lanes", "Spread", "bound", "faster"]

Spread = Callable[[Sequence[Unit], frozenset[Memory]], Timeline]

_FASTER = 1.03  # the least measured gain that keeps lanes
_FIRST = 4  # lines of the generated function before its calls


class Lanes(Protocol):
    """Where the calls of a branched plan run: on a GPU, streams and the events between them.

    Entering begins on lane 0, and leaving ends there, after all lanes.
    """

    def __enter__(self) -> object: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...

    def on(self, lane: int) -> None:
        """Run what follows on a lane."""
        ...

    def wait(self, unit: int) -> None:
        """Let the lane wait for a unit that was recorded."""
        ...

    def record(self, unit: int) -> None:
        """Let other lanes wait for all that the lane has run so far, under the number of its last unit."""
        ...

    def kernel(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        """Return what to call for a kernel that does not pass by torch's dispatcher."""
        ...


@runtime_checkable
class Branched(ExecutionPlan, Protocol):
    """A plan with units that may run on lanes.

    Attributes:
      timeline: What runs where.
    """

    timeline: Timeline

    def rehearse(self, buffers: Buffers) -> None:
        """Run once on buffers of no value, in one line, and settle what runs where."""
        ...

    def bind_to(self, buffers: Buffers, lanes: Lanes) -> Run:
        """Bind the plan to buffers and lanes."""
        ...

    def in_line(self) -> ExecutionPlan:
        """Return the plan of the same program that is made for one line."""
        ...

    def keep(self, measured: str) -> None:
        """Stay on lanes, and say what was measured."""
        ...


class BranchedPlan(AtenPlan):
    """Runs ATen calls one by one, or on lanes.

    Args:
      program: The program.
      plan: Its schedule.
      spread: Chooses what runs where, for units and the memory that leaves the step.
    Attributes:
      timeline: What runs where.
      branches: The same in words.
      temporaries: Bytes of temporaries, if there are lanes.
    """

    def __init__(self, program: Program, plan: Schedule, spread: Spread) -> None:
        super().__init__(program, plan)
        self._variables: dict[Memory, list[str]] = {}
        self._views: list[str] = []  # of static buffers, and their variables
        self._seen: list[Var] = []
        self._owner: dict[Var, Unit] = {}
        self._defined: dict[Unit, list[Var]] = {}
        units = list(self._units())
        left = {var.storage for i, var in enumerate(plan.outputs) if i not in plan.cloned}
        self.timeline = spread(units, frozenset(left))
        refuse_races(self.timeline, program.function)
        self._rehearsed = self.timeline.lanes == 1
        self._tell()

    def rehearse(self, buffers: Buffers) -> None:
        """Run once on buffers of no value, in one line, and stay there if values lie elsewhere than the trace says."""
        if self._rehearsed:
            return
        static = [*buffers.slots, *buffers.inputs, *buffers.constants]
        rehearsal = Rehearsal(static, {var.storage for var in self._fixed})
        self._bind(buffers, rehearsal, rehearsal)(())
        if rehearsal.surprise:
            why = f"the kernel of `{rehearsal.surprise}` returns other memory than its trace says"
            self.timeline = replace(in_line(self.timeline.units), why=why)
            self._tell()
        self._rehearsed = True

    def in_line(self) -> ExecutionPlan:
        """Return the plan of the same program that is made for one line."""
        return AtenPlan(self.program, self._plan)

    def keep(self, measured: str) -> None:
        """Stay on lanes, and say what was measured."""
        self.timeline = replace(self.timeline, estimated=False, measured=measured)
        self._tell()

    def _tell(self) -> None:
        self.branches = str(self.timeline)
        self.temporaries = self.timeline.peak if self.timeline.lanes > 1 else 0

    def bind_to(self, buffers: Buffers, lanes: Lanes) -> Run:
        """Bind the plan to buffers and lanes."""
        return self._bind(buffers, lanes, None)

    def _bind(self, buffers: Buffers, lanes: Lanes, rehearsal: Rehearsal | None) -> Run:
        names, sites = self._names(buffers, lambda: None), dict[int, Location | None]()
        names |= {"lanes": lanes, "on": lanes.on, "wait": lanes.wait, "record": lanes.record}
        names |= {
            "rehearsal": rehearsal,
            "Unit": Unit,
            "units": self.timeline.units,
            "places": self.timeline.places,
        }
        names["note"] = partial(note, self.program.function, sites, lambda: None)
        source = self._on_lanes(sites, rehearsed=rehearsal is not None)
        exec(compile(source, f"<branches of {self.program.function}>", "exec"), names)
        return names.pop("run")  # type: ignore[no-any-return]

    def _units(self) -> Iterator[Unit]:
        """Yield the units in the order of the line."""
        plan, program = self._plan, self.program
        for i in sorted(plan.written_constants):
            var = program.constants[i].var
            unit = self._copy(f"clone of {var!r}", self._constant_line(i), (), var.storage, var)
            self._owner[var], self._defined[unit] = unit, [var]
            yield unit
        yield from self._head_units()
        for i in sorted(plan.cloned):
            var = plan.outputs[i]
            yield self._copy(f"metric {i}", self._metric_line(i), [var.storage], f"metric {i}", var)
        for old, new in plan.commits:
            if old in plan.staged:
                yield self._copy(
                    f"{old!r} staged", staged_line(old, new), [new.storage], f"staged {old!r}", new
                )
        for instr in plan.fused:
            reads, writes = accesses(instr, in_place=True)
            line = f"{self._fused_call(instr)}()"
            yield weighed(Unit(instr.name, [line], after_checks(reads), writes, site=instr.site), instr)
        for group, calls in self._commit_calls():
            read = {f"staged {old!r}" if old in plan.staged else new.storage for old, new in group}
            micros, busy = copy_micros(sum(old.spec.nbytes for old, _ in group))
            yield Unit(
                "commit", [f"{call}()" for call in calls], after_checks(read),
                frozenset(old.storage for old, _ in group), micros=micros, busy=busy,
            )  # fmt: skip
        ranges = {known.var.storage for known in program.ranges}
        if ranges:
            yield Unit("padding", ["for clear in clears: clear()"], frozenset(), frozenset(ranges))

    def _copy(self, name: str, line: str, reads: Collection[Memory], to: Memory, var: Var) -> Unit:
        micros, busy = copy_micros(var.spec.nbytes)
        made = {} if name.startswith("metric") else {to: var.spec.nbytes}
        self._variables[to] = [line.partition(" ")[0]]
        return Unit(name, [line], frozenset(reads), frozenset({to}), made, micros=micros, busy=busy)

    def _head_units(self) -> Iterator[Unit]:
        """Yield the calls of the head; a view belongs to the call that defines what it is a view of."""
        sizes, owner = storage_bytes(self.head), self._owner
        known = {var.storage for var in self._fixed} | self._variables.keys()
        units: dict[Unit, int] = {}
        for instr in self.head:
            defined = [var for var in instr.outputs() if var not in self._fixed]
            lines = self._lines(instr)
            if not instr.only_views:
                reads, writes = accesses(instr)
                unit = Unit(instr.name, lines, reads, writes, site=instr.site)
                unit.made |= {var.storage: sizes[var.storage] for var in defined if var.storage not in known}
                units[weighed(unit, instr)] = len(units)
                owner |= dict.fromkeys(defined, unit)
            elif owners := [owner[var] for var in instr.inputs() if var in owner]:
                unit = max(owners, key=lambda one: units.get(one, -1))
                unit.lines += lines
                owner |= dict.fromkeys(defined, unit)
            else:
                self._views += lines
                self._seen += defined
                continue
            self._defined.setdefault(unit, []).extend(defined)
            known |= {var.storage for var in defined}
            for var in defined:
                self._variables.setdefault(var.storage, []).append(repr(var))
        yield from units

    def _on_lanes(self, sites: dict[int, Location | None], *, rehearsed: bool) -> str:
        defined = {unit: [(var.storage, repr(var)) for var in own] for unit, own in self._defined.items()}
        lines = list(self._views)
        if rehearsed:
            seen = pairs([(var.storage, repr(var)) for var in self._seen])
            lines.append(f"rehearsal.defined(Unit('a view', [], frozenset(), frozenset()), {seen})")
        for line, unit in on_lanes(self.timeline, self._variables, defined, rehearsed=rehearsed):
            lines.append(line)
            if unit is not None:
                sites[len(lines) + _FIRST] = unit.site
        plan = self._plan
        lines += [self._metric_line(i) for i in range(len(plan.outputs)) if i not in plan.cloned]
        return (
            "def run(before):\n    uninterrupted(before)\n    with lanes:\n        try:\n"
            + "".join(f"            {line}\n" for line in lines or ["pass"])
            + "        except Exception as error:\n            note(error)\n            raise\n"
            + f"    return ({''.join(f'm{i}, ' for i in range(len(plan.outputs)))})\n"
        )


def bound(
    plan: ExecutionPlan, run: Run, buffers: Buffers, spare: Buffers, lanes: Callable[[int], Lanes]
) -> Run:
    """Return what a capture runs.

    Args:
      plan: The plan.
      run: The plan, bound to run in one line.
      buffers: The static buffers.
      spare: Buffers of no value.
      lanes: Makes so many lanes, for a plan with branches.
    """
    if not isinstance(plan, Branched):
        return run
    plan.rehearse(spare)
    return run if plan.timeline.lanes == 1 else plan.bind_to(buffers, lanes(plan.timeline.lanes))


def faster(lanes: Branched, on_lanes: float, line: ExecutionPlan, in_line: float) -> ExecutionPlan:
    """Return the plan that was measured to be faster, which says so.

    Args:
      lanes: A plan on lanes.
      on_lanes: Milliseconds that a replay of it takes.
      line: The plan of the same program for one line.
      in_line: Milliseconds that a replay of that takes.
    """
    said = f"measured {on_lanes:.3f} ms on {lanes.timeline.lanes} lanes, {in_line:.3f} ms in one line"
    if on_lanes * _FASTER < in_line:
        lanes.keep(said)
        return lanes
    line.branches = f"branches: none, {said}"
    return line
