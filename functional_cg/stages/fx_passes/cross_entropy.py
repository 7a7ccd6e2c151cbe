"""Compute losses over many classes from a few numbers of each row, and their gradient in the memory of the logits.

One kernel reads the rows, what the loss makes of their numbers are calls on short vectors, and another kernel
overwrites the rows with the gradient (:mod:`.row_values` says what it is made of). Nothing else is as large as the
logits. If the gradient's factors are known beforehand, as for the mean of a cross-entropy, one kernel does both.

A compiler fuses such losses as well, but its kernel rescales its sum at each element and is bound by exponentials: for
16,384 rows of 50,304 classes it takes 2.0 ms on an H100, and this one 1.4 ms. The loss of a row, and so the gradient,
may differ in the last bits: the sum over the classes is added up in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .canonical import (
    CAST,
    add,
    as_shape,
    drop_unread,
    instead,
    is_written,
    narrow_views,
    pick_by_comparison,
    softmax_in_fp32,
)
from .capped import DTYPES, Link, back_through, chain_of, gradient_of, through
from .logits import bring_forward, is_large, product_and_calls, writes
from .padding import Padded, may_be_padded
from .row_values import OF_LOGP, Computed, RowLoss, Slope, flat

__all__ = ["rewrite_losses", "suit"]

_aten = torch.ops.aten
_FIELDS = ("call", "number", "dtype_name")  # of a link, in the order of the ops' arguments

_library = torch.library.Library("fcg", "FRAGMENT")
_CHAIN = "int classes, str[] calls, float[] numbers, str[] dtypes"
_library.define(f"read_rows(Tensor rows, Tensor target, bool sums, {_CHAIN}) -> Tensor")
_library.define(f"write_rows_(Tensor(a!) rows, Tensor target, Tensor found, Tensor factors, {_CHAIN}) -> ()")
_library.define(
    f"cross_entropy_(Tensor(a!) rows, Tensor target, Tensor factors, bool sums, {_CHAIN}) -> Tensor"
)
_READ, _WRITE = torch.ops.fcg.read_rows.default, torch.ops.fcg.write_rows_.default
_BOTH = torch.ops.fcg.cross_entropy_.default


def _read_rows(rows: Tensor, target: Tensor, sums: bool, classes: int, *links: Sequence[Any]) -> Tensor:  # noqa: FBT001
    """Return numbers of rows, f32[4, n], of what a chain makes of them.

    They are the maximum, the logarithm of the sum of exponentials of what that is subtracted from, the log-probability
    of the target, and, if asked for, the sum of all log-probabilities.
    """
    logits = through(rows[:, :classes], tuple(map(Link, *links)))[-1].float()
    top = logits.amax(1)
    shifted = logits - top.unsqueeze(1)
    total = shifted.exp().sum(1).log()
    logp = shifted - total.unsqueeze(1)
    whole = logp.sum(1) if sums else torch.zeros_like(top)
    return torch.stack([top, total, logp.gather(1, target.unsqueeze(1)).squeeze(1), whole])


def _write_rows(
    rows: Tensor, target: Tensor, found: Tensor, factors: Tensor, classes: int, *links: Sequence[Any]
) -> None:
    chain = tuple(map(Link, *links))
    values = through(rows[:, :classes], chain)
    top, total, *_ = found.unsqueeze(2)
    a, b, c = factors.unsqueeze(2)
    slopes = (values[-1].float() - top - total).exp() * a + c
    slopes.scatter_add_(1, target.unsqueeze(1), b)
    rows[:, :classes] = back_through(slopes, values, chain)
    rows[:, classes:] = 0


def _cross_entropy(
    rows: Tensor,
    target: Tensor,
    factors: Tensor,
    sums: bool,  # noqa: FBT001
    classes: int,
    *links: Sequence[Any],
) -> Tensor:
    found = _read_rows(rows, target, sums, classes, *links)
    _write_rows(rows, target, found, factors, classes, *links)
    return found


def _on_cuda(name: str) -> Callable[..., Any]:
    """Return what runs the kernels of a GPU, which import Triton."""

    def run(*arguments: Any) -> Any:
        from ...tensors import cross_entropy_triton

        return getattr(cross_entropy_triton, name)(*arguments)

    return run


def _found_fake(rows: Tensor, *_: Any) -> Tensor:
    return rows.new_empty((4, rows.shape[0]), dtype=torch.float32)


for _name, _cpu, _fake in (
    ("read_rows", _read_rows, _found_fake),
    ("write_rows_", _write_rows, lambda *_: None),
    ("cross_entropy_", _cross_entropy, _found_fake),
):
    _library.impl(_name, _cpu, "CPU")
    _library.impl(_name, _on_cuda(f"{_name.removesuffix('_')}_cuda"), "CUDA")
    _library._register_fake(_name, _fake)


def suit(graph: fx.Graph) -> None:
    """Change a graph in place as suits a GPU: gathers' gradients by comparison, narrow views, losses by kernels."""
    pick_by_comparison(graph)
    rewrite_losses(graph)


