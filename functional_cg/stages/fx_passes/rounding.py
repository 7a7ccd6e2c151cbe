"""Round where a program does: a compiler computes in float32 what has half its precision, and rounds what it stores.

So a value in memory and the same value in the kernel that made it differ: ``v - v.bfloat16().float()``, what a cast
loses, is zero, and so is what a compensated sum in bfloat16 keeps. Each call of a step therefore rounds its results as
it does by itself; what a single call computes in between is up to the compiler.

torch's compiler rounds what a call returns, and what it reads, if the call's node says so. It knows no such sums, and
drops casts to fewer bits and back: there is an op of our own for these.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

__all__ = ["ROUNDED", "keep_roundings"]

_aten = torch.ops.aten
_CAST = torch.ops.prims.convert_element_type.default
_HALF = frozenset({torch.float16, torch.bfloat16})
_WIDE = frozenset({torch.float32, torch.float64})
_ROUNDS = "low_precision_pointwise_barrier"  # in the compiler's words
# They return numbers that they are given, which need no rounding.
_EXACT = frozenset(
    {
        _aten.abs.default,
        _aten.clone.default,
        _aten.maximum.default,
        _aten.minimum.default,
        _aten.neg.default,
        _aten.relu.default,
        _aten.where.self,
    }
)
# The compiler knows of roundings in calls by element of values alone: a number that fills a value is as it is written.
_SUMS = frozenset(
    {_aten.sum.default, _aten.sum.dim_IntList, _aten.mean.default, _aten.mean.dim, _aten.prod.default}
)

_library = torch.library.Library("fcg", "FRAGMENT")
_library.define("rounded(Tensor value, ScalarType dtype) -> Tensor", tags=(torch.Tag.pointwise,))
_library.impl("rounded", lambda value, dtype: _CAST(value, dtype), "CompositeExplicitAutograd")
_library._register_fake("rounded", lambda value, dtype: _CAST(value, dtype))
ROUNDED = torch.ops.fcg.rounded.default


def keep_roundings(graph: fx.Graph) -> list[int]:
    """Mark where calls round, in a graph of :func:`functional_cg.stages.core.graph.core_graph`.

    Returns:
      Places of the marked nodes, of which the compiler's key of a graph says nothing.
    """
    marked = list[int]()
    for number, node in enumerate(list(graph.nodes)):
        if node.op != "call_function" or not _is_of(node, _HALF):
            continue
        if node.target is _CAST and _is_of(node.args[0], _WIDE):
            node.target = ROUNDED
        elif not node.meta.get("result") or node.target in _EXACT:
            continue
        elif node.target in _SUMS or not node.all_input_nodes:
            _round(graph, node)
        else:
            node.meta[_ROUNDS] = True
            marked.append(number)
    return marked


def _round(graph: fx.Graph, node: fx.Node) -> None:
    with graph.inserting_after(node):
        rounded = graph.call_function(ROUNDED, (node, node.meta["val"].dtype))
    rounded.meta.update(node.meta)
    node.replace_all_uses_with(rounded, delete_user_cb=lambda user: user is not rounded)


def _is_of(node: Any, dtypes: frozenset[torch.dtype]) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, Tensor) and value.dtype in dtypes
