"""Share the result of equal calls in the forward.

Autocast casts an activation once for each layer that reads it, and helper functions build the same mask for each layer.
Autograd sees separate values and keeps them all. Calls of the backward are left alone: one that repeats a call of the
forward is there to save memory (``remat``, ``torch.utils.checkpoint``).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch

from ..program import Instr, Program, Var, map_arguments, written_storages

__all__ = ["share_equal_calls"]


def share_equal_calls(program: Program) -> None:
    """Rewrite a program in place so that each of its pure forward calls is made once.

    Args:
      program: A rewritten program.
    """
    apart = written_storages(program.instrs)
    apart |= {var.storage for var in (*program.results, *program.new_state)}
    first: dict[Hashable, Instr] = {}
    names: dict[Var, Var] = {}
    storages: dict[int, int] = {}
    out = []
    for instr in program.instrs:
        instr = _renamed(instr, names)
        for var in instr.outputs():
            var.storage = storages.get(var.storage, var.storage)
        if instr.backward or not _is_pure(instr, apart):
            out.append(instr)
            continue
        known = first.setdefault(_key((instr.op, instr.args, instr.kwargs)), instr)
        if known is instr:
            out.append(instr)
        for old, new in zip(instr.outputs(), known.outputs(), strict=True):
            if old is not new:
                names[old] = new
                storages[old.storage] = new.storage
    program.instrs = out


def _is_pure(instr: Instr, apart: set[int]) -> bool:
    """Whether a call returns the same bits for the same arguments, and nobody writes or hands out its memory."""
    touched = {var.storage for var in (*instr.inputs(), *instr.outputs())}
    return (
        instr.op.namespace in ("aten", "prims")
        and bool(instr.outputs())
        and not instr.op._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in instr.op.tags
        and touched.isdisjoint(apart)
    )


def _key(value: Any) -> Hashable:
    """Return what two arguments have in common only if a call cannot tell them apart: 1, 1.0 and True differ."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    if isinstance(value, dict):
        return tuple((name, _key(item)) for name, item in value.items())
    return value if isinstance(value, Var) else (type(value), repr(value))


def _renamed(instr: Instr, names: dict[Var, Var]) -> Instr:
    def new(var: Var) -> Var:
        return names.get(var, var)

    args, kwargs = map_arguments(new, instr)
    return replace(instr, args=args, kwargs=kwargs)
