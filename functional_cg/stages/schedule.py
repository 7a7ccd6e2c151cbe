"""Split a traced program into what computes and what commits.

A plan first computes everything (the head), then commits the new state (the tail). The head reads slots and never
writes them; the tail only writes slots. So the commit is a parallel assignment, and an exception or Ctrl-C in the head
leaves the state unchanged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from .lifetimes import storage_bytes
from .passes.fused import read_arguments, written_pairs
from .program import Instr, Program, Var, live

__all__ = ["Schedule", "live_instrs", "schedule", "temporaries"]


def live_instrs(program: Program) -> list[Instr]:
    """Return the instructions whose effect reaches a metric or the new state, in order."""
    return live(program.instrs, [*program.results, *(new for _, new in program.updates)])[0]


@dataclass(slots=True)
class Schedule:
    """The work of a plan: the calls of its head and the commits of its tail.

    Attributes:
      head: Calls that compute, in order.
      fused: Optimizer calls of the tail that write their slots in place; behind a compiled function also calls on lists
        that these alone read.
      commits: Pairs (slot or range, variable) to copy in the tail.
      staged: Targets of commits whose new value aliases a slot: it is copied to a temporary first.
      outputs: Variables of metrics, printed and tapped values, in order.
      cloned: Positions in ``outputs`` whose memory is shared, so that they are cloned.
    """

    head: list[Instr]
    fused: list[Instr] = field(default_factory=list)
    commits: list[tuple[Var, Var]] = field(default_factory=list)
    staged: set[Var] = field(default_factory=set)
    outputs: list[Var] = field(default_factory=list)
    cloned: set[int] = field(default_factory=set)


def schedule(program: Program, *, fuse: Collection[Instr] | None = None) -> Schedule:
    """Split a program into a head and a tail.

    Args:
      program: The traced step.
      fuse: The fused optimizer ops that may write their slots in place; None for all.
    """
    plan = Schedule(live_instrs(program))
    plan.outputs = program.results
    targets = [*program.slots, *(known.var for known in program.ranges)]
    in_slots = {var.storage for var in targets}
    _move_fused(program, plan, fuse)
    done = {var for instr in plan.fused for var in instr.outputs()}
    plan.commits = [(old, new) for old, new in program.updates if new not in done]
    plan.staged = {old for old, new in plan.commits if new.storage in in_slots}
    shared = in_slots | {var.storage for var in program.inputs} | {c.var.storage for c in program.constants}
    uses = Counter(var.storage for var in plan.outputs)
    for position, var in enumerate(plan.outputs):
        if var.storage in shared or uses[var.storage] > 1 or not var.fills:
            plan.cloned.add(position)
    return plan


def _move_fused(program: Program, plan: Schedule, which: Collection[Instr] | None) -> None:
    """Move fused optimizer calls to the tail if their results go to the same slots that they read."""
    slots = {*program.slots, *(known.var for known in program.ranges)}
    readers = Counter(var for instr in plan.head for var in set(instr.inputs()))
    readers.update(set(program.results))
    goals: dict[Var, list[Var]] = {}
    for old, new in program.updates:
        goals.setdefault(new, []).append(old)

    def fits(name: str, source: Var, result: Var) -> bool:
        if result not in goals:  # step counts, and gradients without `grad_scale`: no kernel writes these
            return (name == "grads" or source not in slots) and not readers[result]
        return goals[result] == [source] and not readers[result]

    candidates = {}
    for instr in plan.head:
        pairs = written_pairs(instr)
        if pairs and (which is None or instr in which) and all(fits(*pair) for pair in pairs):
            candidates[instr] = {source for _, source, result in pairs if result in goals}
    written = {var.storage for own in candidates.values() for var in own}
    written_later: set[int] = (
        set()
    )  # by the rest of the head: a call moved behind it would read these new values
    for instr in reversed(plan.head):
        own = candidates.get(instr)
        # a call must not read what any candidate writes, not even what it writes itself in another of its rows
        reads = {var.storage for var in read_arguments(instr)} if own else set()
        if own and reads.isdisjoint(written) and reads.isdisjoint(written_later):
            plan.fused.append(instr)
        written_later.update(var.storage for var in instr.writes)
    plan.fused.reverse()
    plan.head = [instr for instr in plan.head if instr not in plan.fused]


def temporaries(program: Program, plan: Schedule) -> dict[int, int]:
    """Return the bytes of each storage that a program computes besides its slots, inputs and constants.

    A fused optimizer call of the tail computes none: it writes its results in place.
    """
    there = [*program.slots, *program.inputs, *(one.var for one in program.constants)]
    there += [one.var for one in program.ranges]
    there += [var for instr in plan.fused if written_pairs(instr) for var in instr.outputs()]
    storages = {var.storage for var in there}
    return {one: size for one, size in storage_bytes(program.instrs).items() if one not in storages}
