"""Group the collectives of a traced program into buckets, and start gathers early.

A trace has one gather per read of a sharded leaf, and one reduction per gradient. Consecutive ones share a launch, up
to a number of bytes: a gather moves up to the first of its bucket, since it depends on slots alone; a reduction moves
down to the last. A bucket of gathers may start ``ahead`` buckets before its first use. Calls that need a reduction's
result are delayed until the next reduction is launched. So both overlap with the compute in between. Moved calls
compute the same values: only the order of independent calls changes.

On a CPU each launch is waited for at once. Gloo runs two collectives of one process group concurrently, and with
gathers this corrupts its heap: torch 2.13 by itself aborts or hangs after a few thousand pairs of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from ...messages.origins import Origin
from ...shards.collectives import ALL_REDUCE, GATHER, REDUCE_SCATTER, WAIT, is_collective
from ...shards.placement import Reading
from ..program import Instr, Var, vars_in, written_storages

__all__ = ["group_collectives", "groups"]


@dataclass(frozen=True, slots=True)
class _Item:
    """A collective that may share a launch with others.

    Attributes:
      place: Its position among the instructions.
      kind: Only collectives of one kind can share a launch.
      nbytes: Size of the whole leaf.
    """

    place: int
    kind: tuple[object, ...]
    nbytes: int


def groups(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Cut a sequence of sizes into buckets of at most ``limit`` bytes; a larger item gets its own bucket.

    Example:
      >>> from functional_cg.stages.passes.grouping import groups
      >>> groups([10, 20, 50, 5, 5], 30)
      [[0, 1], [2], [3, 4]]
    """
    out: list[list[int]] = []
    filled = limit + 1
    for i, size in enumerate(sizes):
        if filled + size > limit:
            out.append([])
            filled = 0
        out[-1].append(i)
        filled += size
    return out


def group_collectives(instrs: list[Instr], reading: Reading, device: torch.device) -> list[Instr]:
    """Return the instructions with their collectives grouped into buckets.

    Args:
      instrs: The instructions of a traced program.
      reading: Bytes per bucket, and how many buckets ahead a gather may start.
      device: Where they run; on a CPU, collectives run one at a time.
    """
    gathered = _gathers(instrs, reading.bucket_bytes, reading.prefetch)
    grouped = _late(_reductions(gathered, reading.bucket_bytes))
    return _one_at_a_time(grouped) if device.type == "cpu" else grouped


@dataclass(slots=True)
class _Moves:
    """Pending moves: places whose instruction is removed, and instructions to insert before or after a place."""

    gone: set[int] = field(default_factory=set)
    before: dict[int, list[Instr]] = field(default_factory=dict)
    after: dict[int, list[Instr]] = field(default_factory=dict)

    def apply(self, instrs: Sequence[Instr]) -> list[Instr]:
        out: list[Instr] = []
        for place, instr in enumerate(instrs):
            out += self.before.get(place, ())
            if place not in self.gone:
                out.append(instr)
            out += self.after.get(place, ())
        return out


def _gathers(instrs: list[Instr], limit: int, ahead: int) -> list[Instr]:
    maker = {var: place for place, instr in enumerate(instrs) for var in instr.outputs()}
    written = written_storages(instrs)
    moves = _Moves()
    for section in _sections(instrs, GATHER):
        runs = [[section[i] for i in run] for run in groups([item.nbytes for item in section], limit)]
        for number, run in enumerate(runs):
            start = runs[max(0, number - ahead)][0].place
            needed = [_ancestors(instrs, maker, item.place, start) for item in run]
            moved = sorted({place for places in needed for place in places} - moves.gone)
            joined = [item.place for item in run]
            if any(_touches(instrs[place], written) for place in (*moved, *joined)):
                continue
            moves.gone |= {*moved, *joined}
            launch = _joined([instrs[place] for place in joined])
            moves.before.setdefault(start, []).extend([*(instrs[place] for place in moved), launch])
    return moves.apply(instrs)


def _reductions(instrs: list[Instr], limit: int) -> list[Instr]:
    written = written_storages(instrs)
    moves = _Moves()
    for section in _sections(instrs, REDUCE_SCATTER):
        for run in groups([item.nbytes for item in section], limit):
            places = [section[i].place for i in run]
            last = places[-1]
            dependents = _dependents(instrs, places, last)
            if any(_touches(instrs[place], written) for place in (*places, *dependents)):
                continue
            moves.gone |= {*places, *dependents}
            launch = _joined([instrs[place] for place in places])
            moves.after[last] = [launch, *(instrs[place] for place in sorted(dependents))]
    return moves.apply(instrs)


