"""Batch the weight gradients of a small step, where a kernel takes no longer than its launch.

Weight gradients do not depend on each other: those of one shape become one batched product, and the gradients of their
biases one sum. A batched product may add up its terms in another order than a single one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from ...tensors.op_table import row_of
from .logits import writes

__all__ = ["batch_gradients"]

_aten = torch.ops.aten
_MM, _SUM, _T = _aten.mm.default, _aten.sum.dim_IntList, _aten.t.default
_SMALL = 2**19  # bytes of a factor: copying a larger one takes longer than the launches saved


def batch_gradients(graph: fx.Graph) -> None:
    """Batch products ``mm(t(a), b)`` of one shape that no other product depends on.

    Args:
      graph: The graph; its nodes have their ``spec`` in ``meta``.
    """
    needed = _needed_by_products(graph)
    groups: dict[object, list[fx.Node]] = {}
    for product in graph.find_nodes(op="call_function", target=_MM):
        turned, right = product.args
        if product in needed or turned.target is not _T:
            continue
        specs = tuple(node.meta.get("spec") for node in (turned.args[0], right))
        if all(spec is not None and spec.nbytes <= _SMALL for spec in specs):
            groups.setdefault(specs, []).append(product)
    for group in groups.values():
        if len(group) > 1:
            _batch(graph, group, needed)


def _needed_by_products(graph: fx.Graph) -> set[fx.Node]:
    needed: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if any(user in needed or row_of(user.target).library for user in node.users):
            needed.add(node)
    return needed


def _batch(graph: fx.Graph, group: Sequence[fx.Node], needed: set[fx.Node]) -> None:
    nodes = list(graph.nodes)
    place = {node: number for number, node in enumerate(nodes)}
    first, last = place[group[0]], place[group[-1]]
    written = [number for number, node in enumerate(nodes) if number > first and writes(node)]
    until = min(written, default=len(nodes))  # a value read after a write may differ
    if until < last:
        return
    lefts: list[Any] = [product.args[0].args[0] for product in group]  # type: ignore[union-attr]
    rights = [product.args[1] for product in group]
    sums = [_sum_of_rows(left) for left in lefts]
    alike = all(one and one not in needed and first < place[one] < until for one in sums)
    call = graph.call_function
    with graph.inserting_before(nodes[last + 1]):
        stacked = call(_aten.stack.default, (lefts,))
        factors = call(_aten.transpose.int, (stacked, 1, 2)), call(_aten.stack.default, (rights,))
        batched = call(_aten.bmm.default, factors)
        results = {product: call(_aten.select.int, (batched, 0, i)) for i, product in enumerate(group)}
        if alike:
            summed = call(_SUM, (stacked, [1], True))
            results |= {one: call(_aten.select.int, (summed, 0, i)) for i, one in enumerate(sums) if one}
    for old, new in results.items():
        old.replace_all_uses_with(new)
    _move_users(nodes[first:last], results.values(), nodes[last + 1].prev)
    for old in results:
        graph.erase_node(old)


def _sum_of_rows(matrix: fx.Node) -> fx.Node | None:
    """Return the sum of a matrix over its rows, which is a bias gradient; None if there is not exactly one."""
    sums = [user for user in matrix.users if user.target is _SUM and user.args[1:] == ([0], True)]
    return sums[0] if len(sums) == 1 and not sums[0].kwargs else None


def _move_users(nodes: Iterable[fx.Node], values: Iterable[fx.Node], place: fx.Node) -> None:
    """Move the nodes that depend on ``values``, directly or not, behind the place where these are made."""
    late = set(values)
    for node in nodes:
        if not late.isdisjoint(node.all_input_nodes):
            place.append(node)
            late.add(node)
            place = node
