"""Adafactor: stores a matrix's second moment as one row and one column.

A sharded leaf is gathered, so that rows and columns are those of the whole, and the result is sharded again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_cg import tree
from functional_cg.optim.algebra.arithmetic import averaged, norm, placed_like, whole
from functional_cg.optim.algebra.base import (
    Direction,
    GradientTransformation,
    Link,
    Optimizer,
    Params,
    Scalar,
    ScalarOrSchedule,
    Shared,
    Updates,
    full_like_tree,
    need_params,
    rate_at,
    require,
    zero_count,
)
from functional_cg.optim.algebra.combine import chain
from functional_cg.optim.algebra.links import Mask, descend
from functional_cg.optim.algebra.selection import replace_selected, resolve_flags, select


class ScaleByFactoredRmsState(NamedTuple):
    """State of :class:`scale_by_factored_rms`: for each leaf either rows and columns, or elements."""

    count: Tensor  # type: ignore[assignment]  # i64[], updates so far
    rows: Updates  # [..., rows, 1] for a leaf [..., rows, columns], whole on each rank; None for a vector
    columns: Updates  # [..., 1, columns]; None for a vector
    elements: Updates  # like params, for vectors; None for a matrix


@dataclass(frozen=True)
class scale_by_factored_rms(Direction):
    """Scale by a running root mean square, stored for a matrix as its row means and column means.

    With ``b = 1 - t^-decay_rate``: ``r <- b r + (1 - b) mean of u^2 along a row``, ``c`` likewise along a column, and
    ``nu = r c / mean(r)``; the result is ``u / sqrt(max(nu, eps^2))``. Vectors keep ``nu`` itself. Leaves with more
    than two dimensions are stacks of matrices.

    State: count i64[]; [..., rows, 1] and [..., 1, columns] for a matrix, the leaf's shape for a vector.

    Source: Shazeer and Stern 2018; ``torch.optim.Adafactor``.

    Attributes:
      decay_rate: Positive; a larger value forgets more slowly.
      eps: Lower bound of the root; None for the eps of the dtype.
    Raises:
      ValueError: If a number is out of range.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> link = optim.scale_by_factored_rms()
      >>> grads = {"w": torch.tensor([[3.0, 1.0], [6.0, 2.0]])}
      >>> link.update(grads, link.init(grads))[0]
      {'w': tensor([[1., 1.],
              [1., 1.]])}
    """

    decay_rate: Scalar = 0.8
    eps: float | None = None

    acts_per_leaf = True
    keeps = ScaleByFactoredRmsState

    def init(self, params: Params) -> ScaleByFactoredRmsState:
        def means(leaf: Tensor, dim: int) -> Tensor | None:
            shape = list(leaf.shape)
            if len(shape) < 2:
                return None
            shape[dim] = 1
            return torch.zeros(shape, dtype=leaf.dtype, device=leaf.device)

        rows, columns = (tree.map(lambda leaf, dim=dim: means(leaf, dim), params) for dim in (-1, -2))
        vectors = tree.map(lambda leaf: leaf if leaf.dim() < 2 else None, params)
        return ScaleByFactoredRmsState(zero_count(params), rows, columns, full_like_tree(vectors))

    def begin(self, state: ScaleByFactoredRmsState) -> tuple[Any, dict[str, Scalar]]:
        count = state.count + 1
        return state._replace(count=count), {"decay": 1 - count.to(torch.float64) ** -self.decay_rate}

    def leaf(
        self, n: Any, u: Tensor, p: Any, rows: Tensor | None, columns: Tensor | None, elements: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        eps = torch.finfo(u.dtype).eps if self.eps is None else self.eps
        if elements is not None:
            elements = averaged(n.decay, elements, u * u)
            return u * elements.clamp(min=eps**2).rsqrt(), None, None, elements
        matrix = whole(u)
        square = matrix * matrix
        rows, columns = (
            averaged(n.decay, rows, _mean(square, -1)),
            averaged(n.decay, columns, _mean(square, -2)),
        )
        nu = rows * columns / _mean(rows, -2).clamp(min=eps)
        return placed_like(matrix * nu.clamp(min=eps**2).rsqrt(), u), rows, columns, None


def _mean(matrix: Tensor, dim: int) -> Tensor:
    """The mean along a dimension that is kept; 0 where it is empty."""
    return matrix.sum(dim, keepdim=True) / max(1, matrix.shape[dim])


def root_mean_square(leaf: Tensor) -> Tensor:
    """The root mean square of a leaf; 0 if it is empty."""
    size: float = max(1, leaf.numel()) ** 0.5
    return norm(leaf) / size


@dataclass(frozen=True)
class clip_by_rms(Link):
    """Clip each leaf to a root mean square of ``threshold``: ``u / max(1, rms(u) / threshold)``.

    Source: Shazeer and Stern 2018; ``optax.clip_by_block_rms``.

    Attributes:
      threshold: Positive number or f32[].
    Raises:
      ValueError: If a number is out of range.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> optim.clip_by_rms(1.0).update({"w": torch.tensor([4.0, -4.0])}, ())[0]
      {'w': tensor([ 1., -1.])}
    """

    threshold: Scalar

    acts_per_leaf = True

    def leaf(self, n: Any, u: Tensor, p: Any) -> Tensor:
        size = root_mean_square(u)
        return u / (size / n.threshold(size)).clamp(min=1).to(u.dtype)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class scale_by_param_rms(Link):
    """Scale each leaf by the root mean square of its parameter, or by ``min_scale`` if that is larger.

    Source: Shazeer and Stern 2018; ``optax.scale_by_param_block_rms``.

    Attributes:
      min_scale: Number or f32[].
    Raises:
      ValueError: If a number is out of range.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> params = {"w": torch.tensor([3.0, -3.0])}
      >>> optim.scale_by_param_rms().update({"w": torch.tensor([1.0, 2.0])}, (), params)[0]
      {'w': tensor([3., 6.])}
    """

    min_scale: Scalar = 1e-3

    needs_params = True
    acts_per_leaf = True

    def leaf(self, n: Any, u: Tensor, p: Tensor) -> Tensor:
        size = root_mean_square(p)
        return u * size.clamp(min=n.min_scale(size)).to(u.dtype)


@dataclass(frozen=True)
class adafactor(Optimizer):
    """Adafactor: steps relative to the scale of each leaf, storing one row and one column per matrix.

    ``scale_by_factored_rms``, ``clip_by_rms``, ``scale_by_param_rms``, and the rate
    ``min(learning_rate, 1 / sqrt(t))``; decay is decoupled and scaled by ``learning_rate`` alone.

    State: that of ``scale_by_factored_rms``.

    Source: Shazeer and Stern 2018; ``torch.optim.Adafactor``. ``optax.adafactor`` and ``torch_optimizer.Adafactor``
    have other defaults, and momentum.

    Attributes:
      learning_rate: Number, f32[], or schedule.
      decay_rate: Decay exponent of the second moment; ``-beta2_decay`` in torch.
      eps: Lower bounds of the second moment's root (None for the eps of the dtype) and of a leaf's RMS.
      clipping_threshold: Largest root mean square of a step, before the learning rate.
      weight_decay: Number or f32[].
      mask: Which leaves decay; see ``adamw``.
    Raises:
      ValueError: If a number is out of range.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> params = {"w": torch.tensor([[3.0, 3.0], [3.0, 3.0]])}
      >>> optimizer = optim.adafactor(0.01)
      >>> optimizer.update({"w": torch.tensor([[3.0, 1.0], [6.0, 2.0]])}, optimizer.init(params), params)[0]
      {'w': tensor([[-0.0300, -0.0300],
              [-0.0300, -0.0300]])}
    """

    learning_rate: ScalarOrSchedule = 1e-2
    decay_rate: Scalar = 0.8
    eps: tuple[float | None, float] = (None, 1e-3)
    clipping_threshold: Scalar = 1.0
    weight_decay: Scalar = field(default=0.0, kw_only=True)
    mask: Mask = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            isinstance(self.eps, (tuple, list)) and len(self.eps) == 2,
            f"adafactor: eps is a pair, got {self.eps!r}",
        )
        object.__setattr__(self, "eps", tuple(self.eps))
        _ = self.links  # each checks its own arguments

    acts_per_leaf = True

    @property
    def links(self) -> tuple[GradientTransformation, ...]:
        return (
            scale_by_factored_rms(self.decay_rate, self.eps[0]),
            clip_by_rms(self.clipping_threshold),
            scale_by_param_rms(self.eps[1]),
        )

    def init(self, params: Params) -> ScaleByFactoredRmsState:
        return scale_by_factored_rms(self.decay_rate, self.eps[0]).init(params)

    def update(
        self, updates: Updates, state: ScaleByFactoredRmsState, params: Params | None = None
    ) -> tuple[Updates, ScaleByFactoredRmsState]:
        params = need_params("adafactor", params)
        rate = rate_at(self.learning_rate, state.count)
        bound = (state.count + 1).to(torch.float64).rsqrt()
        updates, (state, *_) = chain(*self.links).update(updates, (state, (), ()), params)
        decay = Shared(rate * self.weight_decay)
        moved = descend(updates, bound.clamp(max=rate))
        flags = resolve_flags(self.mask, params)
        decayed = tree.map(lambda u, p: u - decay(p) * p, select(moved, flags), select(params, flags))
        return replace_selected(moved, flags, decayed), state
