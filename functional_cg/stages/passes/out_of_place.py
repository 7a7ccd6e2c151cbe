"""Replace calls that overwrite a temporary by calls that return a new one.

``nn.ReLU(inplace=True)`` and ``x += skip`` save memory in an eager run. In a graph they hide what a value is made from,
so that nothing may be recomputed; a compiler decides itself which call runs in place.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..program import Instr, Program, Var, map_arguments, map_vars
from .changes import Fresh, final

__all__ = ["write_out_of_place"]

_Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


def write_out_of_place(program: Program) -> None:
    """Rewrite a program in place so that elementwise calls do not write to a temporary that they cover.

    Args:
      program: A rewritten program.
    """
    fresh = Fresh(program)
    last_read = {var: number for number, instr in enumerate(program.instrs) for var in instr.inputs()}
    known = [*program.slots, *program.inputs, *(constant.var for constant in program.constants)]
    stays = {var.storage for var in (*known, *program.results, *program.new_state)}
    sharing: dict[int, set[Var]] = {}
    names: dict[Var, Var] = {}
    moved: dict[int, int] = {}
    layouts: dict[str, _Layout] = {}
    out: list[Instr] = []
    for number, instr in enumerate(program.instrs):
        instr = instr.again(partial(final, names))
        for var in instr.outputs():
            var.storage = final(moved, var.storage)
            sharing.setdefault(var.storage, set()).add(var)
        call = _out_of_place(instr, layouts)
        old = instr.out
        if call is not None and old.storage not in stays:
            read_later = {var for var in sharing[old.storage] if last_read.get(var, -1) > number} | {old}
            sharing[old.storage] = read_later
            if len(read_later) == 1:
                names[old] = new = fresh.like(old)
                moved[old.storage], last_read[new] = new.storage, last_read[old]
                sharing[new.storage] = {new}
                instr = replace(call, out=new)
        out.append(instr)
    program.instrs = out


def _out_of_place(instr: Instr, layouts: dict[str, _Layout]) -> Instr | None:
    """Return the call that computes what an elementwise call writes over all of its first argument, if there is one."""
    if not isinstance(instr.out, Var) or instr.writes != (instr.out,) or instr.args[0] is not instr.out:
        return None
    spec = instr.out.spec
    namespace, _, name = instr.op._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    op = getattr(packet, instr.op._overloadname, None)
    if not name.endswith("_") or op is None or not instr.out.fills or not _matches(instr.op, op):
        return None
    call = replace(instr, op=op, writes=())
    # Of many alike, as in a loop, one is tried.
    alike = repr((call.op, map_vars(lambda var: var.spec, (call.args, tuple(call.kwargs.items())))))
    if alike not in layouts:
        layouts[alike] = _result(call)
    return call if layouts[alike] == (spec.shape, spec.stride, spec.dtype) else None


def _matches(in_place: Any, op: Any) -> bool:
    """Whether an op is elementwise, the same at each call, and takes the arguments of the one in place."""
    names = [[(one.name, str(one.type)) for one in each._schema.arguments] for each in (in_place, op)]
    seeded = torch.Tag.nondeterministic_seeded in op.tags
    return names[0] == names[1] and torch.Tag.pointwise in op.tags and not seeded


def _result(call: Instr) -> _Layout:
    """Return shape, strides and dtype of a call's result."""

    def empty(var: Var) -> Any:
        return torch.empty_strided(var.spec.shape, var.spec.stride, dtype=var.spec.dtype, device="meta")

    args, kwargs = map_arguments(empty, call)
    made = call.op(*args, **kwargs)
    return tuple(made.shape), made.stride(), made.dtype
