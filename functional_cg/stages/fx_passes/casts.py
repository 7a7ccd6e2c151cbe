"""Move casts of large values so that views carry the narrower dtype.

``logits.float().view(-1, n)`` and ``logits.view(-1, n).float()`` are the same values. Passes and kernels that look for
a product behind a cast need to know one spelling only: a cast that widens stands right before the call that reads it,
one that narrows right after the call whose result it takes.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

__all__ = ["CAST", "VIEWS", "narrow_views"]

_aten = torch.ops.aten
CAST = _aten._to_copy.default
VIEWS = frozenset({_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default})


def narrow_views(graph: fx.Graph) -> None:
    """Exchange views with the casts before or after them, in place.

    Args:
      graph: The graph; its nodes have their ``spec`` in ``meta``.
    """
    for node in list(graph.nodes):
        if node.target in VIEWS and _widens(_source(node)) and _is_only_viewed(_source(node)):
            _exchange(graph, _source(node), node)
    for node in reversed(list(graph.nodes)):
        while _narrows(node) and _source(node).target in VIEWS and len(_source(node).users) == 1:
            node = _exchange(graph, _source(node), node)


def _exchange(graph: fx.Graph, first: fx.Node, second: fx.Node) -> fx.Node:
    """Let the second of two calls run before the first; return the new node for the second."""
    source = _source(first)
    with graph.inserting_before(second):
        early = graph.node_copy(second, lambda _: source)
        late = graph.node_copy(first, lambda _: early)
    late.meta["spec"] = second.meta["spec"]
    shaped, cast = (second, source) if first.target is CAST else (source, second)
    early.meta["spec"] = replace(shaped.meta["spec"], dtype=cast.meta["spec"].dtype)
    second.replace_all_uses_with(late)
    graph.erase_node(second)
    if not first.users:
        graph.erase_node(first)
    return early


def _widens(node: fx.Node) -> bool:
    return _casts(node) and _size(node) > _size(_source(node))


def _narrows(node: fx.Node) -> bool:
    return _casts(node) and _size(node) < _size(_source(node))


def _casts(node: fx.Node) -> bool:
    """Whether a call changes the dtype of a float tensor and nothing else."""
    if node.target is not CAST or "spec" not in _source(node).meta:
        return False
    old, new = _source(node).meta["spec"], node.meta["spec"]
    return (
        replace(old, dtype=new.dtype) == new
        and old.dtype.is_floating_point
        and new.dtype.is_floating_point
        and not node.kwargs.keys() - {"dtype", "layout", "device"}
    )


def _is_only_viewed(node: fx.Node) -> bool:
    """Whether a value has no reader that would need it in memory, apart from those of its views."""
    return all(user.target in VIEWS for user in node.users)


def _source(node: fx.Node) -> fx.Node:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def _size(node: fx.Node) -> int:
    return int(node.meta["spec"].dtype.itemsize)
