"""The products of a small step in fewer kernels, where a kernel takes as long as its launch.

Gradients of weights do not need each other: those of one shape are one batched product, and the gradients of their
biases one sum. What is batched may be added up in another order than by a product of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from .logits import writes

__all__ = ["batch_gradients"]

_aten = torch.ops.aten
_MM, _SUM, _T = _aten.mm.default, _aten.sum.dim_IntList, _aten.t.default
_PRODUCTS = frozenset({_MM, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default})
_SMALL = 2**19  # bytes of a factor: copies of larger ones take longer than the launches that they spare


def batch_gradients(graph: fx.Graph) -> None:
    """Make products one batched product: those of one shape, ``mm(t(a), b)``, that no other product needs.

    Args:
      graph: Its nodes have their ``spec`` in ``meta``.
    """
    if any(_counts_from_storage(node) for node in graph.nodes):
        return  # a part of a batch does not begin where its storage does
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


def _counts_from_storage(node: fx.Node) -> bool:
    return node.target is _aten.as_strided.default and (len(node.args) > 3 or bool(node.kwargs))


def _needed_by_products(graph: fx.Graph) -> set[fx.Node]:
    needed: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if any(user in needed or user.target in _PRODUCTS for user in node.users):
            needed.add(node)
    return needed


def _batch(graph: fx.Graph, group: Sequence[fx.Node], needed: set[fx.Node]) -> None:
    nodes = list(graph.nodes)
    place = {node: number for number, node in enumerate(nodes)}
    first, last = place[group[0]], place[group[-1]]
    written = [number for number, node in enumerate(nodes) if number > first and writes(node)]
    until = min(written, default=len(nodes))  # what is read behind a write may have another value there
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
    """The sum over rows, as the gradient of a bias needs it."""
    sums = [user for user in matrix.users if user.target is _SUM and user.args[1:] == ([0], True)]
    return sums[0] if len(sums) == 1 and not sums[0].kwargs else None


def _move_users(nodes: Iterable[fx.Node], values: Iterable[fx.Node], place: fx.Node) -> None:
    """Move those of some nodes that need values made later, behind the place where these are."""
    late = set(values)
    for node in nodes:
        if not late.isdisjoint(node.all_input_nodes):
            place.append(node)
            late.add(node)
            place = node
