"""What a call does with each leaf, and how many bytes it copies for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..stages.plan import Plan
from ..stages.program import Program
from ..state.outline import Entry, count

__all__ = ["leaf_costs", "staged_pairs"]

# What is said of a new value, by how often it is copied.
_ROLES = ("updated in place", "updated by a copy", "moved from another leaf, copied twice")


def leaf_costs(program: Program, plan: Plan, inputs: Sequence[str]) -> dict[str, list[tuple[str, Entry]]]:
    """Return the names of leaves with their costs, for ``state``, ``inputs``, ``constants`` and ``metrics``.

    An input is copied in even if the step does not read it. A constant is copied at capture, and if the step writes it
    at each call. A metric is a fresh tensor at each call; on a GPU it is copied out of the graph's pool.

    Args:
      program: The lowered program.
      plan: Its plan.
      inputs: Names of its inputs.
    """
    done = plan.schedule
    roles = dict.fromkeys(program.slots[: len(program.new_state)], ("passed through", 0))
    ranges = {known.var: known.leaves for known in program.ranges}
    copied = plan.copied
    for target, _ in program.updates:
        copies = 2 if target in done.staged else int(target in copied)
        roles |= dict.fromkeys(ranges.get(target, (target,)), (_ROLES[copies], copies))
    slots = [(var.spec, *roles.get(var, ("borrowed", 0))) for var in program.slots]
    read = {*done.outputs, *(new for _, new in done.commits)}.union(
        *(instr.inputs() for instr in (*done.head, *done.fused))
    )
    given = [(var.spec, "copied in" if var in read else "copied in, never read", 1) for var in program.inputs]
    cloned = {instr.args[0] for instr in done.head if instr.op is torch.ops.aten.clone.default}
    held = [(one.var.spec, "constant", int(one.var in cloned)) for one in program.constants]
    made = [
        (var.spec, "returned", (i in done.cloned) + (var.spec.device.type == "cuda"))
        for i, var in enumerate(done.outputs)
    ]
    leaves = {
        "state": (program.slot_names, slots),
        "inputs": (inputs, given),
        "constants": ([constant.name for constant in program.constants], held),
        "metrics": ([path for path, _ in program.named_results()], made),
    }
    return {
        kind: [
            (name, Entry(spec, role, copies * spec.nbytes))
            for name, (spec, role, copies) in zip(names, costs, strict=True)
        ]
        for kind, (names, costs) in leaves.items()
    }


def staged_pairs(program: Program, plan: Plan) -> list[tuple[str, str]]:
    """Return key paths (target, source) of new values that lie in a slot and therefore are staged."""
    names = dict(zip(program.slots, program.slot_names, strict=True))
    names |= {
        known.var: f"{count(len(known.leaves), 'leaf')} from {names[known.leaves[0]]} on"
        for known in program.ranges
    }
    owners = {var.storage: name for var, name in names.items()}
    done = plan.schedule
    return [(names[old], owners[new.storage]) for old, new in done.commits if old in done.staged]
