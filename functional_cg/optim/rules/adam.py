"""Adam and its variants: the links that scale by two moments, and the optimizers made of them.

Moments have the shapes and dtypes of the parameters. Bias corrections are f64[], computed once per step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from functional_cg.optim.algebra.arithmetic import averaged
from functional_cg.optim.algebra.base import Direction, Scalar, Updates
from functional_cg.optim.algebra.links import Mask, add_decayed_weights, scale_by_trust_ratio
from functional_cg.optim.rules.aliases import Alias, Fused


class ScaleByAdamState(NamedTuple):
    """State of :class:`scale_by_adam` and most of its variants."""

    count: Tensor  # type: ignore[assignment]  # i64[], updates so far
    mu: Updates  # first moment, like params
    nu: Updates  # second moment, like params


@dataclass(frozen=True)
class _Betas:
    """The numbers of Adam.

    Attributes:
      b1: Decay of the first moment, in [0, 1).
      b2: Decay of the second moment, in [0, 1).
      eps: Keeps the denominator away from 0.
    """

    b1: Scalar = 0.9
    b2: Scalar = 0.999
    eps: Scalar = 1e-8


@dataclass(frozen=True)
class _Moments(_Betas, Direction):
    """A link with two moments and a count; the methods are those of Adam."""

    keeps: ClassVar[Any] = ScaleByAdamState

    def begin(self, state: Any) -> tuple[Any, dict[str, Scalar]]:
        count = state.count + 1
        t = count.to(torch.float64)
        return state._replace(count=count), {
            "of_mu": 1 / (1 - self.b1**t),
            "of_root": 1 / torch.sqrt(1 - self.b2**t),
        }

    def leaf(self, n: Any, u: Tensor, p: Any, mu: Tensor, nu: Tensor) -> tuple[Tensor, ...]:
        mu = averaged(n.b1, mu, u)
        nu = self._second(n, nu, u, mu)
        return self._direction(n, mu, nu), mu, nu

    def _second(self, n: Any, nu: Tensor, u: Tensor, mu: Tensor) -> Tensor:
        """The second moment after this update; ``mu`` is the first one."""
        return averaged(n.b2, nu, torch.square(u))

    def _direction(self, n: Any, mu: Tensor, nu: Tensor) -> Tensor:
        """``mu_hat / (sqrt(nu_hat) + eps)``."""
        return (mu * n.of_mu(mu)) / (nu.sqrt() * n.of_root(nu) + n.eps(nu))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class scale_by_adam(_Moments):
    """Scale by Adam's bias-corrected moments.

    With ``t = count + 1``: ``mu <- b1 mu + (1 - b1) u``, ``nu <- b2 nu + (1 - b2) u^2``, and the result is
    ``mu / (1 - b1^t) / (sqrt(nu / (1 - b2^t)) + eps)``.

    Moments have the dtypes of the parameters. In bfloat16, ``nu`` stalls because its steps round to nothing: keep
    the parameters in float32.

    Source: Kingma and Ba 2015; ``optax.scale_by_adam`` with ``eps_root=0``.

    Attributes:
      b1: Decay of the first moment, in [0, 1).
      b2: Decay of the second moment, in [0, 1).
      eps: Added outside the root.
      bias_correction: If False, the result is ``mu / (sqrt(nu) + eps)``.
    """

    bias_correction: bool = True

    def begin(self, state: Any) -> tuple[Any, dict[str, Scalar]]:
        if self.bias_correction:
            return super().begin(state)
        return state._replace(count=state.count + 1), {"of_mu": 1.0, "of_root": 1.0}


@dataclass(frozen=True)
class scale_by_yogi(_Moments):
    """Scale by Yogi's moments, the second of which changes by a bounded amount per step.

    Like :class:`scale_by_adam`, but ``nu <- nu - (1 - b2) sign(nu - u^2) u^2``.

    Source: Zaheer et al. 2018; ``optax.scale_by_yogi``, ``torch_optimizer.Yogi``.

    Attributes:
      b1: Decay of the first moment, in [0, 1).
      b2: Decay of the second moment, in [0, 1).
      eps: Added outside the root.
      initial_accumulator_value: Initial value of both moments.
    """

    eps: Scalar = 1e-3
    initial_accumulator_value: float = 1e-6

    def _second(self, n: Any, nu: Tensor, u: Tensor, mu: Tensor) -> Tensor:
        square = u * u
        return nu - n.b2.rest(nu) * torch.sign(nu - square) * square  # type: ignore[no-any-return]


class ScaleByAmsgradState(NamedTuple):
    """State of :class:`scale_by_amsgrad`."""

    count: Tensor  # type: ignore[assignment]  # i64[], updates so far
    mu: Updates  # first moment, like params
    nu: Updates  # second moment, like params
    nu_max: Updates  # the largest second moment so far, like params


@dataclass(frozen=True)
class scale_by_amsgrad(_Moments):
    """Scale by Adam's moments, using the largest second moment so far.

    ``nu_max <- max(nu_max, nu)``, giving ``mu_hat / (sqrt(nu_max / (1 - b2^t)) + eps)``; see ``scale_by_adam``.
    ``optax.scale_by_amsgrad`` takes the maximum of the bias-corrected moments.

    State: count i64[]; mu, nu and nu_max like params.

    Source: Reddi et al. 2018; ``torch.optim.Adam(amsgrad=True)``.

    Attributes:
      b1: Decay of the first moment, in [0, 1).
      b2: Decay of the second moment, in [0, 1).
      eps: Added outside the root.
    Raises:
      ValueError: If a number is out of range.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> link = optim.scale_by_amsgrad(b2=0.5)
      >>> state = link.init({"w": torch.zeros(2)})
      >>> _, state = link.update({"w": torch.tensor([2.0, 1.0])}, state)
      >>> link.update({"w": torch.tensor([0.0, 1.0])}, state)[1].nu_max
      {'w': tensor([2.0000, 0.7500])}
    """

    keeps = ScaleByAmsgradState

    def leaf(  # type: ignore[override]
        self, n: Any, u: Tensor, p: Any, mu: Tensor, nu: Tensor, nu_max: Tensor
    ) -> tuple[Tensor, ...]:
        mu, nu = averaged(n.b1, mu, u), averaged(n.b2, nu, torch.square(u))
        nu_max = torch.maximum(nu_max, nu)
        return self._direction(n, mu, nu_max), mu, nu, nu_max


@dataclass(frozen=True)
class scale_by_adamax(_Moments):
    """Scale by Adam's first moment over a decayed maximum of the gradients.

    ``nu <- max(b2 nu, |u| + eps)``, and the result is ``mu / (1 - b1^t) / nu``.

    State: count i64[]; mu and nu like params.

    Source: Kingma and Ba 2015, section 7.1; ``torch.optim.Adamax``.

    Attributes:
      b1: Decay of the first moment, in [0, 1).
      b2: Decay of the second moment, in [0, 1).
      eps: Added to the absolute gradient before the maximum.
    Raises:
      ValueError: If a number is out of range.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> link = optim.scale_by_adamax()
      >>> link.update({"w": torch.tensor([4.0, -2.0])}, link.init({"w": torch.zeros(2)}))[0]
      {'w': tensor([ 1., -1.])}
    """

    def _second(self, n: Any, nu: Tensor, u: Tensor, mu: Tensor) -> Tensor:
        return torch.maximum(n.b2(nu) * nu, u.abs() + n.eps(u))

    def _direction(self, n: Any, mu: Tensor, nu: Tensor) -> Tensor:
        return mu * n.of_mu(mu) / nu  # type: ignore[no-any-return]


class ScaleByNadamState(NamedTuple):
    """State of :class:`scale_by_nadam`."""

    count: Tensor  # type: ignore[assignment]  # i64[], updates so far
    product: Tensor  # f64[], product of the momenta so far
    mu: Updates  # first moment, like params
    nu: Updates  # second moment, like params


@dataclass(frozen=True)
class scale_by_nadam(_Moments):
    """Scale by Adam's moments with Nesterov momentum that grows over time.

    With ``m_t = b1 (1 - 0.96^(t momentum_decay) / 2)`` and ``M_t = m_1 ... m_t``, the result is
    ``(m_(t+1) / (1 - M_(t+1)) mu + (1 - m_t) / (1 - M_t) u) / (sqrt(nu_hat) + eps)``. ``optax.nadam`` has a constant
    momentum.

    State: count i64[]; product f64[]; mu and nu like params.

    Source: Dozat 2016; ``torch.optim.NAdam``.

    Attributes:
      b1: Decay of the first moment, in [0, 1).
      b2: Decay of the second moment, in [0, 1).
      eps: Added outside the root.
      momentum_decay: How fast the momentum grows; 0 keeps it constant.
    Raises:
      ValueError: If a number is out of range.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> link = optim.scale_by_nadam()
      >>> link.update({"w": torch.tensor([4.0, -2.0])}, link.init({"w": torch.zeros(2)}))[0]
      {'w': tensor([ 1.0565, -1.0565])}
    """

    momentum_decay: Scalar = 4e-3

    keeps = ScaleByNadamState

    def begin(self, state: Any) -> tuple[Any, dict[str, Scalar]]:
        state, more = super().begin(state)
        t = state.count.to(torch.float64)
        now, ahead = (self.b1 * (1 - 0.5 * 0.96 ** (step * self.momentum_decay)) for step in (t, t + 1))
        product = state.product * now
        more |= {"of_mu": ahead / (1 - product * ahead), "of_u": (1 - now) / (1 - product)}
        return state._replace(product=product), more

    def leaf(self, n: Any, u: Tensor, p: Any, mu: Tensor, nu: Tensor) -> tuple[Tensor, ...]:
        mu, nu = averaged(n.b1, mu, u), averaged(n.b2, nu, torch.square(u))
        return (n.of_mu(mu) * mu + n.of_u(u) * u) / (nu.sqrt() * n.of_root(nu) + n.eps(nu)), mu, nu


@dataclass(frozen=True)
class scale_by_radam(_Moments):
    """Scale by Adam's moments once their variance is tractable, and by the first moment alone until then.

    With ``r_inf = 2 / (1 - b2) - 1`` and ``r = r_inf - 2 t b2^t / (1 - b2^t)``: the result is ``mu_hat`` while
    ``r <= 5``, and after that
    ``mu_hat sqrt((r - 4) (r - 2) r_inf / ((r_inf - 4) (r_inf - 2) r)) sqrt(1 - b2^t) / (sqrt(nu) + eps)``.

    State: count i64[]; mu and nu like params.

    Source: Liu et al. 2020; ``torch.optim.RAdam``, ``torch_optimizer.RAdam``.

    Attributes:
      b1: Decay of the first moment, in [0, 1).
      b2: Decay of the second moment, in [0, 1).
      eps: Added outside the root.
    Raises:
      ValueError: If a number is out of range.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> link = optim.scale_by_radam()
      >>> link.update({"w": torch.tensor([4.0, -2.0])}, link.init({"w": torch.zeros(2)}))[0]
      {'w': tensor([ 4., -2.])}
    """

    def begin(self, state: Any) -> tuple[Any, dict[str, Scalar]]:
        state, more = super().begin(state)
        t = state.count.to(torch.float64)
        limit, power = 2 / (1 - self.b2) - 1, self.b2**t
        r = limit - 2 * t * power / (1 - power)
        certain = (r - 4) * (r - 2) * limit / ((limit - 4) * (limit - 2) * r) * (1 - power)
        return state, more | {"root": torch.sqrt(certain.clamp(min=0)), "known": r > 5}

    def _direction(self, n: Any, mu: Tensor, nu: Tensor) -> Tensor:
        factor = n.root(nu) / (nu.sqrt() + n.eps(nu))
        return mu * n.of_mu(mu) * torch.where(n.known(nu), factor, torch.ones_like(nu))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class scale_by_belief(_Moments):
    """Scale by Adam's first moment over how far gradients stray from it.

    ``nu <- b2 nu + (1 - b2) (u - mu)^2 + eps``, and the result is ``mu_hat / (sqrt(nu_hat) + eps)``.

    State: count i64[]; mu and nu like params.

    Source: Zhuang et al. 2020; ``optax.scale_by_belief``, ``torch_optimizer.AdaBelief``.

    Attributes:
      b1: Decay of the first moment, in [0, 1).
      b2: Decay of the second moment, in [0, 1).
      eps: Added to the second moment at each step, and again outside the root.
    Raises:
      ValueError: If a number is out of range.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> link = optim.scale_by_belief()
      >>> link.update({"w": torch.tensor([4.0, -2.0])}, link.init({"w": torch.zeros(2)}))[0]
      {'w': tensor([ 1.1111, -1.1111])}
    """

    eps: Scalar = 1e-16

    def _second(self, n: Any, nu: Tensor, u: Tensor, mu: Tensor) -> Tensor:
        return averaged(n.b2, nu, torch.square(u - mu)) + n.eps(nu)  # type: ignore[no-any-return]


class _Family(_Betas, Alias):
    """A link with moments, then the learning rate. For L2 decay, use ``chain(add_decayed_weights(...), ...)``."""


class _Fused(_Family, Fused):
    """What the fused ops call the numbers, and what they need beside."""

    names = MappingProxyType({"b1": "beta1", "b2": "beta2", "eps": "eps"})
    constants = MappingProxyType({"amsgrad": False})


@dataclass(frozen=True)
class adam(_Fused):
    r"""Adam: ``p <- p - learning_rate * mu_hat / (sqrt(nu_hat) + eps)``; see ``scale_by_adam``.

    ``step`` runs ``aten._fused_adam``. Moments have the dtypes of the parameters.

    Source: Kingma and Ba 2015; ``torch.optim.Adam``, ``optax.adam``.

    Attributes:
      learning_rate: Number, f32[], or schedule.
      b1: Decay of the first moment, in [0, 1).
      b2: Decay of the second moment, in [0, 1).
      eps: Added outside the root.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> params = {"w": torch.tensor([1.0, 2.0])}
      >>> optimizer = optim.adam(0.1)
      >>> optimizer.step({"w": torch.tensor([1.0, -1.0])}, optimizer.init(params), params)[0]
      {'w': tensor([0.9000, 2.1000])}
    """

    rule = (scale_by_adam,)
    packet = torch.ops.aten._fused_adam


@dataclass(frozen=True)
class adamw(_Fused):
    r"""AdamW: Adam with decoupled weight decay.

    ``p <- p - learning_rate * (mu_hat / (sqrt(nu_hat) + eps) + weight_decay * p)``; see ``scale_by_adam``.

    ``weight_decay`` has no default: ``optax.adamw`` silently decays by 1e-4, and ``torch.optim.AdamW`` by 1e-2.
    ``step`` runs ``aten._fused_adamw``; with a ``mask``, it runs once for the decayed leaves and once for the rest,
    bitwise equal to ``torch.optim`` with two parameter groups.

    Source: Loshchilov and Hutter 2019; ``torch.optim.AdamW``, ``optax.adamw``.

    Attributes:
      learning_rate: Number, f32[], or schedule; also scales the decay.
      b1: Decay of the first moment, in [0, 1).
      b2: Decay of the second moment, in [0, 1).
      eps: Added outside the root.
      weight_decay: Number or f32[].
      mask: Which leaves decay: None for all, a prefix tree of bools, or a function from the parameters to one.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> params = {"w": torch.tensor([1.0, 2.0]), "b": torch.tensor(1.0)}
      >>> optimizer = optim.adamw(0.1, weight_decay=0.5, mask={"w": True, "b": False})
      >>> optimizer
      adamw(learning_rate=0.1, b1=0.9, b2=0.999, eps=1e-08, weight_decay=0.5, mask={'w': True, 'b': False})
      >>> grads = {"w": torch.tensor([1.0, -1.0]), "b": torch.tensor(0.0)}
      >>> optimizer.step(grads, optimizer.init(params), params)[0]
      {'w': tensor([0.8500, 2.0000]), 'b': tensor(1.)}
    """

    weight_decay: Scalar = field(kw_only=True)
    mask: Mask = field(default=None, kw_only=True)

    rule = (scale_by_adam, add_decayed_weights)
    packet = torch.ops.aten._fused_adamw


@dataclass(frozen=True)
class lamb(_Family):
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

    eps: Scalar = 1e-6
    weight_decay: Scalar = field(kw_only=True)
    mask: Mask = field(default=None, kw_only=True)
    bias_correction: bool = field(default=True, kw_only=True)

    rule = (scale_by_adam, add_decayed_weights, scale_by_trust_ratio)


@dataclass(frozen=True)
class yogi(_Family):
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

    rule = (scale_by_yogi,)


@dataclass(frozen=True)
class amsgrad(_Family):
    """AMSGrad: Adam with the largest second moment so far; see ``scale_by_amsgrad``.

    State: that of ``scale_by_amsgrad``, plus count i64[] if the rate is a schedule.

    Source: Reddi et al. 2018; ``torch.optim.Adam(amsgrad=True)``.

    Attributes:
      learning_rate: Number, f32[], or schedule.
      b1: Decay of the first moment, in [0, 1).
      b2: Decay of the second moment, in [0, 1).
      eps: Added outside the root.
    Raises:
      ValueError: If a number is out of range.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> params = {"w": torch.tensor([1.0, 2.0])}
      >>> optimizer = optim.amsgrad(0.1)
      >>> optimizer.update({"w": torch.tensor([4.0, -2.0])}, optimizer.init(params), params)[0]
      {'w': tensor([-0.1000,  0.1000])}
    """

    rule = (scale_by_amsgrad,)


@dataclass(frozen=True)
class adamax(_Family):
    """AdaMax: Adam with a decayed maximum as its second moment; see ``scale_by_adamax``.

    State: that of ``scale_by_adamax``, plus count i64[] if the rate is a schedule.

    Source: Kingma and Ba 2015, section 7.1; ``torch.optim.Adamax``.

    Attributes:
      learning_rate: Number, f32[], or schedule.
      b1: Decay of the first moment, in [0, 1).
      b2: Decay of the second moment, in [0, 1).
      eps: Added to the absolute gradient before the maximum.
    Raises:
      ValueError: If a number is out of range.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> params = {"w": torch.tensor([1.0, 2.0])}
      >>> optimizer = optim.adamax(0.1)
      >>> optimizer.update({"w": torch.tensor([4.0, -2.0])}, optimizer.init(params), params)[0]
      {'w': tensor([-0.1000,  0.1000])}
    """

    rule = (scale_by_adamax,)


@dataclass(frozen=True)
class nadam(_Family):
    """NAdam: Adam with Nesterov momentum; see ``scale_by_nadam``, also for ``momentum_decay``.

    State: that of ``scale_by_nadam``, plus count i64[] if the rate is a schedule.

    Source: Dozat 2016; ``torch.optim.NAdam``.

    Attributes:
      learning_rate: Number, f32[], or schedule.
      b1: Decay of the first moment, in [0, 1).
      b2: Decay of the second moment, in [0, 1).
      eps: Added outside the root.
      momentum_decay: How fast the momentum grows; 0 keeps it constant.
    Raises:
      ValueError: If a number is out of range.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> params = {"w": torch.tensor([1.0, 2.0])}
      >>> optimizer = optim.nadam(0.1)
      >>> optimizer.update({"w": torch.tensor([4.0, -2.0])}, optimizer.init(params), params)[0]
      {'w': tensor([-0.1056,  0.1056])}
    """

    momentum_decay: Scalar = 4e-3

    rule = (scale_by_nadam,)


@dataclass(frozen=True)
class radam(_Family):
    """RAdam: plain momentum until the variance of the second moment is tractable, then Adam; see ``scale_by_radam``.

    State: that of ``scale_by_radam``, plus count i64[] if the rate is a schedule.

    Source: Liu et al. 2020; ``torch.optim.RAdam``, ``torch_optimizer.RAdam``.

    Attributes:
      learning_rate: Number, f32[], or schedule.
      b1: Decay of the first moment, in [0, 1).
      b2: Decay of the second moment, in [0, 1).
      eps: Added outside the root.
    Raises:
      ValueError: If a number is out of range.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> params = {"w": torch.tensor([1.0, 2.0])}
      >>> optimizer = optim.radam(0.1)
      >>> optimizer.update({"w": torch.tensor([4.0, -2.0])}, optimizer.init(params), params)[0]
      {'w': tensor([-0.4000,  0.2000])}
    """

    rule = (scale_by_radam,)


@dataclass(frozen=True)
class adabelief(_Family):
    """AdaBelief: Adam scaled by how far gradients stray from their running mean; see ``scale_by_belief``.

    State: that of ``scale_by_belief``, plus count i64[] if the rate is a schedule.

    Source: Zhuang et al. 2020; ``optax.adabelief``, ``torch_optimizer.AdaBelief``.

    Attributes:
      learning_rate: Number, f32[], or schedule.
      b1: Decay of the first moment, in [0, 1).
      b2: Decay of the second moment, in [0, 1).
      eps: Added to the second moment at each step, and again outside the root.
    Raises:
      ValueError: If a number is out of range.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> params = {"w": torch.tensor([1.0, 2.0])}
      >>> optimizer = optim.adabelief(0.1)
      >>> optimizer.update({"w": torch.tensor([4.0, -2.0])}, optimizer.init(params), params)[0]
      {'w': tensor([-0.1111,  0.1111])}
    """

    eps: Scalar = 1e-16

    rule = (scale_by_belief,)
