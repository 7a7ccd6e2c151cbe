"""What was checked of a traced step: what it reads, writes and leaves alone, and its likely mistakes."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import torch

from ...messages.source import Location
from ...tensors.op_table import row_of
from ..keys import draws_among, shared_keys
from ..program import Instr, Program, Var, live
from ..sub_programs import SubProgram, first_unrolled

__all__ = ["Inspection", "inspection_of"]

_GRADIENTS = 1  # position of the gradients in the arguments of a fused optimizer op


@dataclass(frozen=True, slots=True)
class Inspection:
    """What was checked of a step: what it reads, writes and leaves alone. ``str()`` prints it.

    Attributes:
      function: Name of the user's function.
      calls: Number of ATen calls by op.
      leaves: Number of leaves of the states.
      unchanged: Leaves that are returned unchanged.
      constants: Tensors that the step owns.
      watched: Python values from outside that are compared at each call.
      outputs: Number of metrics.
      forgotten: Submodules whose new buffers were computed and dropped, such as a BatchNorm's.
      by_mode: Modules applied in training mode by a function that trains nothing.
      dropped: Other unchanged leaves for which a new value was computed, and where.
      repeated: Draws that give the same numbers in every call.
      shared_keys: Pairs of draws in one call with the same key and stream, hence correlated numbers.
      copied: Inputs that the step writes in place, in a copy of its own.
      warnings: What calls of the library warn of.
    """

    function: str
    calls: Mapping[str, int]
    leaves: int
    unchanged: tuple[str, ...]
    constants: tuple[str, ...]
    watched: tuple[str, ...]
    outputs: int
    forgotten: tuple[str, ...] = ()
    by_mode: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    repeated: tuple[str, ...] = ()
    shared_keys: tuple[tuple[str, str], ...] = ()
    copied: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        def shown(names: Sequence[str]) -> str:
            return (
                ", ".join(names[:8]) + (f", … and {len(names) - 8} more" if len(names) > 8 else "") or "none"
            )

        return "\n".join(
            [
                f"{self.function} is a pure function of its arguments:",
                f"  {sum(self.calls.values())} ATen calls of {len(self.calls)} kinds; none waits for the host, reads a",
                "  tensor from outside, writes into an argument, or draws without a key; Python keeps no tensor",
                f"  state leaves: {self.leaves}, of which returned unchanged: {shown(self.unchanged)}",
                f"  metrics: {self.outputs}",
                *(
                    [f"  inputs written in place, each in a copy: {shown(self.copied)}"]
                    if self.copied
                    else []
                ),
                f"  constants owned by the step: {shown(self.constants)}",
                f"  Python values from outside, compared at each call: {shown(self.watched)}",
                f"  new values that were computed and dropped: {shown([*self.forgotten, *self.dropped])}",
                f"  draws that share a key: {shown([' and '.join(pair) for pair in self.shared_keys])}",
            ]
        )


def inspection_of(program: Program, watched: Sequence[str]) -> Inspection:
    """Summarize a traced program as an ``Inspection``."""
    program = first_unrolled(program)
    kept, needed = live(program.instrs, [*program.new_state, *program.results])
    return Inspection(
        function=program.function,
        calls=dict(_counts(program.instrs).most_common()),
        leaves=len(program.slots),
        unchanged=tuple(
            name
            for name, old, new in zip(program.slot_names, program.slots, program.new_state, strict=False)
            if old is new
        ),
        constants=tuple(f"{constant.name} {constant.var.spec}" for constant in program.constants),
        watched=tuple(watched),
        outputs=len(program.outputs),
        forgotten=tuple(_forgotten(program, needed)),
        by_mode=tuple(
            dict.fromkeys(one.module for one in program.applications if one.by_mode and not program.new_state)
        ),
        dropped=tuple(_dropped(program, kept, needed)),
        repeated=tuple(_repeated(program)),
        shared_keys=tuple(shared_keys(program)),
        copied=tuple(program.copied),
        warnings=tuple(dict.fromkeys(program.warnings)),
    )


def _counts(instrs: Iterable[Instr]) -> Counter[str]:
    """Return how many calls of each op there are, with those that a sub-program stands for."""
    counts: Counter[str] = Counter()
    for op, times in Counter(instr.op for instr in instrs).items():
        for one in [call.op for call in op.calls] if isinstance(op, SubProgram) else [op]:
            counts[str(one)] += times
    return counts


def _repeated(program: Program) -> Iterator[str]:
    """Yield draws whose key no call changes: it depends on no input and on no leaf that gets a new value."""
    if not program.new_state:  # a read-only function: its state may change between calls
        return
    pairs = zip(program.slots, program.new_state, strict=False)
    changing = {*program.inputs, *(old for old, new in pairs if old is not new)}
    changing |= set(program.slots[len(program.new_state) :])  # states that are only read here
    calls, drawn = draws_among(program)
    for instr in calls:
        if not changing.isdisjoint(instr.inputs()):
            changing.update(instr.outputs())
        elif instr in drawn:
            yield str(instr.site or instr.op)


def _forgotten(program: Program, needed: Set[Var]) -> Iterator[str]:
    """Yield submodules with a new buffer that reaches no result of the step."""
    lost = [one for one in program.applications if not needed >= set(one.written)]
    yield from dict.fromkeys(f"the buffers of {part} in {one.module}" for one in lost for part in one.parts)


def _dropped(program: Program, kept: Sequence[Instr], needed: Set[Var]) -> Iterator[str]:
    """Yield state leaves returned unchanged although a new value for them was computed and never used.

    The classic case: an average whose new value never reaches the new state. In the user's own lines, a value counts as
    a new value of a leaf if it is computed from the leaf through values of the leaf's shape and dtype only. What the
    library computes there is its own business: of an update, only a whole tree that was handed back is forgotten; a
    leaf of it that stays, such as a count, was put back.

    Args:
      program: The program.
      kept: Its live calls.
      needed: What they and the results read.
    """
    unchanged = {
        old: name
        for name, old, new in zip(program.slot_names, program.slots, program.new_state, strict=False)
        if old is new
    }
    sites = _own(unchanged, _lost(program, kept, needed))
    for leaf, site in _forgotten_updates(program, kept):
        sites.setdefault(leaf, site)
    for leaf, name in unchanged.items():
        if leaf in sites:
            yield f"{name} ({sites[leaf]})" if sites[leaf] else name


def _forgotten_updates(program: Program, kept: Sequence[Instr]) -> Iterator[tuple[Var, Location | None]]:
    """Yield the leaves of each tree of which an update made new values, none of which is read after the update."""
    if not program.replaced:
        return
    results = {*program.new_state, *program.results}
    place = {instr: number for number, instr in enumerate(program.instrs)}
    maker = {var: instr for instr in program.instrs for var in instr.outputs()}
    read = {var: place[instr] for instr in kept for var in instr.inputs()}
    for parts in program.replaced:
        changed = [[(old, new) for old, new in part if old is not new and new in maker] for part in parts]
        end = max((place[maker[new]] for part in changed for _, new in part), default=0)
        for part in changed:
            if not any(new in results or read.get(new, -1) > end for _, new in part):
                yield from ((old, maker[new].site) for old, new in part)


def _own(unchanged: Collection[Var], calls: Iterable[tuple[Instr, list[Var]]]) -> dict[Var, Location | None]:
    """Return the leaves for which the user's own lines compute a new value that nothing reads, and the lines."""
    leaf_of = {var: var for var in unchanged}
    sites: dict[Var, Location | None] = {}
    for instr, lost in calls:
        if instr.inner or instr.backward:  # a gradient is no new value either
            continue
        if isinstance(instr.op, SubProgram):  # the same calls, for another micro-batch
            continue
        for source, result in _same_kind(instr):
            if source in leaf_of:
                leaf_of.setdefault(result, leaf_of[source])
        if instr.op is torch.ops.aten.clone.default:  # the leaf's own value, until it is written to
            continue
        # A view of an existing value is not a new value.
        seen = set() if instr.writes else {var.storage for var in instr.inputs()}
        for var in (var for var in lost if var.storage not in seen):
            leaf = leaf_of.get(var)
            if leaf is not None and leaf.storage != var.storage:  # not a view of the leaf
                sites.setdefault(leaf, instr.site)
    return sites


