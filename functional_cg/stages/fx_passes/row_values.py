"""Follow what a graph makes of logits on the way to a loss, and of the loss on the way back.

Whatever a loss makes of softmax or log-softmax row by row, the gradient of its logits is ``a * softmax + b * one_hot +
c``, with numbers a, b and c for each row. So it is with label smoothing, z-loss, focal losses, weights of rows,
log-softmax by hand.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from .canonical import CAST, VIEWS, behind, is_written, picked_slope
from .capped import chain_of
from .logits import is_by_element, product_and_calls

__all__ = ["OF_LOGP", "Computed", "RowLoss", "Slope", "flat"]

_aten = torch.ops.aten
_LSE = _aten.logsumexp.default
_SHAPES = frozenset({*VIEWS, _aten.unsqueeze.default})  # they keep the order of elements
OF_LOGP = frozenset({_aten.sum.dim_IntList, _aten.mean.dim})  # over all classes


@dataclass(frozen=True, slots=True)
class Computed:
    """A number of each row, or one of all rows: a function of nodes, numbers and others like it."""

    function: Callable[..., Tensor]
    arguments: tuple[Any, ...]


Row: TypeAlias = float | Computed


@dataclass(frozen=True, slots=True)
class _Logits:
    """What so many calls make of the product."""

    calls: int


@dataclass(frozen=True, slots=True)
class _Logp:
    """Log-probabilities."""


@dataclass(frozen=True, slots=True)
class Slope:
    """``a * softmax + b * one_hot + c``."""

    a: Row = 0.0
    b: Row = 0.0
    c: Row = 0.0

    def __add__(self, other: Slope) -> Slope:
        if not isinstance(other, Slope):
            return NotImplemented
        return Slope(_plus(self.a, other.a), _plus(self.b, other.b), _plus(self.c, other.c))

    def __mul__(self, row: Row) -> Slope:
        return self._by(operator.mul, row)

    __rmul__ = __mul__

    def __truediv__(self, row: Row) -> Slope:
        return self._by(operator.truediv, row)

    def __neg__(self) -> Slope:
        return self * -1.0

    def __sub__(self, other: Slope) -> Slope:
        return self + -other

    def _by(self, function: Callable[..., Any], row: Row) -> Slope:
        if isinstance(row, Slope):
            raise TypeError("a product of two gradients is none")
        parts = (self.a, self.b, self.c)
        return Slope(*(0.0 if part == 0.0 else Computed(function, (part, row)) for part in parts))

    def leaves(self) -> Iterator[fx.Node]:
        """Yield the nodes that its numbers are made of."""
        front: list[Any] = [self.a, self.b, self.c]
        for row in front:
            if isinstance(row, Computed):
                front += row.arguments
            elif isinstance(row, fx.Node):
                yield row

    def of_softmax(self, classes: int) -> Slope:
        """Return the gradient of the logits, given this one of their log-probabilities."""
        total = _plus(
            _plus(self.a, self.b), 0.0 if self.c == 0.0 else Computed(operator.mul, (self.c, classes))
        )
        return Slope(_plus(self.a, Computed(operator.mul, (total, -1.0))), self.b, self.c)


def _plus(one: Row, other: Row) -> Row:
    if one == 0.0 or other == 0.0:
        return other if one == 0.0 else one
    return Computed(operator.add, (one, other))


def flat(rows: Tensor) -> Tensor:
    return rows.reshape(-1)


def _of_nll(grad: Tensor, target: Tensor, ignored: int, reduction: int) -> Tensor:
    """Return the gradient of each row's log-probability at its target."""
    counts = target != ignored
    return torch.where(counts, -grad / counts.sum() if reduction == 1 else -grad, 0)


Value: TypeAlias = _Logits | _Logp | Slope


