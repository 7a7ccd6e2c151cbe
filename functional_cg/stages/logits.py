"""A loss over many classes reads the target's logit before it looks at the others.

The gradient of a cross-entropy is as large as the logits and could take their memory, if nothing read them afterwards.
A compiler computes it in the pass over the rows that finds their maxima, and the loss itself later, from the logits of
the targets: so both stay. Picked before that pass, the targets' logits are a short vector. Same operations on the same
values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

__all__ = ["read_targets_first"]

_aten = torch.ops.aten
_VIEWS = frozenset({_aten.view.default, _aten._unsafe_view.default})
_PRODUCTS = frozenset({_aten.mm.default, _aten.addmm.default})

# An op, so that the compiler reads the logits here and not where the loss needs them.
_library = torch.library.Library("fcg", "FRAGMENT")
_library.define("pick(Tensor rows, Tensor index) -> Tensor")


def _pick(rows: Tensor, index: Tensor) -> Tensor:
    """One element [n] of each row [n, classes]."""
    return rows.gather(1, index.unsqueeze(1)).squeeze(1)


_library.impl("pick", _pick, "CompositeExplicitAutograd")
torch.library.register_fake("fcg::pick", lambda rows, index: rows.new_empty(index.shape), lib=_library)


def read_targets_first(graph: fx.Graph) -> None:
    """Change the cross-entropies of a graph whose logits are a matrix product."""
    place = {node: number for number, node in enumerate(graph.nodes)}
    for nll in graph.find_nodes(op="call_function", target=_aten.nll_loss_forward.default):
        logp, target, weight, reduction, ignored = nll.args
        if weight is not None or not reduction or logp.target is not _aten._log_softmax.default:
            continue
        rows, dim, _ = logp.args
        product = _product(rows)
        if product is None or dim != 1 or place[target] > place[logp]:
            continue
        with graph.inserting_before(logp):
            picked = graph.call_function(_picked, (product, rows, target, ignored))
            parts = graph.call_function(_log_softmax, logp.args)
            probabilities, top, total = (graph.call_function(_item, (parts, i)) for i in range(3))
        with graph.inserting_before(nll):
            loss = graph.call_function(_loss, (picked, top, total, target, reduction, ignored))
        logp.replace_all_uses_with(probabilities)
        nll.replace_all_uses_with(loss)
        graph.erase_node(nll)
        graph.erase_node(logp)


def _product(rows: fx.Node) -> fx.Node | None:
    """The product that rows are a view of, in another dtype at most."""
    node, casts = rows, 0
    while node.target in _VIEWS or node.target is _aten._to_copy.default:
        casts += node.target not in _VIEWS
        node = node.args[0]  # type: ignore[assignment]
    return node if node.target in _PRODUCTS and casts <= 1 else None


def _picked(product: Tensor, rows: Tensor, target: Tensor, ignored: int) -> Tensor:
    index = torch.where(target != ignored, target, 0)
    return torch.ops.fcg.pick.default(product.view(rows.shape), index).to(rows.dtype)  # type: ignore[no-any-return]


def _log_softmax(rows: Tensor, dim: int, half_to_float: bool) -> tuple[Tensor, Tensor, Tensor]:  # noqa: FBT001
    """Log-probabilities, and per row the maximum and the logarithm of the sum, as inductor decomposes the op."""
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    top = wide.amax(dim, keepdim=True)
    shifted = wide - top
    total = shifted.exp().sum(dim, keepdim=True).log()
    found = shifted - total
    return found if half_to_float else found.to(rows.dtype), top, total


def _loss(
    picked: Tensor, top: Tensor, total: Tensor, target: Tensor, reduction: int, ignored: int
) -> tuple[Tensor, Tensor]:
    """What ``nll_loss_forward`` returns: the mean (1) or sum (2), and the number of targets that count."""
    found = picked.to(top.dtype) - top.squeeze(1) - total.squeeze(1)
    counts = target != ignored
    loss, number = torch.where(counts, -found.to(picked.dtype), 0).sum(), counts.sum().to(picked.dtype)
    return loss / number if reduction == 1 else loss, number


def _item(value: Any, index: int) -> Any:
    return value[index]
