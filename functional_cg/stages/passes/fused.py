"""Calls whose results may be written over their arguments: what they read and write, and their in-place forms.

They are fused optimizer ops, such as ``_fused_adamw``, and ops that replace some elements, such as ``index_copy``: a
replay buffer of a gigabyte gets a few rows at each call.

A call on lists can be split: calls on parts of the lists compute the same.

A light part is a call on small leaves whose gradients come out of reductions, as those of biases and norms do, or of a
call on lists, such as a clip, which is split likewise. The op's own kernel updates dozens of them in a launch; a
compiler writes a kernel for each, which takes it longer, and the device, too. It is left what needs a kernel in any
case, such as a cast of what a product or a convolution makes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...tensors.aten import named_arguments
from ...tensors.op_table import row_of
from ..program import Instr, Program, Var, vars_in
from .min_cut import is_cheap, is_fused

__all__ = [
    "at_places",
    "group_size",
    "in_place",
    "read_arguments",
    "replacements",
    "replaces_some",
    "split_light",
    "written_pairs",
]

# Elements; the update of so many takes no longer than its launch, and their trip through memory half of that.
_LIGHT = 2**16
_CLONE = torch.ops.aten.clone.default
_FEW = 4  # leaves that are not worth a launch of their own


def written_pairs(instr: Instr) -> list[tuple[str, Var, Var]] | None:
    """Return what a call would write in its in-place form, as (name, argument, result); None for other ops."""
    schema = instr.op._schema
    if replaces_some(instr):
        return [("self", instr.args[0], instr.out)]
    if row_of(instr.op).kind != "optimizer" or schema.is_mutable or instr.kwargs.get("grad_scale"):
        return None
    names = [result.name.removesuffix("_out") for result in schema.returns]
    arguments = {a.name: i for i, a in enumerate(schema.arguments)}
    return [
        (name, source, result)
        for name, results in zip(names, instr.out, strict=True)
        for source, result in zip(vars_in(instr.args[arguments[name]]), vars_in(results), strict=True)
    ]


def replaces_some(instr: Instr) -> bool:
    """Whether a call replaces some elements of its first argument: in a copy or, if torch has that form, in place."""
    if row_of(instr.op).kind != "indexing" or not isinstance(instr.out, Var):
        return False
    return hasattr(torch.ops.aten, instr.name.rstrip("_") + "_")


def replacements(program: Program, calls: Sequence[Instr]) -> list[list[Instr]]:
    """Return calls that replace some elements of a slot, whose results nothing else reads: those of a slot together.

    Among them are clones, of the slot or of such a result, that others write.
    """
    touching: dict[int, list[Instr]] = {}
    for instr in calls:
        for storage in {var.storage for var in (*instr.inputs(), *instr.outputs())}:
            touching.setdefault(storage, []).append(instr)
    leaving = Counter(var.storage for var in (*program.results, *(new for _, new in program.updates)))
    found = []
    for old, at in program.updates:
        chain: list[Instr] = []
        while at is not old and leaving[at.storage] == (not chain) and at.storage in touching:
            first, *others = touching[at.storage]
            own = others[: len(others) - bool(chain)]  # the last one is that of the chain
            replaced = [one for one in (first, *own) if one.op is not _CLONE]
            if (
                first.out is not at
                or first.writes
                or any(one.writes != (at,) for one in own)
                or any(not replaces_some(one) or one.args[0] in read_arguments(one) for one in replaced)
            ):
                break
            chain = [first, *own, *chain]
            at = first.args[0]
        if at is old and any(map(replaces_some, chain)):
            found.append(chain)
    return found


def read_arguments(instr: Instr) -> set[Var]:
    """Return the variables that such an op reads but does not write, gradients included."""
    written = {"self"} if replaces_some(instr) else set()
    written |= {result.name.removesuffix("_out") for result in instr.op._schema.returns} - {"grads"}
    named = named_arguments(instr.op, instr.args, instr.kwargs)
    return set(vars_in([value for name, value in named.items() if name not in written]))


def in_place(op: Any) -> Any:
    """Return the in-place form of such an op."""
    name = op._schema.name.removeprefix("aten::").rstrip("_") + "_"
    return getattr(getattr(torch.ops.aten, name), op._overloadname)


def split_light(program: Program) -> set[Instr]:
    """Split the fused optimizer ops of a program, and calls on lists that make their gradients; return light parts."""
    makers = {var: instr for instr in program.instrs for var in instr.outputs()}
    readers = Counter(var for instr in program.instrs for var in set(instr.inputs()))
    # What leaves the step is read, too.
    readers.update({*program.results, *(new for _, new in program.updates)})
    places: dict[Instr, list[int]] = {}  # of light leaves
    for instr in filter(written_pairs, program.instrs):
        pairs = enumerate(zip(*instr.args[:2], strict=True)) if group_size(instr) else ()
        found = [(n, grad) for n, (leaf, grad) in pairs if _is_light(leaf, grad, makers, readers)]
        if len(found) <= _FEW:
            continue
        places[instr] = [n for n, _ in found]
        for maker, grad in ((makers[grad], grad) for _, grad in found):
            if group_size(maker):
                places.setdefault(maker, []).append(maker.out.index(grad))
    light: set[Instr] = set()
    instrs: list[Instr] = []
    for instr in program.instrs:
        chosen = sorted(places.get(instr, ()))
        others = [n for n in range(group_size(instr)) if n not in set(chosen)] if chosen else []
        apart = [at_places(instr, some) for some in (chosen, others) if some] or [instr]
        light.update(apart[:1] if chosen else ())
        instrs += apart
    program.instrs = instrs
    return light


def _is_light(leaf: Var, grad: Var, makers: Mapping[Var, Instr], readers: Mapping[Var, int]) -> bool:
    """Whether a leaf is small, and the kernel that computes its gradient ends with it, or is one for many leaves."""
    if leaf.spec.numel > _LIGHT:
        return False
    if (maker := makers.get(grad)) is not None and group_size(maker):
        return readers[grad] == 1 and isinstance(maker.out, list)
    passed = False
    while (maker := makers.get(grad)) is not None:
        if not maker.is_view and not is_cheap(maker):
            return not group_size(maker) and (is_fused(maker) or not passed)
        passed |= not maker.is_view
        sources = [var for var in maker.inputs() if var.spec.numel == grad.spec.numel]
        if len(sources) != 1 or readers[sources[0]] > 1:
            return False
        (grad,) = sources
    return False


def group_size(instr: Instr) -> int:
    """Return the length of the lists that a call may be split by; 0 if it is one call for other reasons."""
    outputs = instr.out if isinstance(instr.out, tuple) else (instr.out,)
    given = (*instr.args, *instr.kwargs.values(), *outputs)
    lengths = {len(one) for one in given if isinstance(one, (list, tuple))} - {0}
    return next(iter(lengths)) if row_of(instr.op).lists and not instr.writes and len(lengths) == 1 else 0


def at_places(instr: Instr, places: Sequence[int]) -> Instr:
    """Return the call on these places of the lists alone."""

    def at(value: Any) -> Any:
        return [value[place] for place in places] if isinstance(value, (list, tuple)) and value else value

    kwargs = {name: at(arg) for name, arg in instr.kwargs.items()}
    made = tuple(map(at, instr.out)) if isinstance(instr.out, tuple) else at(instr.out)
    return replace(instr, args=tuple(map(at, instr.args)), kwargs=kwargs, out=made)
