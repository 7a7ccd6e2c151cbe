"""What stands between a product and the loss of its columns, and what may be computed in front of the loss."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from ...state.arena import BufferSpec
from .canonical import CAST, VIEWS, is_written

__all__ = ["bring_forward", "is_by_element", "is_large", "product_and_calls", "writes"]

_LARGE = 2**25  # bytes
_aten = torch.ops.aten
_PRODUCTS = frozenset({_aten.mm.default, _aten.addmm.default})
_LIKE: Mapping[Any, float] = MappingProxyType({_aten.ones_like.default: 1.0, _aten.zeros_like.default: 0.0})


def bring_forward(
    values: Iterable[fx.Node], start: fx.Node, place: Mapping[fx.Node, int], free: dict[fx.Node, int]
) -> bool:
    """Move values, and what they are made of, in front of a call; return whether all of them are there now.

    Args:
      values: Nodes.
      start: The call.
      place: Where each node stands.
      free: The same, of those nodes that may be needed; it is kept up to date.
    """
    end = place[start]
    needed: set[fx.Node] = set()
    front = list(values)
    while front:
        one = front.pop()
        if one in needed or free.get(one, end) < end:
            continue
        if one not in free or not _is_plain(one):
            return False
        needed.add(one)
        front += [] if one.target in _LIKE else one.all_input_nodes
    for one in sorted(needed, key=free.__getitem__):
        if one.target in _LIKE:  # of what it is like, it reads no number
            spec = one.meta["spec"]
            one.args = list(spec.shape), _LIKE[one.target]
            one.target, one.kwargs = _aten.full.default, {"dtype": spec.dtype, "device": spec.device}
        start.prepend(one)
        free[one] = -1
    return True


def _is_plain(node: fx.Node) -> bool:
    """Whether a call may be made earlier: no collective, nor the loss, nor one that writes or makes a large value."""
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and node.target.namespace == "aten"
        and node.target is not _aten.nll_loss_forward.default
        and not writes(node)
        and "spec" in node.meta
        and not is_large(node.meta["spec"])
    )


def is_large(spec: BufferSpec) -> bool:
    """Whether log-probabilities are so large that saving their memory is worth extra kernels."""
    return spec.nbytes >= _LARGE


def product_and_calls(rows: fx.Node) -> tuple[fx.Node | None, list[fx.Node]]:
    """Return the product that ``rows`` is computed of by element, and the calls between them, but for views.

    A call by element reads numbers beside that value: a cap or a scale.
    """
    node, calls = rows, list[fx.Node]()
    while node.target not in _PRODUCTS:
        if node.target not in VIEWS:
            if not is_by_element(node):
                return None, []
            calls.append(node)
        (node,) = node.all_input_nodes
    return node, calls[::-1]


def is_by_element(node: fx.Node) -> bool:
    """Whether each element of a value depends on the same element of one other value alone."""
    if len(node.all_input_nodes) != 1 or is_written(node):
        return False
    if node.target is CAST:
        return True
    call = node.meta.get("call")
    op = node.target if call is None else call.op
    tags = op.tags if isinstance(op, torch._ops.OpOverload) else ()
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
