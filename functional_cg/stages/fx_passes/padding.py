"""Pad a product with many columns, and the products that read its gradient, to a width that tensor cores can use.

GPT-2 has 50,257 classes. Rows of bf16 that do not start at multiples of 16 bytes make a product several times slower,
so compilers copy such operands to padded ones: the logits' gradient, which is the largest value of a step, too. If the
product is padded from the start, by zeros in the weight, its gradient has the padding already, and the only copy is the
weight's, which its cast makes anyway.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from ...state.arena import BufferSpec
from .canonical import VIEWS, add, instead, is_written

__all__ = ["Padded", "may_be_padded"]

_aten = torch.ops.aten
_MM, _T = _aten.mm.default, _aten.t.default
_ALIGNMENT = 16  # bytes, for tensor cores
_MULTIPLE = 128  # bytes, a line of the cache


def may_be_padded(product: fx.Node, rows: BufferSpec, results: Sequence[fx.Node]) -> bool:
    """Whether a product and its gradient may be padded, and gain by it.

    Args:
      product: The product.
      rows: How the loss reads it.
      results: Its gradient.
    """
    aligned = rows.shape[1] * rows.dtype.itemsize % _ALIGNMENT == 0
    written = any(map(is_written, (*product.all_input_nodes, *results)))
    return not aligned and not written and product.meta["spec"].shape == rows.shape


@dataclass(slots=True)
class Padded:
    """A product whose columns are padded.

    Attributes:
      graph: The graph.
      product: The padded product.
      columns: Columns of the product before.
      width: Its columns.
      known: Weights that have been padded, by dimension.
    """

    graph: fx.Graph
    product: fx.Node
    columns: int
    width: int
    known: dict[tuple[fx.Node, int], fx.Node] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: fx.Graph, product: fx.Node) -> Padded:
        """Pad a product ``a @ b`` or ``bias + a @ b``, where it stands."""
        spec: BufferSpec = product.meta["spec"]
        step = _MULTIPLE // spec.dtype.itemsize
        width = -(-spec.shape[1] // step) * step
        made = cls(graph, product, spec.shape[1], width)
        arguments: Any = product.args
        *bias, a, b = arguments
        padded = replace(spec, shape=(spec.shape[0], width), stride=(width, 1))
        with graph.inserting_before(product):
            terms = [made._pad(one, one.meta["spec"], -1) for one in bias]
            args = *terms, a, made._operand(b, 1)
            made.product = add(graph, product.target, args, padded, **product.kwargs)
        return made

    def part(self, spec: BufferSpec) -> fx.Node:
        """Return the columns of the product before, as a view."""
        part = replace(spec, stride=(self.width, 1))
        return add(self.graph, _aten.slice.Tensor, (self.product, 1, 0, self.columns), part)

    def read_by_products(self, part: fx.Node) -> None:
        """Let the products that read a view of the part read the padded matrix."""
        rows = part.meta["spec"].shape[0]
        for value, turned in list(_matrices(part, (rows, self.columns), turned=False)):
            for reader in [user for user in value.users if user.target is _MM]:
                self._replace(reader, value, turned=turned)

    def _replace(self, reader: fx.Node, value: fx.Node, *, turned: bool) -> None:
        first = reader.args[0] is value
        other: Any = reader.args[1 if first else 0]
        if other is value or is_written(other) or is_written(reader):
            return
        with self.graph.inserting_before(reader):
            matrix = self.graph.call_function(_T, (self.product,)) if turned else self.product
            if first is not turned:  # its columns are added up
                other = self._operand(other, 0 if first else 1)
            args: tuple[Any, ...] = (matrix, other) if first else (other, matrix)
            if first is turned:  # its rows or columns are those of the padding, too
                args = add(self.graph, _MM, args), 0 if first else 1, 0, self.columns
        instead(reader, _aten.slice.Tensor if first is turned else _MM, args)

    def _operand(self, matrix: Any, dim: int) -> fx.Node:
        """Pad a dimension of a matrix that may be a transposed one, which is padded before."""
        turned = False
        while matrix.target is _T:
            matrix, turned = matrix.args[0], not turned
        dim = 1 - dim if turned else dim
        if (matrix, dim) not in self.known:
            with self._after(matrix):
                self.known[matrix, dim] = self._pad(matrix, matrix.meta["spec"], dim)
        padded = self.known[matrix, dim]
        return self.graph.call_function(_T, (padded,)) if turned else padded

    def _after(self, value: fx.Node) -> Any:
        """Insert after a value, where all of its readers can use what is made."""
        *_, last_argument = self.graph.find_nodes(op="placeholder")
        return self.graph.inserting_after(last_argument if value.op == "placeholder" else value)

    def _pad(self, value: fx.Node, spec: BufferSpec, dim: int) -> fx.Node:
        if not spec.shape or spec.shape[dim] != self.columns:  # a bias of one element
            return value
        after = len(spec.shape) - 1 - dim % len(spec.shape)
        return self.graph.call_function(
            _aten.constant_pad_nd.default, (value, [0] * (2 * after + 1) + [self.width - self.columns])
        )


def _matrices(value: fx.Node, shape: tuple[int, int], *, turned: bool) -> Iterator[tuple[fx.Node, bool]]:
    """Yield the views of a matrix that are that matrix or its transpose."""
    if value.meta["spec"].shape == (shape[::-1] if turned else shape):
        yield value, turned
    for user in value.users:
        if user.target in VIEWS and not turned:
            yield from _matrices(user, shape, turned=False)
        elif user.target is _T and value.meta["spec"].shape == (shape[::-1] if turned else shape):
            yield from _matrices(user, shape, turned=not turned)
