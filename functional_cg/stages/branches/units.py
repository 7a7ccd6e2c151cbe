"""The units of work of a plan, with the memory that they read and write.

Order within a plan matters for nothing but memory, so two units that touch no memory in common, or only read it, may
run in any order. What is not memory but has an order all the same counts as memory on lanes: a generator, checks, and
the link between ranks: collectives run in the order of the program, which is the same on all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ...messages.source import Location
from ...shards.collectives import WAIT, is_collective
from ...shards.transfers import TRANSFERS
from ...tensors.aten import can_draw, of_another_library
from ..lifetimes import spanned
from ..passes.fused import written_pairs
from ..program import Instr, Var

__all__ = [
    "GENERATOR",
    "GIVEN",
    "LINK",
    "Clocks",
    "Memory",
    "Unit",
    "accesses",
    "after_checks",
    "fixed_by",
    "ordered",
    "predecessors",
    "units_of",
]

Memory = int | str

GENERATOR, LINK, _CHECKS = "generator", "link", "checks"
GIVEN = "given"  # the list that a sub-program takes, with all that nobody else holds
_MOVING = frozenset(f"aten::{name}_" for name in ("resize", "resize_as", "set"))


@dataclass(eq=False, slots=True)
class Unit:
    """Work that runs in one piece on one lane.

    Attributes:
      name: What it is, for people.
      lines: Its source; of a unit that commits, calls that are still to be made.
      reads: The memory that it reads.
      writes: The memory that it writes, also what it allocates.
      made: The memory that it allocates, with the bytes; freed once nobody needs it.
      defined: The names that it binds, each with the memory of its value.
      commits: Whether it writes what outlasts the step. In one line all such units are one block, after all others.
      call: The call that it makes, if it is one of a program.
      calls: That call, and those that take views of what it makes.
      site: The user's line.
      micros: Estimated microseconds when it runs alone.
      busy: Those that it keeps the whole device busy.
      product: Whether it multiplies matrices: each lane with products has a workspace for them.
      link: Whether it is a collective: it occupies the link between ranks, and not the device.
      fixed: Why all units must then run on one lane; empty if they need not.
    """

    name: str
    lines: list[str] = field(default_factory=list)
    reads: frozenset[Memory] = frozenset()
    writes: frozenset[Memory] = frozenset()
    made: dict[Memory, int] = field(default_factory=dict)
    defined: list[tuple[Memory, str]] = field(default_factory=list)
    commits: bool = False
    call: Instr | None = None
    calls: list[Instr] = field(default_factory=list)
    site: Location | None = None
    micros: float = 0.0
    busy: float = 0.0
    product: bool = False
    link: bool = False
    fixed: str = ""


def accesses(instr: Instr, *, in_place: bool = False) -> tuple[frozenset[Memory], frozenset[Memory]]:
    """Return the memory that a call reads and the memory that it writes.

    Args:
      instr: The call.
      in_place: Whether it is a fused optimizer call that writes its arguments in place.
    """
    reads: set[Memory] = {var.storage for var in instr.inputs()}
    writes: set[Memory] = {var.storage for var in instr.writes}
    if in_place:
        writes |= {source.storage for _, source, _ in written_pairs(instr) or ()}
    elif not instr.only_views:
        # Also an argument that it returns: its name is new.
        writes |= {var.storage for var in instr.outputs()}
    return frozenset(reads), frozenset(writes)


def ordered(instr: Instr) -> frozenset[Memory]:
    """Return what a call writes that is no memory, but has an order."""
    found = {
        GENERATOR: can_draw(instr.op, instr.args, instr.kwargs),
        LINK: is_collective(instr.op),
        _CHECKS: instr.checks,
    }
    return frozenset(what for what, there in found.items() if there)


def units_of(
    calls: Iterable[Instr],
    before: Mapping[Unit, Sequence[Var]],
    there: Iterable[Memory] = (),
    made_for: Mapping[Instr, Sequence[Instr]] = MappingProxyType({}),
) -> tuple[Unit, list[Unit]]:
    """Return calls as units, without their source; a view belongs to the unit that defines what it is a view of.

    A view that waits for another value, too, is a unit that takes no time.

    Args:
      calls: The calls.
      before: Units before them, with the variables that they define.
      there: The memory that is there before all units.
      made_for: Calls that allocate for a call what it is the first to touch, and take views of that.
    Returns:
      (first, units): the first unit takes views of what is there, before all others.
    """
    first, units = Unit("a view"), [*before]
    owner = {var: number for number, own in enumerate(before.values()) for var in own}
    known = {*there}.union(*(unit.made for unit in units))
    marks: dict[int, Memory] = {}
    under_way: dict[Memory, int] = {}  # the last collective that touches it
    for instr in calls:
        owners, views = {owner[var] for var in instr.inputs() if var in owner}, instr.only_views
        if instr.op is WAIT and (waited := under_way.get(instr.inputs()[0].storage)) is not None:
            owners = {waited}
        if not views or (owners and len({var.storage for var in instr.inputs()}) > 1):
            reads, writes = accesses(instr)
            number, marked = len(units), frozenset(marks[one] for one in owners if one in marks)
            unit = Unit(instr.name, [], reads | marked, writes, site=instr.site)
            if views:  # it waits for another value, too, and what reads it waits for it
                marks[number] = f"view {number}"
                unit.writes |= {marks[number]}
            else:
                unit.call, unit.calls = instr, [*made_for.get(instr, ())]
                own = [one.out for one in unit.calls]
                for var in (*own, *(one for one in instr.outputs() if one.storage not in reads)):
                    if var.storage not in known:
                        unit.made[var.storage] = max(unit.made.get(var.storage, 0), spanned(var))
                known.update(unit.made)
                owner |= dict.fromkeys(own, number)
                if is_collective(instr.op):
                    under_way |= dict.fromkeys(reads | writes, number)
            units.append(unit)
            owners = {number}
        (units[max(owners)] if owners else first).calls.append(instr)
        if owners:
            owner |= dict.fromkeys(instr.outputs(), max(owners))
    return first, units


def fixed_by(op: Any, *, fits: bool = False) -> str:
    """Return why a step with a call of this op runs on one lane; an empty string if it is known to be a kernel.

    A call that gives a tensor other memory allocates on its own lane what is freed on another. Transfers between the
    stages of a pipeline have streams and an order of their own. So may ops of other libraries: nobody knows.

    Args:
      op: The op.
      fits: Whether tensors that it is told to write have the shape of its result, so that it leaves their memory.
    """
    schema = op._schema
    if schema.name in _MOVING or (not fits and any(one.is_out for one in schema.arguments)):
        return f"`{schema.name}` gives a tensor other memory"
    if op in TRANSFERS:
        return f"`{schema.name}` keeps its place among transfers"
    return f"`{schema.name}` is an op of another library" if of_another_library(op) else ""


def after_checks(reads: Iterable[Memory]) -> frozenset[Memory]:
    """Return what a commit reads: besides its values, the outcome of all checks."""
    return frozenset({*reads, _CHECKS})


def predecessors(units: Iterable[Unit]) -> list[list[int]]:
    """Return for each unit those before it that it has to wait for: what it needs, and what it must not disturb."""
    writer: dict[Memory, int] = {}
    readers: dict[Memory, list[int]] = {}
    found = []
    for number, unit in enumerate(units):
        before: set[int] = set()
        for memory in unit.reads | unit.writes:
            if memory in writer:
                before.add(writer[memory])
        for memory in unit.writes:
            before.update(readers.pop(memory, ()))
            writer[memory] = number
        for memory in unit.reads - unit.writes:
            readers.setdefault(memory, []).append(number)
        before.discard(number)
        found.append(sorted(before))
    return found


class Clocks:
    """What each lane comes after: vector clocks, which count by lane how many of its units have run."""

    def __init__(self) -> None:
        self._now: dict[int, dict[int, int]] = defaultdict(dict)
        self._then: dict[
            int, tuple[int, int, dict[int, int]]
        ] = {}  # by unit: its turn, its lane, and the clock

    def wait(self, lane: int, units: Iterable[int]) -> list[int]:
        """Let a lane wait for units that have run; return those that it does not come after anyway."""
        found, now = [], self._now[lane]
        for one in sorted(units, key=lambda unit: self._then[unit][0], reverse=True):
            if not self.covers(lane, one):
                found.append(one)
                for other, count in self._then[one][2].items():
                    now[other] = max(now.get(other, 0), count)
        return found

    def run(self, lane: int, unit: int) -> None:
        """Let a lane run a unit."""
        now = self._now[lane]
        now[lane] = now.get(lane, 0) + 1
        self._then[unit] = len(self._then), lane, dict(now)

    def covers(self, lane: int, unit: int) -> bool:
        """Whether a lane comes after a unit that has run."""
        _, other, then = self._then[unit]
        return self._now[lane].get(other, 0) >= then[other]
