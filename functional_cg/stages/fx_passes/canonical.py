"""Bring equal computations to one spelling, so that passes and kernels need to know that one only.

``logits.float().view(-1, n)`` and ``logits.view(-1, n).float()`` are the same values. Afterwards, views carry the
narrower dtype: a cast that widens stands right before the call that reads it, one that narrows right after the call
whose result it takes. The gradient of ``gather`` with one index for each row is an elementwise call rather than a write
into zeros.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from ...state.arena import BufferSpec
from ...tensors.op_table import row_of

__all__ = [
    "CAST",
    "VIEWS",
    "add",
    "as_shape",
    "behind",
    "drop_unread",
    "instead",
    "is_written",
    "narrow_views",
    "pick_by_comparison",
    "picked_slope",
    "softmax_in_fp32",
]

_aten = torch.ops.aten
CAST = _aten._to_copy.default
VIEWS = frozenset({_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default})
_SOFTMAX, _SLOPE = _aten._log_softmax.default, _aten._log_softmax_backward_data.default


def add(graph: fx.Graph, target: Any, args: Any, spec: BufferSpec | None = None, **kwargs: Any) -> fx.Node:
    """Insert a call; return its node, with the spec of what it makes if that is told."""
    node = graph.call_function(target, args, kwargs)
    if spec is not None:
        node.meta["spec"] = spec
    return node


def instead(node: fx.Node, target: Any, args: Any, **kwargs: Any) -> fx.Node:
    """Let all that read a call read another one, made at its place; return that one."""
    with node.graph.inserting_before(node):
        made = add(node.graph, target, args, node.meta.get("spec"), **kwargs)
    node.replace_all_uses_with(made)
    return made


def behind(value: Any, ops: Collection[Any] = VIEWS) -> Any:
    """Return what a value is made of by some ops alone, such as views; anything else as it is."""
    while isinstance(value, fx.Node) and value.target in ops:
        value = value.args[0]
    return value


def drop_unread(graph: fx.Graph) -> None:
    """Erase the calls that nothing reads, but those that write or check."""
    graph.eliminate_dead_code(lambda node: node.is_impure() or is_written(node))


def pick_by_comparison(graph: fx.Graph) -> None:
    """Replace the gradients of gathers with one index for each row, in place.

    The gather checks the indices; where none does, a comparison would not notice one that is out of range.

    Args:
      graph: The graph; its nodes have their ``spec`` in ``meta``.
    """
    checked = set()
    for node in _calls(graph, _aten.gather.default):
        dim = _dim(node, node.args[0])
        checked.add((node.args[2], dim, *node.args[0].meta["spec"].shape[dim : dim + 1]))
    for node in _calls(graph, _aten.scatter_add.default):
        zeros, _, index, source = node.args
        dim, shape = _dim(node, zeros), node.meta["spec"].shape
        picked = (*shape[:dim], 1, *shape[dim + 1 :])
        shapes = {index.meta["spec"].shape, source.meta["spec"].shape}
        if (
            row_of(zeros.target).zeros
            and shapes == {picked}
            and (index, dim, *shape[dim : dim + 1]) in checked
        ):
            instead(node, picked_slope, (index, source, dim, shape[dim]))
    drop_unread(graph)


def picked_slope(index: Tensor, source: Tensor, dim: int, size: int) -> Tensor:
    """Return zeros but for ``source`` at ``index`` in each row along ``dim``, of so many elements."""
    places = torch.arange(size, device=index.device).reshape([-1] + [1] * (index.ndim - dim - 1))
    return torch.where(places == index, source, 0)


def softmax_in_fp32(graph: fx.Graph) -> None:
    """Compute log-probabilities in fp32 if they are rounded to a narrower dtype and at once cast to fp32, in place.

    So autocast does on a GPU. A compiler that fuses the casts drops the rounding, too.

    Args:
      graph: The graph; its nodes have their ``spec`` in ``meta``.
    """
    for node in _calls(graph, _SOFTMAX):
        slopes = [user for user in node.users if user.target is _SLOPE]
        casts = [user for user in node.users if _widens(user) and user.meta["spec"].dtype is torch.float32]
        exact = all(slope.args[1] is node and _narrows(slope.args[0]) for slope in slopes)
        if not casts or not exact or len(slopes) + len(casts) < len(node.users):
            continue
        spec: BufferSpec = casts[0].meta["spec"]
        with graph.inserting_before(node):
            given = replace(node.args[0].meta["spec"], dtype=spec.dtype)
            wide = add(graph, CAST, (node.args[0],), given, dtype=spec.dtype)
            made = add(graph, _SOFTMAX, (wide, *node.args[1:]), spec)
        for slope in slopes:
            rounded: BufferSpec = slope.meta["spec"]
            with graph.inserting_before(slope):
                arguments = _source(slope.args[0]), made, slope.args[2], spec.dtype
                back = add(graph, _SLOPE, arguments, replace(rounded, dtype=spec.dtype))
            instead(slope, CAST, (back,), dtype=rounded.dtype)
        for cast in casts:
            cast.replace_all_uses_with(made)
    drop_unread(graph)


def as_shape(graph: fx.Graph, value: fx.Node, shape: Sequence[int]) -> fx.Node:
    """View a value in a shape, whose last dimension is the value's."""
    spec: BufferSpec = value.meta["spec"]
    strides = torch.empty_strided(spec.shape, spec.stride, device="meta").reshape(shape).stride()
    made = replace(spec, shape=tuple(shape), stride=strides)
    return add(graph, _aten.reshape.default, (value, list(shape)), made)


