"""Fused optimizer ops, such as ``_fused_adamw``: what they read and write, and their in-place forms."""

from __future__ import annotations

from typing import Any

import torch

from ...tensors.aten import FUSED, named_arguments
from ..program import Instr, Var, vars_in

__all__ = ["in_place", "read_arguments", "written_pairs"]


def written_pairs(instr: Instr) -> list[tuple[str, Var, Var]] | None:
    """Return what a functional fused optimizer op writes, as (name, argument, result); None for other ops."""
    schema = instr.op._schema
    if not schema.name.startswith(FUSED) or schema.is_mutable or instr.kwargs.get("grad_scale"):
        return None
    names = [result.name.removesuffix("_out") for result in schema.returns]
    arguments = {a.name: i for i, a in enumerate(schema.arguments)}
    return [
        (name, source, result)
        for name, results in zip(names, instr.out, strict=True)
        for source, result in zip(vars_in(instr.args[arguments[name]]), vars_in(results), strict=True)
    ]


def read_arguments(instr: Instr) -> set[Var]:
    """Return the variables that such an op reads but does not write, gradients included."""
    written = {result.name.removesuffix("_out") for result in instr.op._schema.returns} - {"grads"}
    named = named_arguments(instr.op, instr.args, instr.kwargs)
    return set(vars_in([value for name, value in named.items() if name not in written]))


def in_place(op: Any) -> Any:
    """Return the in-place form of a functional fused optimizer op."""
    name = op._schema.name.removeprefix("aten::") + "_"
    return getattr(getattr(torch.ops.aten, name), op._overloadname)