def _lost(program: Program, kept: Sequence[Instr], needed: Set[Var]) -> Iterator[tuple[Instr, list[Var]]]:
    """Yield each call with those of its results and written variables that nothing reads afterwards."""
    results = [*program.new_state, *program.results]
    place = {instr: number for number, instr in enumerate(kept)}
    last_read = {var.storage: number for instr, number in place.items() for var in instr.inputs()}
    last_read |= dict.fromkeys((var.storage for var in results), len(kept))
    for instr in program.instrs:
        overwritten = [var for var in instr.writes if last_read.get(var.storage, -1) <= place.get(instr, -1)]
        yield instr, [*(var for var in instr.outputs() if var not in needed), *overwritten]


def _same_kind(instr: Instr) -> Iterator[tuple[Var, Var]]:
    """Yield pairs (argument, result) of equal shape and dtype; for grouped ops, those at the same list position.

    Of several results, each has its own meaning: one is a new value of an argument only if the op says so by its name.
    """
    schema = instr.op._schema
    if row_of(instr.op).fresh:
        return
    unscaled = row_of(instr.op).kind == "optimizer" and not instr.kwargs.get("grad_scale")
    several = len(schema.returns) > 1
    columns = zip(schema.returns, instr.out, strict=True) if several else [(None, instr.out)]
    for number, (said, out) in itertools.product(range(len(instr.args)), list(columns)):
        if unscaled and number == _GRADIENTS:
            continue  # returned unchanged
        if said is not None and said.name != f"{schema.arguments[number].name}_out":
            continue
        arg = instr.args[number]
        pairs = [(arg, out)]
        if isinstance(arg, list) and isinstance(out, (list, tuple)) and len(arg) == len(out):
            pairs = list(zip(arg, out, strict=True))
        for source, result in pairs:
            if isinstance(source, Var) and isinstance(result, Var) and source.spec.same_layout(result.spec):
                yield source, result
