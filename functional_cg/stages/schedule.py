"""Split a traced program into what computes and what commits.

A plan first computes everything (the head), then commits the new state (the tail). The head reads slots and never
writes them; the tail only writes slots. So the commit is a parallel assignment, and an exception or Ctrl-C in the head
leaves the state unchanged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from .lifetimes import storage_bytes
from .passes.bounds import may_raise
from .passes.fused import read_arguments, replacements, replaces_some, written_pairs
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
      fused: Calls of the tail that write their slots in place, all or some rows; behind a compiled function also
        calls on lists that optimizer calls alone read.
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
    done = {var for instr in _move_fused(program, plan, fuse) for var in instr.outputs()}
    plan.commits = [(old, new) for old, new in program.updates if new not in done]
    plan.staged = {old for old, new in plan.commits if new.storage in in_slots}
    shared = in_slots | {var.storage for var in program.inputs} | {c.var.storage for c in program.constants}
    uses = Counter(var.storage for var in plan.outputs)
    for position, var in enumerate(plan.outputs):
        if var.storage in shared or uses[var.storage] > 1 or not var.fills:
            plan.cloned.add(position)
    return plan


def _move_fused(program: Program, plan: Schedule, which: Collection[Instr] | None) -> set[Instr]:
    """Move calls to the tail whose results go to the same slots that they read, and that may write them in place.

    Returns:
      These calls, and clones that they then need not write.
    """
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

    # Calls that move together, and what they write.
    groups: list[tuple[list[Instr], set[Var]]] = []
    for instr in plan.head:
        pairs = None if replaces_some(instr) else written_pairs(instr)
        if pairs and all(fits(*pair) for pair in pairs):
            groups.append(([instr], {source for _, source, result in pairs if result in goals}))
    makers = {var: instr for instr in plan.head for var in instr.outputs()}
    for chain in replacements(program, plan.head):
        if not any(may_raise(instr, makers) for instr in chain):
            groups.append((chain, {chain[0].args[0]}))
    # A call must not read what any of them writes, nor what the rest of the head writes: these would be new values.
    written = {var.storage for _, own in groups for var in own}
    # Slots for a warm-up share memory, and torch refuses to replace elements by those of the same memory.
    sharing = {slot.storage for slot in program.slots if slot.spec.dtype.is_floating_point}
    last = {var.storage: number for number, instr in enumerate(plan.head) for var in instr.writes}
    places = {instr: number for number, instr in enumerate(plan.head)}
    moved: dict[Instr, Instr] = {}
    dropped: set[Instr] = set()
    for calls, own in groups:
        writers = [instr for instr in calls if written_pairs(instr)]
        reads = [(places[instr], var.storage) for instr in writers for var in read_arguments(instr)]
        apart = written | sharing if replaces_some(writers[0]) else written
        if (which is None or all(instr in which for instr in calls)) and all(
            one not in apart and last.get(one, -1) <= number for number, one in reads
        ):
            moved |= {one: _on_slot(one, *own) if replaces_some(one) else one for one in writers}
            dropped.update(calls)
    plan.fused = [moved[instr] for instr in plan.head if instr in moved]
    plan.head = [instr for instr in plan.head if instr not in dropped]
    return dropped


def _on_slot(instr: Instr, slot: Var) -> Instr:
    """Return a call that replaces some elements of what was a copy of a slot, on the slot."""
    return replace(instr, args=(slot, *instr.args[1:]), writes=())


def temporaries(program: Program, plan: Schedule) -> dict[int, int]:
    """Return the bytes of each storage that a program computes besides its slots, inputs and constants.

    A fused optimizer call of the tail computes none: it writes its results in place.
    """
    there = [*program.slots, *program.inputs, *(one.var for one in program.constants)]
    there += [one.var for one in program.ranges]
    there += [var for instr in plan.fused if written_pairs(instr) for var in instr.outputs()]
    storages = {var.storage for var in there}
    return {one: size for one, size in storage_bytes(program.instrs).items() if one not in storages}
