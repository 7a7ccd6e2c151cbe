"""The products of a small step in fewer kernels, where a kernel takes as long as its launch.

A product with a bias can do the ``relu`` after it, too. And gradients of weights do not need each other: those of one
shape are one batched product, and the gradients of their biases one sum. What is batched may be added up in another
order than by a product of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .logits import writes

__all__ = ["batch_gradients", "join_relus"]

_aten = torch.ops.aten
_MM, _SUM, _T = _aten.mm.default, _aten.sum.dim_IntList, _aten.t.default
_PRODUCTS = frozenset({_MM, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default})
_SMALL = 2**19  # bytes of a factor: copies of larger ones take longer than the launches that they spare

# An op, since the compiler would take torch's own apart again.
_library = torch.library.Library("fcg", "FRAGMENT")
_library.define("addmm_relu(Tensor bias, Tensor a, Tensor b) -> Tensor")


def _addmm_relu(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch._addmm_activation(bias, a, b)


def _addmm_relu_fake(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


_library.impl("addmm_relu", _addmm_relu, "CompositeExplicitAutograd")
_library._register_fake("addmm_relu", _addmm_relu_fake)


def join_relus(graph: fx.Graph) -> None:
    """Let products with a bias do the ``relu`` of what nothing else reads."""
    for relu in graph.find_nodes(op="call_function", target=_aten.relu.default):
        product = relu.args[0]
        if product.target is _aten.addmm.default and len(product.users) == 1 and not product.kwargs:
            with graph.inserting_before(relu):
                joined = graph.call_function(torch.ops.fcg.addmm_relu.default, product.args)
            joined.meta.update(relu.meta)
            relu.replace_all_uses_with(joined)
            graph.erase_node(relu)
            graph.erase_node(product)


def batch_gradients(graph: fx.Graph) -> None:
    """Make products one batched product: those of one shape, ``mm(t(a), b)``, that no other product needs.

    Args:
      graph: Its nodes have their ``spec`` in ``meta``; it writes at its end alone.
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
            _batch(graph, group)


def _needed_by_products(graph: fx.Graph) -> set[fx.Node]:
    needed: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if any(user in needed or user.target in _PRODUCTS for user in node.users):
            needed.add(node)
    return needed


def _batch(graph: fx.Graph, group: Sequence[fx.Node]) -> None:
    first, last = group[0], group[-1]
    between = list(itertools.takewhile(lambda node: node is not last, _from(first)))
    if any(writes(node) for node in between):
        return
    lefts: list[Any] = [product.args[0].args[0] for product in group]  # type: ignore[union-attr]
    rights = [product.args[1] for product in group]
    call = graph.call_function
    behind = last.next
    with graph.inserting_before(behind):
        stacked = call(_aten.stack.default, (lefts,))
        factors = call(_aten.transpose.int, (stacked, 1, 2)), call(_aten.stack.default, (rights,))
        batched = call(_aten.bmm.default, factors)
        results = {product: call(_aten.select.int, (batched, 0, i)) for i, product in enumerate(group)}
        sums = [_sum_of_rows(left) for left in lefts]
        if all(sums):
            summed = call(_SUM, (stacked, [1], True))
            results |= {one: call(_aten.select.int, (summed, 0, i)) for i, one in enumerate(sums) if one}
    for old, new in results.items():
        old.replace_all_uses_with(new)
    _move_users(between, results.values(), behind.prev)
    for old in results:
        graph.erase_node(old)


def _sum_of_rows(matrix: fx.Node) -> fx.Node | None:
    """The sum over rows, as the gradient of a bias needs it."""
    sums = [user for user in matrix.users if user.target is _SUM and user.args[1:] == ([0], True)]
    return sums[0] if len(sums) == 1 and not sums[0].kwargs else None


def _from(node: fx.Node) -> Iterator[fx.Node]:
    while True:
        yield node
        node = node.next


def _move_users(nodes: Iterable[fx.Node], values: Iterable[fx.Node], place: fx.Node) -> None:
    """Move those of some nodes that need values made later, behind the place where these are."""
    late = set(values)
    for node in nodes:
        if not late.isdisjoint(node.all_input_nodes):
            place.append(node)
            late.add(node)
            place = node
