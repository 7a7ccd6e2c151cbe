"""LAMB and Yogi: Adam variants without a fused op."""

from __future__ import annotations

from dataclasses import dataclass, field

from functional_cg.optim.algebra.base import Params, Scalar, Updates, in_range
from functional_cg.optim.algebra.links import scale_by_adam, scale_by_trust_ratio, scale_by_yogi
from functional_cg.optim.rules.aliases import AdamLike, DecayedAdam


@dataclass(frozen=True)
class lamb(DecayedAdam):
    r"""LAMB: AdamW with each leaf's update scaled to the norm of that leaf.

    ``u = mu_hat / (sqrt(nu_hat) + eps) + weight_decay * p``, ``p <- p - learning_rate * |p| / |u| * u``, with a
    ratio of 1 where either norm is 0. Leaves that do not decay are scaled too.

    Source: You et al. 2020, ``optax.lamb``. ``torch_optimizer.Lamb`` has ``bias_correction=False`` and
    clamps ``|p|`` to 10.

    Attributes:
      learning_rate: Number, f32[], or schedule.
      b1: Decay of the first moment, in [0, 1).
      b2: Decay of the second moment, in [0, 1).
      eps: Added outside the root.
      weight_decay: Number or f32[]; no default.
      mask: Which leaves decay; see ``adamw``.
      bias_correction: Correct the bias of moments that start at 0.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> params = {"w": torch.tensor([3.0, 4.0])}
      >>> optimizer = optim.lamb(0.1, weight_decay=0.0)
      >>> optimizer.update({"w": torch.tensor([0.0, 2.0])}, optimizer.init(params), params)[0]
      {'w': tensor([-0.0000, -0.5000])}
    """

    acts_per_leaf = True

    eps: Scalar = 1e-6
    bias_correction: bool = field(default=True, kw_only=True)

    @property
    def _moments(self) -> scale_by_adam:
        return scale_by_adam(self.b1, self.b2, self.eps, self.bias_correction)

    def _directed(self, updates: Updates, params: Params | None) -> Updates:
        return scale_by_trust_ratio().update(super()._directed(updates, params), (), params)[0]


@dataclass(frozen=True)
class yogi(AdamLike):
    r"""Yogi: Adam whose second moment changes by a bounded amount per step; see ``scale_by_yogi``.

    Source: Zaheer et al. 2018; ``optax.yogi``, ``torch_optimizer.Yogi``.

    Attributes:
      learning_rate: Number, f32[], or schedule.
      b1: Decay of the first moment, in [0, 1).
      b2: Decay of the second moment, in [0, 1).
      eps: Added outside the root.
      initial_accumulator_value: Initial value of both moments.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> params = {"w": torch.tensor([1.0, 2.0])}
      >>> optimizer = optim.yogi(0.1)
      >>> optimizer.update({"w": torch.tensor([1.0, -1.0])}, optimizer.init(params), params)[0]
      {'w': tensor([-0.0999,  0.0998])}
    """

    eps: Scalar = 1e-3
    initial_accumulator_value: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range("yogi: initial_accumulator_value", self.initial_accumulator_value)

    @property
    def _moments(self) -> scale_by_yogi:
        return scale_by_yogi(self.b1, self.b2, self.eps, self.initial_accumulator_value)
