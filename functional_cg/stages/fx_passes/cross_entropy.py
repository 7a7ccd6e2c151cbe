"""Fuse a cross-entropy over many classes and its gradient into one kernel that overwrites the logits.

Both need the maximum and the sum of each row, and the gradient is as large as the logits. A compiler fuses them as
well, but its kernel rescales its sum at each element and is bound by exponentials: for 16,384 rows of 50,304 classes it
takes 2.0 ms on an H100, and this one 1.5 ms. The loss of a row, and so the gradient, may differ in the last bits: the
sum over the classes is added up in another order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ...state.arena import BufferSpec
from .canonical import VIEWS, as_shape, is_written, narrow_views, softmax_by_rows, softmax_in_fp32
from .capped import Link, back_through, chain_of, gradient_of, through
from .logits import before, is_by_element, is_large, product_and_calls, read_targets_first, writes
from .padding import Padded, may_be_padded

__all__ = ["join_gradients", "rewrite_losses"]

_aten = torch.ops.aten
_GRADIENT = _aten._log_softmax_backward_data.default
_DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})

_FIELDS = ("call", "number", "dtype_name")  # of a link, in the order of the op's arguments

_library = torch.library.Library("fcg", "FRAGMENT")
_library.define(
    "cross_entropy_(Tensor(a!) rows, Tensor target, Tensor scale, int ignored, int classes, str[] calls, "
    "float[] numbers, str[] dtypes) -> Tensor"
)
_OP = torch.ops.fcg.cross_entropy_.default


def _cross_entropy_cpu(
    rows: Tensor, target: Tensor, scale: Tensor, ignored: int, classes: int, *links: Sequence[Any]
) -> Tensor:
    chain = tuple(map(Link, *links))
    counts = target != ignored
    index = torch.where(counts, target, 0).unsqueeze(1)
    values = through(rows[:, :classes], chain)
    logits = values[-1].float()
    shifted = logits - logits.amax(1, keepdim=True)
    found = shifted - shifted.exp().sum(1, keepdim=True).log()
    factor = torch.where(counts, scale, 0).unsqueeze(1)
    slopes = (found.exp() * factor).scatter_add_(1, index, -factor)
    rows[:, :classes] = back_through(slopes, values, chain)
    rows[:, classes:] = 0
    return torch.where(counts, -found.gather(1, index).squeeze(1), 0)


def _cross_entropy_cuda(
    rows: Tensor, target: Tensor, scale: Tensor, ignored: int, classes: int, *links: Sequence[Any]
) -> Tensor:
    from ...tensors.cross_entropy_triton import cross_entropy_cuda

    return cross_entropy_cuda(rows, target, scale, ignored, classes, *links)


def _cross_entropy_fake(rows: Tensor, target: Tensor, *_: Any) -> Tensor:
    return rows.new_empty(target.shape, dtype=torch.float32)


_library.impl("cross_entropy_", _cross_entropy_cpu, "CPU")
_library.impl("cross_entropy_", _cross_entropy_cuda, "CUDA")
_library._register_fake("cross_entropy_", _cross_entropy_fake)


@dataclass(frozen=True, slots=True)
class _Loss:
    """A cross-entropy and its gradient in a graph.

    Attributes:
      nll: The loss.
      logp: The log-probabilities.
      backward: The gradient of the log-probabilities.
      result: The gradient of the logits, in their dtype.
      rows: The logits, [n, classes], which the kernel overwrites.
      product: The matrix product that makes them.
      chain: What is made of them before the loss.
      between: What is made of the product on the way to the result.
    """

    nll: fx.Node
    logp: fx.Node
    backward: fx.Node
    result: fx.Node
    rows: fx.Node
    product: fx.Node
    chain: tuple[Link, ...]
    between: set[fx.Node]


def rewrite_losses(graph: fx.Graph) -> None:
    """Let the gradients of large cross-entropies lie in the memory of the logits: by the kernel, or by an early read.

    Args:
      graph: The graph; its nodes have their ``spec`` in ``meta``.
    """
    join_gradients(graph)
    read_targets_first(graph)


def join_gradients(graph: fx.Graph) -> None:
    """Rewrite the cross-entropies of a graph whose logits are a large product that nothing else reads.

    Args:
      graph: The graph; its nodes have their ``spec`` in ``meta``.
    """
    softmax_in_fp32(graph)
    softmax_by_rows(graph)
    narrow_views(graph)
    for nll in graph.find_nodes(op="call_function", target=_aten.nll_loss_forward.default):
        # Recomputed for each loss: one that got the kernel overwrites its logits, which now hold their gradient.
        place = {node: number for number, node in enumerate(graph.nodes)}
        written = [number for node, number in place.items() if writes(node)]
        loss = _loss_of(nll)
        if loss is None or is_written(nll.args[1]):
            continue
        if not any(place[loss.product] < number < place[loss.result] for number in written):
            _join(graph, loss, place)


def _loss_of(nll: fx.Node) -> _Loss | None:
    """Return the loss with its gradient if the kernel can compute them; None otherwise."""
    arguments: Any = nll.args
    logp, _, weight, *_ = arguments
    if weight is not None or logp.target is not _aten._log_softmax.default:
        return None
    product, calls = product_and_calls(logp.args[0])
    chain = chain_of(calls)
    of_logp = [user for user in logp.users if user.target is _aten.nll_loss_backward.default]
    if product is None or chain is None or not is_large(logp.meta["spec"]) or len(of_logp) != 1:
        return None
    backward, slopes = of_logp[0], list(of_logp[0].users)
    if backward.args[1:6] != nll.args or [slope.target for slope in slopes] != [_GRADIENT]:
        return None
    slope = slopes[0]
    found = gradient_of(slope, calls, lambda value, call: _is_remade(value, call, product))
    if found is None:
        return None
    result, readers = found
    rows = _rows(product, calls, logp)
    between = _between(product, {logp, *readers})
    spec: BufferSpec = rows.meta["spec"]
    fits = (
        slope.args[:3] == (backward, logp, 1)
        and set(logp.users) == {nll, backward, slope}
        and logp.meta["spec"].dtype is torch.float32
        and spec.dtype in _DTYPES
        and spec.shape == logp.meta["spec"].shape
        and spec.stride == (spec.shape[1], 1)
        and result.meta["spec"].dtype is spec.dtype
    )
    if not fits or between is None:
        return None
    between |= {nll, logp, backward, *_path(slope, result)}
    return _Loss(nll, logp, backward, result, rows, product, chain, between)


def _rows(product: fx.Node, calls: Sequence[fx.Node], logp: fx.Node) -> fx.Node:
    """Return the product, or the view of it that the first call reads."""
    if product.meta["spec"].shape == logp.meta["spec"].shape:
        return product
    first: Any = (*calls, logp)[0].args[0]
    return first  # type: ignore[no-any-return]


def _is_remade(value: fx.Node, call: fx.Node, product: fx.Node) -> bool:
    """Whether a value is what a call makes of a product, or is computed of the product in the same way."""
    source, calls = product_and_calls(value)
    _, expected = product_and_calls(call)
    return source is product and chain_of(calls) == chain_of(expected)


def _between(product: fx.Node, ends: set[fx.Node]) -> set[fx.Node] | None:
    """Return what is made of a product by views and by element up to ``ends``; None if something else reads it."""
    found, front = set[fx.Node](), list(product.users)
    while front:
        node = front.pop()
        if node in ends or node in found:
            continue
        if node.target not in VIEWS and not is_by_element(node):
            return None
        found.add(node)
        front += node.users
    return found


def _path(first: fx.Node, last: fx.Node) -> list[fx.Node]:
    """Return the calls from the first to the last, each of which reads the one before alone."""
    nodes = [first]
    while nodes[-1] is not last:
        nodes += nodes[-1].users
    return nodes


def _join(graph: fx.Graph, loss: _Loss, place: Mapping[fx.Node, int]) -> None:
    """Replace the log-probabilities by the kernel, if the gradient of the loss can be computed there."""
    arguments: Any = (*loss.nll.args, loss.backward.args[0])
    _, target, _, reduction, ignored, grad = arguments
    with graph.inserting_before(loss.logp):
        known, chosen = (before(graph, one, place, place[loss.logp]) for one in (grad, target))
        if known is None or chosen is None:
            return
        spec = loss.rows.meta["spec"]
        pays = may_be_padded(loss.product, spec, [loss.result])
        padded = Padded.of(graph, loss.product) if pays else None
        rows = loss.rows if padded is None else padded.product
        number = graph.call_function(_number, (chosen, ignored))
        scale = graph.call_function(_scale, (known, number, reduction))
        calls, numbers, dtypes = ([getattr(link, name) for link in loss.chain] for name in _FIELDS)
        losses = graph.call_function(
            _OP, (rows, chosen, scale, ignored, spec.shape[1], calls, numbers, dtypes)
        )
        total = graph.call_function(_total, (losses, number, reduction))
        slopes = rows if padded is None else padded.part(spec)
        if loss.result.meta["spec"].shape != spec.shape:
            slopes = as_shape(graph, slopes, loss.result.meta["spec"].shape)
    for item in list(loss.nll.users):
        item.replace_all_uses_with(number if item.args[1] else total)
        graph.erase_node(item)
    loss.result.replace_all_uses_with(slopes)
    for node in reversed(list(graph.nodes)):
        if node in loss.between and not node.users:
            graph.erase_node(node)
    if padded is not None:
        padded.read_by_products(slopes)
        _erase(graph, loss.rows)


def _erase(graph: fx.Graph, rows: fx.Node) -> None:
    """Erase a product that has been replaced, with its views."""
    while not rows.users:
        source = rows.args[0]
        graph.erase_node(rows)
        if rows.target not in VIEWS:
            return
        assert isinstance(source, fx.Node)
        rows = source


def _number(target: Tensor, ignored: int) -> Tensor:
    """Count the targets that are not ignored."""
    return (target != ignored).sum().to(torch.float32)


def _scale(grad: Tensor, number: Tensor, reduction: int) -> Tensor:
    """Return the gradient of a row's loss."""
    return grad / number if reduction == 1 else grad


def _total(losses: Tensor, number: Tensor, reduction: int) -> Tensor:
    """Return the losses (0), their mean (1) or their sum (2)."""
    if not reduction:
        return losses
    return losses.sum() / number if reduction == 1 else losses.sum()