def _late(instrs: Sequence[Instr]) -> list[Instr]:
    """Delay calls that need a reduction's result until the next reduction is launched; for the last one, to the end."""
    written = written_storages(instrs)
    out: list[Instr] = []
    held: list[Instr] = []
    waiting: set[Var] = set()  # results of the last launch and of held instructions
    for instr in instrs:
        launch = instr.op in (ALL_REDUCE, REDUCE_SCATTER)
        needs = any(var in waiting for var in instr.inputs())
        if needs and not launch and not _touches(instr, written):
            held.append(instr)
            waiting.update(instr.outputs())
            continue
        if needs or instr.writes:  # it must not overtake a held instruction
            out += held
            held, waiting = [], set()
        out.append(instr)
        if launch:
            out += held
            held, waiting = [], set(instr.outputs())
    return out + held


def _one_at_a_time(instrs: Sequence[Instr]) -> list[Instr]:
    """Move the waits of each launch to directly after it."""
    launched = {var for instr in instrs if is_collective(instr.op) for var in instr.outputs()}
    waits: dict[Var, list[Instr]] = {}
    for instr in instrs:
        if instr.op is WAIT and instr.args[0] in launched:
            waits.setdefault(instr.args[0], []).append(instr)
    out: list[Instr] = []
    for instr in instrs:
        if instr.op is WAIT and instr.args[0] in launched:
            continue
        out.append(instr)
        if is_collective(instr.op):
            out += [wait for var in instr.outputs() for wait in waits.get(var, ())]
    return out


def _sections(instrs: Sequence[Instr], op: object) -> Iterator[list[_Item]]:
    """Yield runs of consecutive collectives of one kind: one dtype and process group, all in the backward or none.

    No collective of a run needs the result of another: in a step with two gradients, the gathers of the second depend
    on those of the first.
    """
    if not any(instr.op is op for instr in instrs):
        return
    found: list[_Item] = []
    depth: dict[Var, int] = {}  # number of such collectives that a value depends on in sequence
    for place, instr in enumerate(instrs):
        here = max((depth.get(var, 0) for var in instr.inputs()), default=0)
        depth.update(dict.fromkeys(instr.outputs(), here + (instr.op is op)))
        if instr.op is not op:
            continue
        (source,) = instr.args[0]
        (result,) = instr.out
        kind = (source.spec.dtype, *instr.args[1:], instr.backward, here)
        if found and found[-1].kind != kind:
            yield found
            found = []
        found.append(_Item(place, kind, max(source.spec.nbytes, result.spec.nbytes)))
    if found:
        yield found


def _ancestors(instrs: Sequence[Instr], maker: dict[Var, int], place: int, start: int) -> set[int]:
    """Return the places from ``start`` on whose results the instruction at ``place`` needs, directly or not."""
    out: set[int] = set()
    stack = list(instrs[place].inputs())
    while stack:
        made = maker.get(stack.pop(), -1)
        if made >= start and made not in out:
            out.add(made)
            stack.extend(instrs[made].inputs())
    return out


def _dependents(instrs: Sequence[Instr], places: Sequence[int], last: int) -> set[int]:
    """Return the places up to ``last`` whose instructions need results of those at ``places``."""
    tainted = {var for place in places for var in instrs[place].outputs()}
    out: set[int] = set()
    for place in range(places[0], last + 1):
        instr = instrs[place]
        if any(var in tainted for var in instr.inputs()):
            out.add(place)
            tainted.update(instr.outputs())
    return out


def _touches(instr: Instr, written: set[int]) -> bool:
    """Whether an instruction could be moved across a write to memory that it reads or makes."""
    return bool(instr.writes) or any(var.storage in written for var in (*instr.inputs(), *instr.outputs()))


def _joined(launches: Sequence[Instr]) -> Instr:
    """Join several launches into one."""
    first = launches[0]
    inputs = [var for launch in launches for var in vars_in(launch.args[0])]
    results = [var for launch in launches for var in launch.outputs()]
    origin = Origin.of_all(launch.origin for launch in launches)
    return replace(first, args=(inputs, *first.args[1:]), out=results, origin=origin)
