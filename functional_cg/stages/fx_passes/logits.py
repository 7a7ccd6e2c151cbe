"""Read the targets' logits first in a cross-entropy, so the gradient can reuse the logits' memory.

With many classes this saves memory: the gradient is as large as the logits, and could overwrite them if nothing read
them afterwards. A compiler computes it in the pass over the rows that finds their maxima, and computes the loss later,
from the logits of the targets: so both stay in memory. If the targets' logits are picked before that pass, only a short
vector stays. The pick is guaranteed to come first only if the gradient depends on it, so the gradient gets its targets
from the same op.

The gradient of log-probabilities needs row sums of the loss's own gradient, in which each row has one nonzero element.
That element is the sum, so no pass over the row is needed. The operations and values are the same.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from ...state.arena import BufferSpec
from ..program import Program
from .canonical import CAST, VIEWS, is_written

__all__ = [
    "before", "has_large_logits", "is_by_element", "is_large", "product_and_calls", "read_targets_first", "writes",
]  # fmt: skip

_LARGE = 2**25  # bytes
_aten = torch.ops.aten
_GRADIENT = _aten._log_softmax_backward_data.default
_PRODUCTS = frozenset({_aten.mm.default, _aten.addmm.default})
_LIKE: Mapping[Any, float] = MappingProxyType({_aten.ones_like.default: 1.0, _aten.zeros_like.default: 0.0})
_FEW = 16  # calls that may be made earlier for one value

# An op, so that the compiler reads the logits here and not where the loss needs them.
_library = torch.library.Library("fcg", "FRAGMENT")
_library.define("pick(Tensor rows, Tensor target, int ignored) -> (Tensor, Tensor)")


def _pick(rows: Tensor, target: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """Return each row's [n, classes] element at its target [n], or at 0 if ignored, and the targets."""
    index = torch.where(target != ignored, target, 0)
    return rows.gather(1, index.unsqueeze(1)).squeeze(1), target.clone()