@dataclass
class RowLoss:
    """What a graph makes of a product with many columns.

    Attributes:
      product: The product, [rows, classes].
      calls: The calls between it and the loss.
      values: What the nodes are that are as large as the product.
      readers: The calls that make numbers of rows of such values.
      target: By what elements are picked, [rows].
      ignored: Where that is this number, nothing is.
    """

    product: fx.Node
    calls: list[fx.Node]
    values: dict[fx.Node, Value] = field(default_factory=dict)
    readers: list[fx.Node] = field(default_factory=list)
    target: fx.Node | None = None
    ignored: int | None = None

    @property
    def classes(self) -> int:
        return int(self.product.meta["spec"].shape[1])

    def follow(self, graph: fx.Graph) -> None:
        """Find out what each node is."""
        self.values[self.product] = _Logits(0)
        for node in graph.nodes:
            if any(one in self.values for one in node.all_input_nodes) and not is_written(node):
                value = self._value(node) if node.op == "call_function" else None
                if value is not None:
                    self.values[node] = value

    def is_logp(self, node: Any) -> bool:
        """Whether a node holds log-probabilities."""
        return isinstance(self._known(node), _Logp)

    def _known(self, node: Any) -> Value | None:
        return self.values.get(node) if isinstance(node, fx.Node) else None

    def _is_logits(self, node: Any) -> bool:
        """Whether a node holds what the loss takes."""
        return self._known(node) == _Logits(len(self.calls))

    def _value(self, node: fx.Node) -> Value | None:
        """Return what a node is; None if it is not as large as the logits, or unknown."""
        first = self._known(node.args[0])
        if node.target in VIEWS:
            return first if node.meta["spec"].shape[-1:] == (self.classes,) else None
        if isinstance(first, _Logits) and first.calls < len(self.calls) and is_by_element(node):
            _, calls = product_and_calls(node)
            return _Logits(len(calls)) if chain_of(calls) == chain_of(self.calls[: len(calls)]) else None
        rule = _RULES.get(node.target) or (RowLoss.arithmetic if node.target in _ARITHMETIC else None)
        made = None if rule is None else rule(self, node)
        exact = not isinstance(made, _Logp) or node.meta["spec"].dtype is torch.float32
        return made if exact else None

    def _slope(self, node: Any) -> Slope | None:
        """Return a gradient, which may be made of numbers of rows alone."""
        if not isinstance(node, fx.Node) or "spec" not in node.meta:
            return None
        if node not in self.values and node.meta["spec"].shape[-1:] == (self.classes,):
            made = self._of_rows(node)
            if made is not None:
                self.values[node] = made
        value = self.values.get(node)
        return value if isinstance(value, Slope) else None

    def _of_rows(self, node: fx.Node) -> Slope | None:
        if node.target is _aten.expand.default:
            row = self._row(node.args[0])
            return None if row is None else Slope(c=row)
        if node.target is picked_slope:
            return self.of_gather(node)
        return self.arithmetic(node) if node.target in _ARITHMETIC else None

    def _row(self, value: Any) -> Row | None:
        """Return a number of each row that a node holds as a column, or one of all; None for anything else."""
        if isinstance(value, int | float):
            return float(value)
        if not isinstance(value, fx.Node) or value in self.values or is_written(value):
            return None
        spec = value.meta.get("spec")
        if spec is None or not spec.dtype.is_floating_point:
            return None
        count = torch.Size(spec.shape).numel()
        fits = count == 1 or (count == self.product.meta["spec"].shape[0] and spec.shape[-1] == 1)
        return Computed(flat, (value,)) if fits else None

    def _picks(self, index: Any, ignored: int | None) -> bool:
        """Whether elements are picked by the same numbers as all others."""
        root = behind(index, _SHAPES)
        count = torch.Size(root.meta["spec"].shape).numel()
        if is_written(root) or count != self.product.meta["spec"].shape[0]:
            return False
        if self.target is None:
            self.target = root
        if self.ignored is None:
            self.ignored = ignored
        return _is_remade(root, self.target) and ignored in (None, self.ignored)

    # What reads logits and log-probabilities.

    def log_softmax(self, node: fx.Node) -> Value | None:
        rows, dim, widened = node.args
        return _Logp() if self._is_logits(rows) and self._is_last(dim, node) and not widened else None

    def softmax(self, node: fx.Node) -> Value | None:
        return None if self.log_softmax(node) is None else Slope(a=1.0)

    def lse(self, node: fx.Node) -> None:
        rows, dims, *_ = node.args
        if self._is_logits(rows) and self._is_last(dims, rows):
            self._reads(node)

    def of_logp(self, node: fx.Node) -> None:
        """A sum or a mean over the classes."""
        rows, dims, *_ = node.args
        if self.is_logp(rows) and self._is_last(dims, rows) and not node.kwargs:
            self._reads(node)

    def gather(self, node: fx.Node) -> None:
        rows, dim, index, *rest = node.args
        picks = self._is_logits(rows) or self.is_logp(rows)
        if picks and self._is_last(dim, rows) and not rest and self._picks(index, None):
            self._reads(node)

    def nll(self, node: fx.Node) -> None:
        logp, target, weight, _, ignored = node.args
        if self.is_logp(logp) and weight is None and self._picks(target, ignored):  # type: ignore[arg-type]
            self.readers.append(node)

    def _reads(self, node: fx.Node) -> None:
        if node.meta["spec"].dtype is torch.float32:
            self.readers.append(node)

    def _is_last(self, dims: Any, of: Any) -> bool:
        last = len(of.meta["spec"].shape) - 1
        return dims in (-1, last, [-1], [last])

    # What is made of softmax and of one-hot rows.

    def exp(self, node: fx.Node) -> Value | None:
        return Slope(a=1.0) if self.is_logp(node.args[0]) else None

    def of_nll(self, node: fx.Node) -> Value | None:
        grad, logp, target, weight, reduction, ignored, _ = node.args
        if not self.is_logp(logp) or weight is not None or not self._picks(target, ignored):  # type: ignore[arg-type]
            return None
        return Slope(b=Computed(_of_nll, (grad, target, ignored, reduction)))

    def of_gather(self, node: fx.Node) -> Slope | None:
        index, source, dim, _ = node.args
        row = self._row(source) if self._is_last(dim, node) and self._picks(index, None) else None
        return None if row is None else Slope(b=row)

    def of_log_softmax(self, node: fx.Node) -> Value | None:
        grad, logp, dim, _ = node.args
        slope = self._slope(grad) if self.is_logp(logp) and self._is_last(dim, node) else None
        return None if slope is None else slope.of_softmax(self.classes)

    def arithmetic(self, node: fx.Node) -> Slope | None:
        """A sum or difference of gradients, or one times or divided by a number of each row; casts round it."""
        operands = [self._row(one) if (slope := self._slope(one)) is None else slope for one in node.args]
        if None in operands or is_written(node) or (node.kwargs and node.target is not CAST):
            return None
        try:
            made = _ARITHMETIC[node.target](*operands)
        except TypeError:  # of numbers of rows alone, or a number is added
            return None
        return made if isinstance(made, Slope) else None

    def shifted(self, node: fx.Node) -> Value | None:
        """Logits minus their logsumexp are log-probabilities; all else is a difference."""
        one, other = node.args
        if not self._is_logits(one):
            return self.arithmetic(node)
        known = None if node.kwargs else behind(other, _SHAPES)
        return _Logp() if known in self.readers and known.target is _LSE else None


