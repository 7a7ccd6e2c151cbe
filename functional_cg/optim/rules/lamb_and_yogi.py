"""Optimizers without a fused op: ``lamb`` and ``yogi``."""

from __future__ import annotations

from dataclasses import dataclass, field

from functional_cg.optim.algebra.base import (
    Optimizer,
    Params,
    Scalar,
    ScalarOrSchedule,
    Updates,
    freeze,
    in_range,
    need_params,
    rate_at,
)
from functional_cg.optim.algebra.links import (
    Mask,
    ScaleByAdamState,
    add_decayed_weights,
    check_adam,
    descend,
    scale_by_adam,
    scale_by_trust_ratio,
    scale_by_yogi,
)


@dataclass(frozen=True)
class lamb(Optimizer):
    r"""LAMB: AdamW whose update of each leaf is scaled to the norm of the leaf.

    ``u = mu_hat / (sqrt(nu_hat) + eps) + weight_decay * p``, ``p <- p - learning_rate * |p| / |u| * u``, with ratio
    1 where a norm is 0. The ratio is taken for the leaves that do not decay as well.

    Source: You et al. 2020, ``optax.lamb``. ``torch_optimizer.Lamb`` is ``bias_correction=False``, with ``|p|``
    clamped to 10.

    Attributes:
      learning_rate: Number, f32[], or schedule.
      b1: Decay of the first moment, in [0, 1).
      b2: Decay of the second moment, in [0, 1).
      eps: Added outside of the root.
      weight_decay: Number or f32[]; no default.
      mask: Which leaves decay; see ``adamw``.
      bias_correction: Correct the moments for their start at 0.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> params = {"w": torch.tensor([3.0, 4.0])}
      >>> optimizer = optim.lamb(0.1, weight_decay=0.0)
      >>> optimizer.update({"w": torch.tensor([0.0, 2.0])}, optimizer.init(params), params)[0]
      {'w': tensor([-0.0000, -0.5000])}
    """

    learning_rate: ScalarOrSchedule
    b1: Scalar = 0.9
    b2: Scalar = 0.999
    eps: Scalar = 1e-6
    weight_decay: Scalar = field(kw_only=True)
    mask: Mask = field(default=None, kw_only=True)
    bias_correction: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        in_range("lamb: learning_rate", self.learning_rate)
        in_range("lamb: weight_decay", self.weight_decay)
        check_adam("lamb", self.b1, self.b2, self.eps)
        object.__setattr__(self, "mask", freeze(self.mask))

    @property
    def acts_per_leaf(self) -> bool:
        return True

    def init(self, params: Params) -> ScaleByAdamState:
        return scale_by_adam(self.b1, self.b2, self.eps).init(params)

    def update(
        self, updates: Updates, state: ScaleByAdamState, params: Params | None = None
    ) -> tuple[Updates, ScaleByAdamState]:
        params = need_params("lamb", params)
        rate = rate_at(self.learning_rate, state.count)
        moments = scale_by_adam(self.b1, self.b2, self.eps, self.bias_correction)
        updates, state = moments.update(updates, state, params)
        updates, _ = add_decayed_weights(self.weight_decay, self.mask).update(updates, (), params)
        updates, _ = scale_by_trust_ratio().update(updates, (), params)
        return descend(updates, rate), state


@dataclass(frozen=True)
class yogi(Optimizer):
    r"""Yogi: Adam whose second moment moves by a bounded amount; see ``scale_by_yogi``.

    Source: Zaheer et al. 2018; ``optax.yogi``, ``torch_optimizer.Yogi``.

    Attributes:
      learning_rate: Number, f32[], or schedule.
      b1: Decay of the first moment, in [0, 1).
      b2: Decay of the second moment, in [0, 1).
      eps: Added outside of the root.
      initial_accumulator_value: Where both moments start.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> params = {"w": torch.tensor([1.0, 2.0])}
      >>> optimizer = optim.yogi(0.1)
      >>> optimizer.update({"w": torch.tensor([1.0, -1.0])}, optimizer.init(params), params)[0]
      {'w': tensor([-0.0999,  0.0998])}
    """

    learning_rate: ScalarOrSchedule
    b1: Scalar = 0.9
    b2: Scalar = 0.999
    eps: Scalar = 1e-3
    initial_accumulator_value: float = 1e-6

    def __post_init__(self) -> None:
        in_range("yogi: learning_rate", self.learning_rate)
        in_range("yogi: initial_accumulator_value", self.initial_accumulator_value)
        check_adam("yogi", self.b1, self.b2, self.eps)

    @property
    def _moments(self) -> scale_by_yogi:
        return scale_by_yogi(self.b1, self.b2, self.eps, self.initial_accumulator_value)

    def init(self, params: Params) -> ScaleByAdamState:
        return self._moments.init(params)

    def update(
        self, updates: Updates, state: ScaleByAdamState, params: Params | None = None
    ) -> tuple[Updates, ScaleByAdamState]:
        rate = rate_at(self.learning_rate, state.count)
        updates, state = self._moments.update(updates, state, params)
        return descend(updates, rate), state
