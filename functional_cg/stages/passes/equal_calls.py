"""Share the result of equal calls in the forward.

Autocast casts an activation once for each layer that reads it, and helper functions build the same mask for each layer.
Autograd sees separate values and keeps them all. Calls of the backward are left alone: one that repeats a call of the
forward is there to save memory (``remat``, ``torch.utils.checkpoint``).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from ..program import Instr, Program, Var, written_storages

__all__ = ["PLAIN", "frozen", "frozen_call", "share_equal_calls"]

PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


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
        instr = instr.reading(lambda var: names.get(var, var))
        for var in instr.outputs():
            var.storage = storages.get(var.storage, var.storage)
        if instr.backward or not _is_pure(instr, apart):
            out.append(instr)
            continue
        known = first.setdefault(frozen_call(instr, lambda var: var), instr)
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


def frozen(value: Any, name: Callable[[Var], Any]) -> Hashable:
    """Return what is equal for equal arguments; of two objects that are no plain values, only for one and the same.

    Args:
      value: An argument of a call.
      name: ``name(var)`` stands for a variable.
    """
    if isinstance(value, Var):
        return "var", name(value)
    if isinstance(value, (list, tuple)):
        return type(value).__name__, *(frozen(item, name) for item in value)
    if isinstance(value, PLAIN):
        return type(value).__name__, repr(value)  # 1, 1.0 and True are equal, so are 0.0 and -0.0
    return "object", id(value)


def frozen_call(instr: Instr, name: Callable[[Var], Any]) -> Hashable:
    """Return what is equal for calls of one op on equal arguments; ``name(var)`` stands for a variable."""
    return instr.op, frozen(instr.args, name), frozen([*instr.kwargs.items()], name)
