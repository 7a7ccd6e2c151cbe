"""Links that scale each element by its running moments: Adam's variants.

State has the shapes and dtypes of the parameters. Bias corrections are f64[], computed once per step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_cg import tree
from functional_cg.optim.algebra.arithmetic import averaged, squared
from functional_cg.optim.algebra.base import (
    Direction,
    Params,
    Scalar,
    Updates,
    full_like_tree,
    in_range,
    shared,
    zero_count,
)
from functional_cg.optim.algebra.links import ScaleByAdamState, bias_corrected, check_adam


@dataclass(frozen=True)
class _Moments(Direction):
    """A link with two moments and a count.

    Attributes:
      b1: Decay of the first moment, in [0, 1).
      b2: Decay of the second moment, in [0, 1).
      eps: Keeps the denominator away from 0.
    """

    b1: Scalar = 0.9
    b2: Scalar = 0.999
    eps: Scalar = 1e-8

    def __post_init__(self) -> None:
        check_adam(type(self).__name__, self.b1, self.b2, self.eps)

    def init(self, params: Params) -> Any:
        return ScaleByAdamState(zero_count(params), full_like_tree(params), full_like_tree(params))

    def _averaged(self, updates: Updates, state: Any) -> tuple[Tensor, Updates, Updates]:
        """The count of this step (from 1, in f64) and Adam's moments after it."""
        mu = averaged(self.b1, state.mu, updates)
        nu = averaged(self.b2, state.nu, squared(updates))
        return (state.count + 1).to(torch.float64), mu, nu


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

    def init(self, params: Params) -> ScaleByAmsgradState:
        return ScaleByAmsgradState(zero_count(params), *(full_like_tree(params) for _ in range(3)))

    def update(
        self, updates: Updates, state: ScaleByAmsgradState, params: Params | None = None
    ) -> tuple[Updates, ScaleByAmsgradState]:
        _, mu, nu = self._averaged(updates, state)
        nu_max = tree.map(torch.maximum, state.nu_max, nu)
        out = bias_corrected(ScaleByAdamState(state.count + 1, mu, nu_max), self.b1, self.b2, self.eps)
        return out, ScaleByAmsgradState(state.count + 1, mu, nu, nu_max)


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

    def update(
        self, updates: Updates, state: ScaleByAdamState, params: Params | None = None
    ) -> tuple[Updates, ScaleByAdamState]:
        b2, eps = shared(self.b2), shared(self.eps)
        mu = averaged(self.b1, state.mu, updates)
        nu = tree.map(lambda v, u: torch.maximum(b2(v) * v, u.abs() + eps(u)), state.nu, updates)
        correct = shared(1 / (1 - self.b1 ** (state.count + 1).to(torch.float64)))
        return tree.map(lambda m, v: m * correct(m) / v, mu, nu), ScaleByAdamState(state.count + 1, mu, nu)


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

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range("scale_by_nadam: momentum_decay", self.momentum_decay)

    def init(self, params: Params) -> ScaleByNadamState:
        count = zero_count(params)
        product = torch.ones((), dtype=torch.float64, device=count.device)
        return ScaleByNadamState(count, product, full_like_tree(params), full_like_tree(params))

    def update(
        self, updates: Updates, state: ScaleByNadamState, params: Params | None = None
    ) -> tuple[Updates, ScaleByNadamState]:
        t, mu, nu = self._averaged(updates, state)
        now, ahead = (self.b1 * (1 - 0.5 * 0.96 ** (step * self.momentum_decay)) for step in (t, t + 1))
        product = state.product * now
        of_mu, of_u = shared(ahead / (1 - product * ahead)), shared((1 - now) / (1 - product))
        root, eps = shared(1 / torch.sqrt(1 - self.b2**t)), shared(self.eps)
        out = tree.map(
            lambda m, v, u: (of_mu(m) * m + of_u(u) * u) / (v.sqrt() * root(v) + eps(v)), mu, nu, updates
        )
        return out, ScaleByNadamState(state.count + 1, product, mu, nu)


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

    def update(
        self, updates: Updates, state: ScaleByAdamState, params: Params | None = None
    ) -> tuple[Updates, ScaleByAdamState]:
        t, mu, nu = self._averaged(updates, state)
        limit, power = 2 / (1 - self.b2) - 1, self.b2**t
        r = limit - 2 * t * power / (1 - power)
        certain = (r - 4) * (r - 2) * limit / ((limit - 4) * (limit - 2) * r) * (1 - power)
        root, known = shared(torch.sqrt(certain.clamp(min=0))), r > 5
        correct, eps = shared(1 / (1 - self.b1**t)), shared(self.eps)

        def scaled(m: Tensor, v: Tensor) -> Tensor:
            factor = root(v) / (v.sqrt() + eps(v))
            return m * correct(m) * torch.where(known.to(v.device), factor, torch.ones_like(v))

        return tree.map(scaled, mu, nu), ScaleByAdamState(state.count + 1, mu, nu)


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

    def update(
        self, updates: Updates, state: ScaleByAdamState, params: Params | None = None
    ) -> tuple[Updates, ScaleByAdamState]:
        eps = shared(self.eps)
        mu = averaged(self.b1, state.mu, updates)
        surprise = squared(tree.map(torch.sub, updates, mu))
        nu = tree.map(lambda v: v + eps(v), averaged(self.b2, state.nu, surprise))
        new = ScaleByAdamState(state.count + 1, mu, nu)
        return bias_corrected(new, self.b1, self.b2, self.eps), new