def narrow_views(graph: fx.Graph) -> None:
    """Exchange views with the casts before or after them, in place.

    Args:
      graph: The graph; its nodes have their ``spec`` in ``meta``.
    """
    for node in list(graph.nodes):
        if node.target in VIEWS and _widens(wide := _source(node)):
            # What something else than its views reads has to be in memory.
            if all(user.target in VIEWS for user in wide.users):
                _exchange(graph, wide, node)
    for node in reversed(list(graph.nodes)):
        while _narrows(node) and _source(node).target in VIEWS and len(_source(node).users) == 1:
            if not _are_told(_source(_source(node))):
                break
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
    """Whether it is a call that changes the dtype of a float tensor and nothing else."""
    if node.target is not CAST or not isinstance(node.args[0], fx.Node):  # a number may stand for a tensor
        return False
    if not _are_told(node, _source(node)):
        return False
    if is_written(node) or is_written(_source(node)):
        return False
    old, new = _source(node).meta["spec"], node.meta["spec"]
    return (
        replace(old, dtype=new.dtype) == new
        and old.dtype.is_floating_point
        and new.dtype.is_floating_point
        and not node.kwargs.keys() - {"dtype", "layout", "device"}
    )


def _are_told(*nodes: fx.Node) -> bool:
    """Whether a graph has the specs of values: parts of a call, and windows into a flat state, have none."""
    return all("spec" in node.meta for node in nodes)


def _source(node: fx.Node) -> fx.Node:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def _size(node: fx.Node) -> int:
    return int(node.meta["spec"].dtype.itemsize)


def _calls(graph: fx.Graph, target: Any) -> list[Any]:
    return [
        node
        for node in graph.find_nodes(op="call_function", target=target)
        if _are_told(node, *node.all_input_nodes) and not any(map(is_written, (node, *node.all_input_nodes)))
    ]


def is_written(node: fx.Node) -> bool:
    """Whether some call writes the memory of a value: then it is another value at another place."""
    return bool(node.meta.get("written", False))


def _dim(node: Any, of: Any, position: int = 1) -> int:
    """Return the dimension that a call names, counted from the first."""
    return int(node.args[position] % max(1, len(of.meta["spec"].shape)))
