"""Round where a program does: a compiler computes half precision in float32, and rounds only what it stores.

So a value in memory differs from the same value in the kernel that made it. ``v - v.bfloat16().float()``, which is what
a cast loses, becomes zero; a sum that compensates for rounding loses the compensation; and a number that overflows in
half precision stays finite, so that a loss scale never learns of it. This pass therefore rounds the results of each
call as the call itself does. What a single call computes in between is up to the compiler.

The op ``fcg::rounded`` marks the places. Torch's own mark is not enough: its CPU kernels remove a cast there and back
(torch 2.11), and its tracer also marks what a formula of ours computes in between.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from ...tensors.aten import returns_view
from ...tensors.op_table import row_of
from .old_values import KEPT, LATER

__all__ = ["HALF", "ROUNDED", "keep_roundings"]

_aten = torch.ops.aten
_CAST = torch.ops.prims.convert_element_type.default
_MARK = "low_precision_pointwise_barrier"
HALF = frozenset({torch.float16, torch.bfloat16})
# These return some of their arguments' numbers, or the negatives of these, which need no rounding.
_EXACT = frozenset(
    {
        _aten.abs.default,
        _aten.clone.default,
        _aten.maximum.default,
        _aten.minimum.default,
        _aten.neg.default,
        _aten.relu.default,
        _aten.where.self,
        KEPT,
        LATER,
    }
)
# Their CPU kernels read a second operand without dimensions in single precision.
_SINGLE_ON_A_HOST = frozenset({_aten.mul.Tensor, _aten.div.Tensor, _aten.div.Tensor_mode})

_library = torch.library.Library("fcg", "FRAGMENT")
_library.define("rounded(Tensor value, ScalarType dtype) -> Tensor", tags=(torch.Tag.pointwise,))
_library.impl("rounded", lambda value, dtype: _CAST(value, dtype), "CompositeExplicitAutograd")
_library._register_fake("rounded", lambda value, dtype: _CAST(value, dtype))
ROUNDED = torch.ops.fcg.rounded.default


def keep_roundings(graph: fx.Graph) -> bool:
    """Insert ``fcg::rounded`` where calls round, in a graph of :func:`functional_cg.stages.core.graph.core_graph`.

    Returns:
      Whether any call rounds.
    """
    found = False
    for node in list(graph.nodes):
        node.meta.pop(_MARK, None)
        if node.op != "call_function":
            continue
        found |= _round_operands(graph, node)
        if not _is_half(node):
            continue
        if node.target is _CAST:
            node.target = ROUNDED  # of two casts in a row, the compiler drops the first
        elif not node.meta.get("result") or _is_exact(node) or _is_stored(node):
            continue
        else:
            with graph.inserting_after(node):
                rounded = graph.call_function(ROUNDED, (node, node.meta["val"].dtype))
            rounded.meta.update(node.meta)
            node.replace_all_uses_with(rounded, delete_user_cb=lambda user, it=rounded: user is not it)
        found = True
    return found


def _round_operands(graph: fx.Graph, node: fx.Node) -> bool:
    """Round the operands that an elementwise call casts to half precision before it computes.

    These are operands without dimensions if others have some, and integers.

    Returns:
      Whether there are any such tensors.
    """
    if not node.meta.get("result") or torch.Tag.pointwise not in getattr(node.target, "tags", ()):
        return False
    every = [(one, one.meta.get("val")) for one in node.all_input_nodes]
    operands = [(one, value) for one, value in every if isinstance(value, Tensor) and not value.is_complex()]
    floats = [value for _, value in operands if value.is_floating_point()]
    most = max((value.dim() for value in floats), default=0)
    dtypes = {value.dtype for value in floats if min(value.dim(), 1) == min(most, 1)}
    if len(dtypes) != 1 or not dtypes <= HALF:
        return False
    (dtype,) = dtypes
    on_host = node.meta["val"].device.type == "cpu"
    kept = node.args[1] if node.target in _SINGLE_ON_A_HOST and on_host else None
    wide = [
        (one, value)
        for one, value in operands
        if value.dtype not in HALF | {torch.bool} and (one is not kept or value.dim())
    ]
    for one, value in wide:
        with graph.inserting_before(node):
            rounded = graph.call_function(ROUNDED, (one, dtype))
        rounded.meta["val"] = value.to(dtype)
        node.replace_input_with(one, rounded)
    return bool(wide)


def _is_half(node: fx.Node) -> bool:
    value: Any = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype in HALF


def _is_exact(node: fx.Node) -> bool:
    """Whether a call returns numbers that were rounded before: not what a formula has computed in between."""
    halves = [one for one in node.all_input_nodes if _is_half(one)]
    return node.target in _EXACT and all(one.op == "placeholder" or one.meta.get("result") for one in halves)


def _is_stored(node: fx.Node) -> bool:
    """Whether a value is in memory: a view, or what a library's kernel computes; a rounding would hide its call."""
    op = node.target
    return row_of(op).library or (isinstance(op, torch._ops.OpOverload) and returns_view(op))