def rewrite_losses(graph: fx.Graph) -> None:
    """Narrow a graph's views, and rewrite the losses whose logits are a large product that nothing else reads.

    Behind a view of a wide value, calls have another shape than those on the value itself, and share no kernel with
    them: a norm that is computed again for the gradient of a weight, and the norm's own gradient.

    Args:
      graph: The graph; its nodes have their ``spec`` in ``meta``.
    """
    if _large(graph):
        softmax_in_fp32(graph)
    narrow_views(graph)
    products: dict[fx.Node, list[fx.Node]] = {}
    for start in _large(graph):
        product, calls = product_and_calls(start.args[0])
        if product is not None and chain_of(calls) is not None:
            products.setdefault(product, calls)
    for product, calls in products.items():
        # Counted again for each loss: one that got the kernel overwrites its logits, which now hold their gradient.
        place = {node: number for number, node in enumerate(graph.nodes)}
        loss = RowLoss(product, calls)
        loss.follow(graph)
        found = _gradient(loss, place)
        if found is not None:
            _join(loss, *found, place)


def _large(graph: fx.Graph) -> list[Any]:
    """Return what reads logits so large that saving their memory is worth extra kernels."""
    return [
        node
        for op in (_aten._log_softmax.default, _aten.logsumexp.default)
        for node in graph.find_nodes(op="call_function", target=op)
        if "spec" in node.args[0].meta and is_large(node.args[0].meta["spec"])
    ]


def _gradient(loss: RowLoss, place: Mapping[fx.Node, int]) -> tuple[Slope, list[fx.Node]] | None:
    """Return the gradient of what a loss takes, and the nodes from there to that of the product.

    None if the kernels cannot compute them.
    """
    product, calls, spec = loss.product, loss.calls, loss.product.meta["spec"]
    fits = spec.dtype in DTYPES and len(spec.shape) == 2 and spec.stride == (spec.shape[1], 1)
    if not fits or loss.target is None or is_written(loss.target):
        return None

    def remade(value: fx.Node, call: fx.Node) -> bool:
        source, made = product_and_calls(value)
        _, expected = product_and_calls(call)
        return source is product and chain_of(made) == chain_of(expected)

    for node, value in reversed(loss.values.items()):
        # A gradient that has been rounded is that of what the last cast reads.
        rounded = node.meta["spec"].dtype is not torch.float32
        if isinstance(value, Slope) and not (rounded and calls[-1:] and calls[-1].target is not CAST):
            path = gradient_of(node, calls[:-1] if rounded else calls, remade)
            if path is not None and _is_alone(loss, path, place):
                return value, path
    return None


def _is_alone(loss: RowLoss, path: Sequence[fx.Node], place: Mapping[fx.Node, int]) -> bool:
    """Whether nothing else reads what is as large as the product up to its gradient, and nothing is written."""
    product, result, made = loss.product, path[-1], _replaced(loss, path, place)
    read = {product, *made} - {result, *loss.readers}
    return (
        result.meta["spec"].dtype is product.meta["spec"].dtype
        and not any(user not in made for node in read for user in node.users)
        and not any(place[product] < place[node] < place[result] for node in place if writes(node))
    )


def _replaced(loss: RowLoss, path: Sequence[fx.Node], place: Mapping[fx.Node, int]) -> set[fx.Node]:
    """Return the nodes up to the product's gradient that the kernels stand for."""
    every = {*loss.values, *loss.readers, *path} - {loss.product}
    return {one for one in every if place[one] <= place[path[-1]]}