_ARITHMETIC: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        _aten.mul.Tensor: operator.mul,
        _aten.mul.Scalar: operator.mul,
        _aten.div.Tensor: operator.truediv,
        _aten.div.Scalar: operator.truediv,
        CAST: lambda slope: slope,
        _aten.neg.default: operator.neg,
        _aten.add.Tensor: operator.add,
        _aten.sub.Tensor: operator.sub,
    }
)
_RULES: Mapping[Any, Callable[[RowLoss, fx.Node], Value | None]] = MappingProxyType(
    {
        _aten._log_softmax.default: RowLoss.log_softmax,
        _aten._softmax.default: RowLoss.softmax,
        _LSE: RowLoss.lse,
        _aten.sum.dim_IntList: RowLoss.of_logp,
        _aten.mean.dim: RowLoss.of_logp,
        _aten.gather.default: RowLoss.gather,
        _aten.nll_loss_forward.default: RowLoss.nll,
        _aten.exp.default: RowLoss.exp,
        _aten.nll_loss_backward.default: RowLoss.of_nll,
        _aten._log_softmax_backward_data.default: RowLoss.of_log_softmax,
        _aten.sub.Tensor: RowLoss.shifted,
    }
)


def _is_remade(one: Any, other: Any, depth: int = 8) -> bool:
    """Whether two values are computed in the same way: a backward may make the targets again."""
    if one is other:
        return True
    if not isinstance(one, fx.Node) or not isinstance(other, fx.Node):
        return type(one) is type(other) and not isinstance(one, fx.Node) and one == other
    op = one.target
    pure = isinstance(op, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded not in op.tags
    return (
        depth > 0
        and pure
        and other.target is op
        and not any(map(is_written, (one, other, *one.all_input_nodes, *other.all_input_nodes)))
        and one.kwargs == other.kwargs
        and len(one.args) == len(other.args)
        and all(_is_remade(a, b, depth - 1) for a, b in zip(one.args, other.args, strict=True))
    )
