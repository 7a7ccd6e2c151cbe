"""The work of one call: its floating-point operations and the bytes that it moves."""

from __future__ import annotations

import math
from collections.abc import Callable, Container

import torch
from torch import Tensor

from ..tensors.aten import named_arguments
from .program import Instr, Var, map_vars

__all__ = ["beside", "bytes_of", "flops_of"]


def bytes_of(instr: Instr, used: Container[Var]) -> int:
    """Return the bytes of a call: each argument once, used results, and what it writes in place."""
    read = {var: var.spec.nbytes for var in instr.inputs()}
    results = {var: var.spec.nbytes for var in instr.outputs() if var in used and var not in instr.writes}
    return sum(read.values()) + sum(results.values()) + sum(var.spec.nbytes for var in instr.writes)


def beside(instr: Instr) -> int:
    """Return the bytes that a kernel takes beside its results while it runs, as far as that is known.

    In half precision, attention's backward adds up the gradient of the queries in single precision, and keeps a number
    for each query.
    """
    name = instr.op._schema.name
    if "scaled_dot_product" not in name or "backward" not in name:
        return 0
    query = named_arguments(instr.op, instr.args, instr.kwargs)["query"].spec
    return 4 * (query.numel + math.prod(query.shape[:-1])) if query.dtype.itemsize == 2 else 0


def flops_of(instr: Instr) -> int:
    """Return the FLOPs of a product, else 0; torch's formulas, except that attention honors ``is_causal``."""
    if "scaled_dot_product" in instr.op._schema.name:
        return _attention_flops(instr)
    from torch.utils.flop_counter import flop_registry  # imports triton if installed

    packet = instr.op.overloadpacket
    formula: Callable[..., int] | None = flop_registry.get(packet)
    if formula is not None:
        args, kwargs, out = (
            map_vars(_meta, value) for value in (instr.args, [*instr.kwargs.values()], instr.out)
        )
        return int(formula(*args, **dict(zip(instr.kwargs, kwargs, strict=True)), out_val=out))
    if instr.op._schema.name in ("aten::mv", "aten::addmv", "aten::dot"):
        return 2 * max((var.spec.numel for var in instr.inputs()), default=0)
    return 0


def _attention_flops(instr: Instr) -> int:
    """Return attention's FLOPs: two products forward, five backward, one of which recomputes the scores."""
    named = named_arguments(instr.op, instr.args, instr.kwargs)
    if not all(isinstance(named.get(name), Var) for name in ("query", "key", "value")):
        return 0
    *batch, queries, width = named["query"].spec.shape
    keys, values = named["key"].spec.shape[-2], named["value"].spec.shape[-1]
    scores = queries * keys
    if named.get("is_causal"):
        last = min(queries, keys)  # row i keeps its first i + 1 scores
        scores = last * (last + 1) // 2 + (queries - last) * keys
    per_score = 3 * width + 2 * values if "backward" in instr.op._schema.name else width + values
    return int(2 * math.prod(batch) * scores * per_score)


def _meta(var: Var) -> Tensor:
    return torch.empty_strided(var.spec.shape, var.spec.stride, dtype=var.spec.dtype, device="meta")
