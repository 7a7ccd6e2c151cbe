"""Wraps ATen's fused optimizer ops in functional form; nothing else calls them.

``aten._fused_adamw`` and its siblings update a whole list of parameters in one op. The functional overloads return new
lists and are bitwise equal to the in-place ops that ``torch.optim`` uses with ``fused=True``; they trace on fake
tensors, and a lowering may write their results in place.

All tensors of a list share one device, one dtype and the same dense strides: the CPU kernels walk raw memory without
checking (a contiguous gradient of a channels-last parameter would be applied to the wrong elements).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul
from typing import Any

import torch
from torch import Tensor

from functional_cg import tree
from functional_cg.optim.algebra.fitting import refuse_unlike

BUCKET_BYTES = 4 * 2**20  # a kernel on this much runs as long as ten launches cost

Scalar = float | Tensor  # only a learning rate may be a tensor here
Columns = Sequence[Sequence[Tensor]]  # params, grads, moments...; one row per leaf


def per_group(
    call: Callable[..., Sequence[Sequence[Tensor]]], columns: Columns, tags: Sequence[Any] | None = None
) -> list[list[Tensor]]:
    """Run ``call(columns, tag)`` once per (device, dtype, tag) and return the results in leaf order.

    Args:
      call: Takes the columns of one group and its tag; returns columns.
      columns: Lists of tensors of equal length; the first one determines the groups.
      tags: Further group keys, one per leaf.
    Returns:
      One list per column that ``call`` returns; no lists if there are no leaves.
    """
    groups: dict[Any, list[int]] = {}
    for i, leaf in enumerate(columns[0]):
        groups.setdefault((leaf.device, leaf.dtype, tags[i] if tags else None), []).append(i)
    out: list[list[Any]] = []
    for (_, _, tag), rows in groups.items():
        results = call([[column[i] for i in rows] for column in columns], tag)
        out = out or [[None] * len(columns[0]) for _ in results]
        for target, result in zip(out, results, strict=True):
            for i, value in zip(rows, result, strict=True):
                target[i] = value
    return out


def converting(
    call: Callable[..., Any], columns: Columns, tags: Sequence[Any] | None
) -> tuple[Callable[..., Any], list[Any]]:
    """Wrap ``call`` to cast gradients to the parameter dtypes, and tag the leaves with buckets for it.

    The op takes a single dtype. Converting one bucket at a time never holds all cast gradients beside the originals.
    """
    used, buckets = 0, []
    for p in columns[0]:
        used += p.numel() * p.element_size()
        buckets.append(used // BUCKET_BYTES)

    def convert(group: Columns, tag: Any) -> Any:
        params, grads, *rest = group
        return call([params, [g.to(p.dtype) for p, g in zip(params, grads, strict=True)], *rest], tag[0])

    return convert, list(zip(tags or [None] * len(buckets), buckets, strict=True))


def is_dense(tensor: Tensor, order: Sequence[int]) -> bool:
    """Whether the memory has no gaps with the dimensions in ``order``, outermost first."""
    sizes = [tensor.shape[dim] for dim in reversed(order)]
    rows = zip(reversed(order), sizes, accumulate(sizes, mul, initial=1), strict=False)
    return all(size == 1 or tensor.stride(dim) == expected for dim, size, expected in rows)


def align(columns: Columns) -> list[list[Tensor]]:
    """Give every row the stride order of its first tensor, without gaps; usually a no-op."""
    out = [list(column) for column in columns]
    for row, tensors in enumerate(zip(*columns, strict=True)):
        if all(tensor.is_contiguous() for tensor in tensors):
            continue
        first = tensors[0]
        order = sorted(range(first.dim()), key=lambda dim: first.stride(dim), reverse=True)
        back = sorted(range(first.dim()), key=order.__getitem__)
        for column, tensor in zip(out, tensors, strict=True):
            if not is_dense(tensor, order):
                column[row] = tensor.permute(order).contiguous().permute(back)
    return out


def beside(scalar: Any, leaf: Tensor) -> Any:
    """Move a scalar tensor to the device of ``leaf``; return numbers unchanged."""
    return scalar.to(leaf.device) if isinstance(scalar, Tensor) and scalar.device != leaf.device else scalar


def with_rate(
    call: Callable[[Columns, Scalar], Sequence[Sequence[Tensor]]], columns: Columns, lr: Scalar
) -> tuple[list[Tensor], ...]:
    """Run ``call(columns, lr)`` with a learning rate that the op reads correctly.

    The CUDA kernels read a tensor rate as float32, even for float64 parameters. Those take a step with rate 1, scaled
    by the rate afterwards: all of these optimizers are linear in it.
    """
    params = columns[0]
    rate = beside(lr, params[0])
    if not isinstance(rate, Tensor) or params[0].dtype is not torch.float64:
        return tuple(map(list, call(columns, rate.to(torch.float32) if isinstance(rate, Tensor) else rate)))
    whole, *rest = call(columns, 1.0)
    return [p + rate * (w - p) for p, w in zip(params, whole, strict=True)], *map(list, rest)


def run(
    packet: Any, columns: Columns, *, lr: Scalar, count: Tensor | None, **numbers: Any
) -> tuple[list[Tensor], ...]:
    """Run a fused op over (params, grads, moments...) -> (params, moments...).

    ``count`` is the number of this step, from 1; None for an op that takes none. The op only reads
    ``state_steps``, so one f32[] serves all leaves.
    """
    names = [one.name for one in packet.default._schema.arguments if not one.kwarg_only]

    def op(columns: Columns, lr: Scalar) -> Any:
        leaf = columns[0][0]
        steps = [] if count is None else [beside(count, leaf).to(torch.float32)] * len(columns[0])
        rest = [steps if name == "state_steps" else [] for name in names[len(columns) :]]
        # torch's own dispatch would read the tensor
        chosen = packet.tensor_lr if isinstance(lr, Tensor) else packet.default
        out = chosen(*columns, *rest, lr=lr, maximize=False, **numbers)
        return out[0], *out[2 : len(columns)]

    def call(columns: Columns, lr: Scalar) -> Any:
        leaf = columns[0][0]
        if packet is not torch.ops.aten._fused_sgd or leaf.device.type != "cpu" or leaf.dtype.itemsize >= 4:
            return op(columns, lr)
        # torch's op (2.11, 2.13) skips all but a leaf's last few 16-bit elements there. One leaf at a time, so that
        # the wide copies of a single one are alive.
        rows = [
            [new.to(leaf.dtype) for (new,) in op([[one.float()] for one in row], lr)]
            for row in zip(*columns, strict=True)
        ]
        return list(zip(*rows, strict=True))

    return with_rate(call, align(columns), lr)


def run_on_trees(call: Any, trees: list[Any], tags: list[Any] | None = None) -> list[Any]:
    """Run a fused op over trees of equal structure (params, grads, moments...); return all but the grads."""
    refuse_unlike(trees[0], trees[1])
    treedef = tree.flatten(trees[0])[1]
    columns = [tree.leaves(one) for one in trees]
    if any(p.dtype != g.dtype for p, g in zip(*columns[:2], strict=True)):
        call, tags = converting(call, columns, tags)
    results = per_group(call, columns, tags) if columns[0] else [[] for _ in range(len(trees) - 1)]
    return [tree.unflatten(treedef, column) for column in results]
