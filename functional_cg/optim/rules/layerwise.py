"""Layerwise optimizers, which scale by one norm per leaf: LARS and NovoGrad.

Norms are per leaf, in float32 or wider, and over all ranks if the leaf is sharded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_cg import tree
from functional_cg.optim.algebra.arithmetic import averaged, norm
from functional_cg.optim.algebra.base import (
    Direction,
    GradientTransformation,
    Params,
    Scalar,
    Updates,
    full_like_tree,
    zero_count,
)
from functional_cg.optim.algebra.links import Mask, add_decayed_weights, scale_by_learning_rate, trace
from functional_cg.optim.rules.aliases import Alias


@dataclass(frozen=True)
class scale_by_lars(Direction):
    """Add weight decay, then scale to the parameter norm.

    Computes ``trust |p| / (|u| + weight_decay |p| + eps) (u + weight_decay p)``. Where either norm is 0, updates pass
    unchanged, as do leaves where ``mask`` is False.

    Source: You et al. 2017, "Large Batch Training of Convolutional Networks"; ``torch_optimizer.LARS``.
    ``optax.lars`` has ``|u + weight_decay p|`` in the denominator.

    Attributes:
      weight_decay: Number or f32[].
      trust_coefficient: Step size relative to the parameter norm at a learning rate of 1.
      eps: Added to the denominator.
      mask: None for all leaves, a prefix tree of bools, or a function from the parameters to one.
    Raises:
      ValueError: If a number is out of range.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> params = {"w": torch.tensor([3.0, 4.0])}
      >>> link = optim.scale_by_lars(weight_decay=0.0, trust_coefficient=0.5)
      >>> link.update({"w": torch.tensor([0.0, 2.0])}, link.init(params), params)[0]
      {'w': tensor([0.0000, 2.5000])}
    """

    weight_decay: Scalar
    trust_coefficient: Scalar = 1e-3
    eps: Scalar = 1e-8
    mask: Mask = None

    needs_params = True
    acts_per_leaf = True

    def leaf(self, n: Any, u: Tensor, p: Tensor) -> Tensor:
        ours, theirs = norm(p), norm(u)
        ratio = n.trust_coefficient(ours) * ours / (theirs + n.weight_decay(ours) * ours + n.eps(ours))
        still = (ours == 0) | (theirs == 0)
        decayed = torch.where(still, u, u + n.weight_decay(u) * p)
        return decayed * torch.where(still, torch.ones_like(ratio), ratio).to(u.dtype)


@dataclass(frozen=True)
class lars(Alias):
    """LARS: momentum on gradients scaled to their parameter's norm; see ``scale_by_lars``.

    State: a trace like params; count i64[] for a schedule.

    Source: You et al. 2017; ``torch_optimizer.LARS``.

    Attributes:
      learning_rate: Number, f32[], or schedule.
      momentum: In [0, 1).
      nesterov: Look one step ahead.
      trust_coefficient: Step size relative to the parameter norm at a learning rate of 1.
      eps: Added to the denominator of the ratio.
      weight_decay: Number or f32[]; no default.
      mask: Which leaves decay and are scaled; vectors usually are not.
    Raises:
      ValueError: If a number is out of range.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> params = {"w": torch.tensor([3.0, 4.0])}
      >>> optimizer = optim.lars(1.0, trust_coefficient=0.5, weight_decay=0.0)
      >>> optimizer.update({"w": torch.tensor([0.0, 2.0])}, optimizer.init(params), params)[0]
      {'w': tensor([-0.0000, -2.5000])}
    """

    momentum: Scalar = 0.9
    nesterov: bool = False
    trust_coefficient: Scalar = 1e-3
    eps: Scalar = 1e-8
    weight_decay: Scalar = field(kw_only=True)
    mask: Mask = field(default=None, kw_only=True)

    @property
    def links(self) -> tuple[GradientTransformation, ...]:
        scaled, moving = self._made(scale_by_lars), trace(self.momentum, self.nesterov)
        return scaled, moving, scale_by_learning_rate(self.learning_rate)


class ScaleByNovogradState(NamedTuple):
    """State of :class:`scale_by_novograd`."""

    count: Tensor  # type: ignore[assignment]  # i64[], updates so far
    nu: Updates  # running mean of the squared norm, one number per leaf


@dataclass(frozen=True)
class scale_by_novograd(Direction):
    """Divide each leaf by the root of its running squared norm: ``u / (sqrt(nu) + eps)``.

    ``nu <- b2 nu + (1 - b2) |u|^2``, initialized to the first ``|u|^2``.

    State: count i64[]; nu, f32[] or f64[] for each leaf.

    Source: Ginsburg et al. 2019; ``torch_optimizer.NovoGrad``.

    Attributes:
      b2: Decay, in [0, 1).
      eps: Added outside the root.
    Raises:
      ValueError: If a number is out of range.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> link = optim.scale_by_novograd()
      >>> link.update({"w": torch.tensor([3.0, 4.0])}, link.init({"w": torch.zeros(2)}))[0]
      {'w': tensor([0.6000, 0.8000])}
    """

    b2: Scalar = 0.98
    eps: Scalar = 1e-8

    acts_per_leaf = True
    keeps = ScaleByNovogradState

    def init(self, params: Params) -> ScaleByNovogradState:
        full_like_tree(params)  # raises for leaves that are not floating
        dtypes = tree.map(lambda leaf: torch.promote_types(leaf.dtype, torch.float32), params)
        nu = tree.map(lambda leaf, dtype: torch.zeros((), dtype=dtype, device=leaf.device), params, dtypes)
        return ScaleByNovogradState(zero_count(params), nu)

    def begin(self, state: ScaleByNovogradState) -> tuple[Any, dict[str, Any]]:
        return state._replace(count=state.count + 1), {"first": state.count == 0}

    def leaf(self, n: Any, u: Tensor, p: Any, nu: Tensor) -> tuple[Tensor, Tensor]:
        square = norm(u).square()
        nu = torch.where(n.first(nu), square, averaged(n.b2, nu, square))
        return u / (nu.sqrt() + n.eps(nu)).to(u.dtype), nu


@dataclass(frozen=True)
class novograd(Alias):
    """NovoGrad: gradients divided by their running norm, plus weight decay, with momentum; see ``scale_by_novograd``.

    ``t <- b1 t + g / (sqrt(nu) + eps) + weight_decay p``, ``p <- p - learning_rate t``.

    State: that of ``scale_by_novograd``; a trace like params; count i64[] for a schedule.

    Source: Ginsburg et al. 2019; ``torch_optimizer.NovoGrad``.

    Attributes:
      learning_rate: Number, f32[], or schedule.
      b1: Momentum, in [0, 1).
      b2: Decay of the squared norm, in [0, 1).
      eps: Added outside the root.
      weight_decay: Number or f32[].
      mask: Which leaves decay; see ``adamw``.
    Raises:
      ValueError: If a number is out of range.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> params = {"w": torch.tensor([1.0, 2.0])}
      >>> optimizer = optim.novograd(0.1)
      >>> optimizer.update({"w": torch.tensor([3.0, 4.0])}, optimizer.init(params), params)[0]
      {'w': tensor([-0.0600, -0.0800])}
    """

    b1: Scalar = 0.95
    b2: Scalar = 0.98
    eps: Scalar = 1e-8
    weight_decay: Scalar = field(default=0.0, kw_only=True)
    mask: Mask = field(default=None, kw_only=True)

    @property
    def links(self) -> tuple[GradientTransformation, ...]:
        scaled, decayed = map(self._made, (scale_by_novograd, add_decayed_weights))
        return scaled, decayed, trace(self.b1), scale_by_learning_rate(self.learning_rate)
