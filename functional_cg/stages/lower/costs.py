"""The costs of a call: what it does with each leaf, and how many bytes it copies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...state.outline import Entry, count
from ..program import Program, Var
from ..schedule import Schedule

__all__ = ["constant_costs", "input_costs", "metric_costs", "slot_costs", "staged_pairs"]


def slot_costs(program: Program, plan: Schedule, *, copies: bool) -> list[Entry]:
    """Return what a call does with each leaf of the bound states, in the order of the slots.

    Args:
      program: The lowered program.
      plan: Its schedule.
      copies: Whether new values are computed elsewhere and copied into their slots.
    """
    roles = {var: "passed through" for var in program.slots[: len(program.new_state)]}
    copied: dict[Var, int] = {}
    commits = {old for old, _ in plan.commits}
    for target, leaves in _targets(program):
        role, factor = "updated in place", 0
        if target in plan.staged:
            role, factor = "moved from another leaf, copied twice", 2
        elif target in commits and copies:
            role, factor = "updated by a copy", 1
        for leaf in leaves:
            roles[leaf], copied[leaf] = role, factor * leaf.spec.nbytes
    return [Entry(var.spec, roles.get(var, "borrowed"), copied.get(var, 0)) for var in program.slots]


def _targets(program: Program) -> Iterator[tuple[Var, tuple[Var, ...]]]:
    """Yield the updated slots and ranges, each with the leaves in it."""
    ranges = {known.var: known.leaves for known in program.ranges}
    for old, _ in program.updates:
        yield old, ranges.get(old, (old,))


def staged_pairs(program: Program, plan: Schedule) -> list[tuple[str, str]]:
    """Return key paths (target, source) of new values that lie in a slot and therefore are staged."""
    names = dict(zip(program.slots, program.slot_names, strict=True))
    for known in program.ranges:
        names[known.var] = f"{count(len(known.leaves), 'leaf')} from {names[known.leaves[0]]} on"
    owners = {var.storage: name for var, name in names.items()}
    return [(names[old], owners[new.storage]) for old, new in plan.commits if old in plan.staged]


def input_costs(program: Program, plan: Schedule, names: Sequence[str]) -> list[tuple[str, Entry]]:
    """Return the costs of inputs: each is copied in at each call, even if the step does not read it."""
    read = {var for instr in (*plan.head, *plan.fused) for var in instr.inputs()}
    read.update(plan.outputs, (new for _, new in plan.commits))
    return [
        (name, Entry(var.spec, "copied in" if var in read else "copied in, never read", var.spec.nbytes))
        for name, var in zip(names, program.inputs, strict=True)
    ]


def constant_costs(program: Program, plan: Schedule) -> list[tuple[str, Entry]]:
    """Return the costs of constants: copied once, at capture; those that the step writes, at each call."""
    costs = []
    for i, constant in enumerate(program.constants):
        spec, written = constant.var.spec, i in plan.written_constants
        costs.append((constant.name, Entry(spec, "constant", spec.nbytes if written else 0)))
    return costs


def metric_costs(program: Program, plan: Schedule) -> list[tuple[str, Entry]]:
    """Return the costs of metrics: fresh tensors at each call; on a GPU, copied out of the graph's pool."""
    costs = []
    for i, ((path, _), var) in enumerate(zip(program.named_results(), plan.outputs, strict=True)):
        copies = (i in plan.cloned) + (var.spec.device.type == "cuda")
        costs.append((path, Entry(var.spec, "returned", copies * var.spec.nbytes)))
    return costs