def _pick_fake(rows: Tensor, target: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    return rows.new_empty(target.shape), torch.empty_like(target)


_library.impl("pick", _pick, "CompositeExplicitAutograd")
_library._register_fake("pick", _pick_fake)


def has_large_logits(program: Program) -> bool:
    """Whether a program has a loss over logits so large that saving their memory is worth extra kernels."""
    return any(
        instr.op in (_aten._log_softmax.default, _aten.logsumexp.default) and is_large(instr.args[0].spec)
        for instr in program.instrs
    )


def before(graph: fx.Graph, node: fx.Node, place: Mapping[fx.Node, int], end: int) -> fx.Node | None:
    """Return a node's value before a place, computed there if need be; None if that is impossible or takes too much.

    Args:
      graph: The graph; calls are added where it inserts.
      node: The node.
      place: Where each node stands.
      end: The place.
    """
    needed: set[fx.Node] = set()
    front = [node]
    while front:
        one = front.pop()
        if one in needed or place.get(one, end) < end:
            continue
        if one not in place or not _is_plain(one) or len(needed) == _FEW:
            return None
        needed.add(one)
        front += [] if one.target in _LIKE else one.all_input_nodes
    made: dict[fx.Node, fx.Node] = {}
    for one in sorted(needed, key=place.__getitem__):
        spec = one.meta["spec"]
        if one.target in _LIKE:
            options = {"dtype": spec.dtype, "device": spec.device}
            made[one] = graph.call_function(
                _aten.full.default, (list(spec.shape), _LIKE[one.target]), options
            )
        else:
            made[one] = graph.node_copy(one, lambda known: made.get(known, known))
    return made.get(node, node)


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


def read_targets_first(graph: fx.Graph) -> None:
    """Rewrite the cross-entropies of a graph whose logits are a matrix product, or are computed of one by element."""
    place = {node: number for number, node in enumerate(graph.nodes)}
    written = [number for node, number in place.items() if writes(node)]
    for nll in graph.find_nodes(op="call_function", target=_aten.nll_loss_forward.default):
        logp, target, weight, reduction, ignored = nll.args
        if weight is not None or not reduction or logp.target is not _aten._log_softmax.default:
            continue
        rows, dim, widened = logp.args
        product, calls = product_and_calls(rows)
        if product is None or dim != 1 or is_written(target):
            continue
        if any(place[product] < number < place[nll] for number in written):
            continue  # a value read at another place may differ there
        with graph.inserting_before(logp):
            chosen = before(graph, target, place, place[logp])
            if chosen is None:
                continue
            picked, again = _items(graph, _picked, (product, rows, chosen, ignored), 2)
            for call in calls:
                picked = _for_one(graph, call, picked)
            picked = graph.call_function(_widened, (picked, widened))
            probabilities, top, total = _items(graph, _log_softmax, logp.args, 3)
        with graph.inserting_before(nll):
            loss = graph.call_function(_loss, (picked, top, total, again, reduction, ignored))
        for user in list(logp.users):
            if user.target is _aten.nll_loss_backward.default:
                user.replace_input_with(target, again)
                _know_sums(graph, user)
        logp.replace_all_uses_with(probabilities)
        nll.replace_all_uses_with(loss)
        graph.erase_node(nll)
        graph.erase_node(logp)


def _know_sums(graph: fx.Graph, of_loss: fx.Node) -> None:
    """Rewrite the gradients that need row sums of the loss's own gradient."""
    grad, _, target, weight, reduction, ignored, number = of_loss.args
    for user in list(of_loss.users):
        if weight is None and user.target is _GRADIENT and user.args[0] is of_loss and user.args[2] == 1:
            with graph.inserting_before(user):
                known = grad, target, reduction, ignored, number
                slope = graph.call_function(_slope, (*user.args, *known))
            user.replace_all_uses_with(slope)
            graph.erase_node(user)


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


def _for_one(graph: fx.Graph, call: fx.Node, picked: fx.Node) -> fx.Node:
    """Make a call by element for one element of each row."""
    made = graph.node_copy(call, lambda _: picked)
    made.meta.pop("spec", None)
    return made


def writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _items(graph: fx.Graph, function: Any, args: Any, count: int) -> list[fx.Node]:
    results = graph.call_function(function, args)
    return [graph.call_function(operator.getitem, (results, i)) for i in range(count)]


def _picked(product: Tensor, rows: Tensor, target: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """Return the product's elements at the targets of its rows, which lie as ``rows`` do, and the targets."""
    return torch.ops.fcg.pick.default(product.view(rows.shape), target, ignored)  # type: ignore[no-any-return]


def _widened(picked: Tensor, half_to_float: bool) -> Tensor:  # noqa: FBT001
    """Return the targets' logits in the dtype of the log-probabilities."""
    return picked.float() if half_to_float else picked


def _log_softmax(rows: Tensor, dim: int, half_to_float: bool) -> tuple[Tensor, Tensor, Tensor]:  # noqa: FBT001
    """Return log-probabilities and, per row, maximum and log of the sum, as inductor decomposes the op."""
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    top = wide.amax(dim, keepdim=True)
    shifted = wide - top
    total = shifted.exp().sum(dim, keepdim=True).log()
    found = shifted - total
    return found if half_to_float else found.to(rows.dtype), top, total


def _loss(
    picked: Tensor, top: Tensor, total: Tensor, target: Tensor, reduction: int, ignored: int
) -> tuple[Tensor, Tensor]:
    """Return what ``nll_loss_forward`` does: the mean (1) or sum (2), and the number of targets not ignored."""
    found = picked.to(top.dtype) - top.squeeze(1) - total.squeeze(1)
    counts = target != ignored
    loss, number = torch.where(counts, -found.to(picked.dtype), 0).sum(), counts.sum().to(picked.dtype)
    return loss / number if reduction == 1 else loss, number


def _slope(
    of_loss: Tensor,
    logp: Tensor,
    dim: int,
    dtype: torch.dtype,
    grad: Tensor,
    target: Tensor,
    reduction: int,
    ignored: int,
    number: Tensor,
) -> Tensor:
    """Return the gradient of the logits, as inductor decomposes the op, with known row sums."""
    if logp.dtype is not torch.float32:
        return _GRADIENT(of_loss, logp, dim, dtype)  # type: ignore[no-any-return]
    counts = target != ignored
    each = torch.where(counts, grad / number if reduction == 1 else grad, 0).unsqueeze(dim)
    right = torch.where(counts, target, 0).unsqueeze(dim) == torch.arange(logp.shape[dim], device=logp.device)
    return (logp.exp() * each - torch.where(right, each, 0)).to(dtype)