def _join(loss: RowLoss, slope: Slope, path: Sequence[fx.Node], place: Mapping[fx.Node, int]) -> None:
    """Replace a loss and its gradient by kernels."""
    graph, spec, chain, result = loss.product.graph, loss.product.meta["spec"], chain_of(loss.calls), path[-1]
    assert chain is not None
    assert loss.target is not None
    start = min(loss.readers, key=place.__getitem__)
    gone = _replaced(loss, path, place)
    free = {node: number for node, number in place.items() if node not in gone}
    if not bring_forward([loss.target], start, place, free):
        return
    known = bring_forward(slope.leaves(), start, place, free)
    padded = Padded.of(graph, loss.product) if may_be_padded(loss.product, spec, [result]) else None
    rows = loss.product if padded is None else padded.product
    sums = any(node.target in OF_LOGP for node in loss.readers)
    links = (spec.shape[1], *([getattr(link, name) for link in chain] for name in _FIELDS))
    with graph.inserting_before(start):
        target = index = add(graph, flat, (loss.target,))
        if loss.ignored is not None:
            index = add(graph, _index, (target, loss.ignored))
        if known:
            numbers = add(graph, _BOTH, (rows, index, _factors(graph, slope, index), sums, *links))
        else:
            numbers = add(graph, _READ, (rows, index, sums, *links))
    with graph.inserting_before(path[0]):
        if not known:
            add(graph, _WRITE, (rows, index, numbers, _factors(graph, slope, index), *links))
        slopes = rows if padded is None else padded.part(spec)
        if result.meta["spec"].shape != spec.shape:
            slopes = as_shape(graph, slopes, result.meta["spec"].shape)
    for reader in loss.readers:
        _replace(graph, reader, numbers, target, loss)
    result.replace_all_uses_with(slopes)
    drop_unread(graph)
    if padded is not None:
        padded.read_by_products(slopes)
        drop_unread(graph)


def _factors(graph: fx.Graph, slope: Slope, index: fx.Node) -> fx.Node:
    """Insert the calls that make f32[3, n], the factors of softmax, of the target and of all."""
    made: dict[Computed, fx.Node] = {}

    def row(value: Any) -> Any:
        if isinstance(value, Computed) and value not in made:
            made[value] = add(graph, value.function, tuple(map(row, value.arguments)))
        return made.get(value, value) if isinstance(value, Computed) else value

    return add(graph, _stacked, (index, *map(row, (slope.a, slope.b, slope.c))))


def _replace(graph: fx.Graph, reader: fx.Node, numbers: fx.Node, target: fx.Node, loss: RowLoss) -> None:
    """Let the readers of numbers of rows read what the kernel found."""
    if reader.target is _aten.nll_loss_forward.default:
        reduction, ignored = reader.args[3:5]
        with graph.inserting_before(reader):
            number = add(graph, _number, (target, ignored))
            total = add(graph, _total, (numbers, target, number, reduction, ignored))
        for item in reader.users:
            item.replace_all_uses_with(number if item.args[1] else total)
        return
    shape = list(reader.meta["spec"].shape)
    if reader.target is _aten.logsumexp.default:
        instead(reader, _logsumexp, (numbers, shape))
    elif reader.target is _aten.gather.default:
        instead(reader, _picked, (numbers, shape, loss.is_logp(reader.args[0])))
    else:
        instead(reader, _sum, (numbers, shape, loss.classes if reader.target is _aten.mean.dim else 1))


def _index(target: Tensor, ignored: int) -> Tensor:
    """Return the class to pick of each row."""
    return torch.where(target != ignored, target, 0)


def _stacked(index: Tensor, *parts: Tensor | float) -> Tensor:
    rows = [
        part.float().expand(index.shape)
        if isinstance(part, Tensor)
        else torch.full(index.shape, part, dtype=torch.float32, device=index.device)
        for part in parts
    ]
    return torch.stack(rows)


def _number(target: Tensor, ignored: int) -> Tensor:
    """Count the targets that are not ignored."""
    return (target != ignored).sum().to(torch.float32)


def _total(numbers: Tensor, target: Tensor, number: Tensor, reduction: int, ignored: int) -> Tensor:
    """Return the losses (0), their mean (1) or their sum (2)."""
    losses = torch.where(target != ignored, -numbers[2], 0)
    if not reduction:
        return losses
    return losses.sum() / number if reduction == 1 else losses.sum()


def _logsumexp(numbers: Tensor, shape: list[int]) -> Tensor:
    return (numbers[0] + numbers[1]).reshape(shape)


def _picked(numbers: Tensor, shape: list[int], logp: bool) -> Tensor:  # noqa: FBT001
    """Return the targets' log-probabilities, or logits."""
    found = numbers[2] if logp else numbers[2] + numbers[1] + numbers[0]
    return found.reshape(shape)


def _sum(numbers: Tensor, shape: list[int], count: int) -> Tensor:
    """Return the sums of the log-probabilities over a number."""
    return (numbers[3] / count).reshape(shape)
