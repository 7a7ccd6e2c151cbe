"""Round where a program does: a compiler computes in float32 what has half its precision, and rounds what it stores.

So a value in memory and the same value in the kernel that made it differ: ``v - v.bfloat16().float()``, what a cast
loses, is zero, and so is what a compensated sum in bfloat16 keeps. Each call of a step therefore rounds its results as
it does by itself; what a single call computes in between is up to the compiler.

torch's compiler rounds what a call returns, and what it reads, if the call's node says so. It drops casts to fewer bits
and back, though: those are calls of an op of our own.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

__all__ = ["ROUNDED", "keep_roundings"]

_CAST = torch.ops.prims.convert_element_type.default
_HALF = frozenset({torch.float16, torch.bfloat16})
_ROUNDS = "low_precision_pointwise_barrier"  # in the compiler's words

_library = torch.library.Library("fcg", "FRAGMENT")
_library.define("rounded(Tensor value, ScalarType dtype) -> Tensor", tags=(torch.Tag.pointwise,))
_library.impl("rounded", lambda value, dtype: _CAST(value, dtype), "CompositeExplicitAutograd")
_library._register_fake("rounded", lambda value, dtype: _CAST(value, dtype))
ROUNDED = torch.ops.fcg.rounded.default


def keep_roundings(graph: fx.Graph) -> str:
    """Mark where calls round, in a graph of :func:`functional_cg.stages.core.graph.core_graph`.

    Returns:
      A text that says where: the compiler's key of a graph does not.
    """
    marked = []
    for number, node in enumerate(graph.nodes):
        if (node.meta.get("result") and _is_half(node)) or any(map(_is_half, node.all_input_nodes)):
            node.meta[_ROUNDS] = True
            marked.append(number)
        if node.target is _CAST and _is_half(node) and _is_wider(node.args[0].meta["val"]):
            node.target = ROUNDED
    return str(marked)


def _is_half(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype in _HALF


def _is_wider(value: Tensor) -> bool:
    return value.dtype in (torch.float32, torch.float64)
