"""Fused optimizer ops, such as ``_fused_adamw``: what they read and write, their in-place forms, and their light parts.

A light part is a call on small leaves alone. Its own kernel updates dozens of leaves in a launch, where a compiler
writes a kernel for each of them: that takes it longer, and the device, too. For large leaves the compiler's kernels are
faster, since they compute the last calls of the gradient, a cast at least, in the same pass.
"""

from __future__ import annotations

from typing import Any

import torch

from ...tensors.aten import FUSED, named_arguments
from ..program import Instr, Program, Var, vars_in
from .list_calls import at_places, group_size

__all__ = ["in_place", "is_light", "read_arguments", "split_light", "written_pairs"]

_LIGHT = (
    2**16
)  # elements: an update takes as long as its launch, and a gradient's trip through memory half of that
_FEW = 4  # leaves that are not worth a launch of their own


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


def is_light(instr: Instr) -> bool:
    """Whether a fused optimizer op updates small leaves alone."""
    return all(leaf.spec.numel <= _LIGHT for leaf in instr.args[0])


def split_light(program: Program) -> None:
    """Split the fused optimizer ops of a program into light parts and others."""
    program.instrs = [part for instr in program.instrs for part in _parts(instr)]


def _parts(instr: Instr) -> list[Instr]:
    if not written_pairs(instr) or not group_size(instr):
        return [instr]
    light = [place for place, leaf in enumerate(instr.args[0]) if leaf.spec.numel <= _LIGHT]
    heavy = [place for place in range(len(instr.args[0])) if place not in light]
    return [at_places(instr, places) for places in (light, heavy)] if heavy and len(light) > _FEW else [instr]
