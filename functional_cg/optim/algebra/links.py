"""The links from which optimizers are built: scaling, momentum, moments, trust ratio, weight decay.

Every transformation is a frozen dataclass; its state is a NamedTuple. Scalars shared by all leaves are computed
once per step as 0-dim tensors, in float64 where digits would be lost, and cast to a leaf's dtype on use.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_cg import tree
from functional_cg.optim.algebra.arithmetic import averaged, norm, squared, where_selected
from functional_cg.optim.algebra.base import (
    Direction,
    EmptyState,
    GradientTransformation,
    OptState,
    Params,
    Scalar,
    ScalarOrSchedule,
    Stateless,
    Updates,
    freeze,
    full_like_tree,
    in_range,
    need_params,
    rate_at,
    rate_in_range,
    shared,
    zero_count,
)
from functional_cg.optim.algebra.schedules import Schedule

Mask = Any  # None, a prefix tree of bools, or a function of the parameters


@dataclass(frozen=True)
class identity(Stateless):
    """Return the updates unchanged. Source: ``optax.identity``."""

    def update(
        self, updates: Updates, state: OptState, params: Params | None = None
    ) -> tuple[Updates, OptState]:
        return updates, state


@dataclass(frozen=True)
class set_to_zero(Stateless):
    """Replace updates with zeros; use with ``partition`` to freeze parameters. Source: ``optax.set_to_zero``."""

    def update(
        self, updates: Updates, state: OptState, params: Params | None = None
    ) -> tuple[Updates, OptState]:
        return tree.map(torch.zeros_like, updates), state

    @property
    def lacks_rate(self) -> None:
        return None  # zeros need no learning rate


@dataclass(frozen=True)
class scale(Stateless):
    """Multiply by a constant: ``u <- step_size * u``. Source: ``optax.scale``.

    Attributes:
      step_size: Number or f32[]; a negative number counts as a learning rate (see ``masked``).
    """

    step_size: Scalar

    def __post_init__(self) -> None:
        in_range("scale: step_size", self.step_size, low=-math.inf)

    def update(
        self, updates: Updates, state: OptState, params: Params | None = None
    ) -> tuple[Updates, OptState]:
        factor = shared(self.step_size)
        return tree.map(lambda u: u * factor(u), updates), state

    @property
    def applies_learning_rate(self) -> bool:
        return isinstance(self.step_size, (int, float)) and self.step_size < 0

    @property
    def lacks_rate(self) -> GradientTransformation | None:
        return super().lacks_rate if isinstance(self.step_size, (int, float)) else None


class ScaleByScheduleState(NamedTuple):
    """State of :class:`scale_by_schedule`."""

    count: Tensor  # type: ignore[assignment]  # i64[], updates so far


@dataclass(frozen=True)
class scale_by_schedule(GradientTransformation):
    """Multiply by a schedule without flipping the sign: ``u <- schedule(count) * u``.

    The count starts at 0, so the first update uses ``schedule(0)``. Source: ``optax.scale_by_schedule``.

    Attributes:
      schedule: Function of an i64[] count.
    """

    schedule: Any

    def init(self, params: Params) -> ScaleByScheduleState:
        return ScaleByScheduleState(zero_count(params))

    def update(
        self, updates: Updates, state: ScaleByScheduleState, params: Params | None = None
    ) -> tuple[Updates, ScaleByScheduleState]:
        factor = shared(rate_at(self.schedule, state.count))
        return tree.map(lambda u: u * factor(u), updates), ScaleByScheduleState(state.count + 1)

    @property
    def applies_learning_rate(self) -> bool:
        return True

    @property
    def lacks_rate(self) -> GradientTransformation | None:
        """Positive schedules leave the sign to another link."""
        climbs = isinstance(self.schedule, Schedule) and any(self.schedule(t) > 0 for t in (0, 1, 1000))
        return self if climbs else None


@dataclass(frozen=True)
class scale_by_learning_rate(GradientTransformation):
    """Turn a direction into an update: ``u <- -learning_rate * u``. Source: ``optax.scale_by_learning_rate``.

    Attributes:
      learning_rate: Number (a constant of the capture), f32[], or a schedule of the i64[] count.
    """

    learning_rate: ScalarOrSchedule

    def __post_init__(self) -> None:
        rate_in_range("scale_by_learning_rate: learning_rate", self.learning_rate)

    def init(self, params: Params) -> OptState:
        return ScaleByScheduleState(zero_count(params)) if callable(self.learning_rate) else EmptyState()

    def update(
        self, updates: Updates, state: OptState, params: Params | None = None
    ) -> tuple[Updates, OptState]:
        if callable(self.learning_rate):
            rate = rate_at(self.learning_rate, state.count)
            return descend(updates, rate), ScaleByScheduleState(state.count + 1)
        return descend(updates, self.learning_rate), state

    @property
    def descends(self) -> bool:
        return True

    @property
    def applies_learning_rate(self) -> bool:
        return True


def descend(updates: Updates, rate: Scalar) -> Updates:
    """Compute ``-rate * u`` for every leaf."""
    factor = shared(-rate)
    return tree.map(lambda u: u * factor(u), updates)


class TraceState(NamedTuple):
    """State of :class:`trace`."""

    trace: Updates  # decayed sum of the updates so far, like params


@dataclass(frozen=True)
class trace(GradientTransformation):
    """Momentum: ``t <- decay * t + u``; returns ``t``, or ``u + decay * t`` with ``nesterov``.

    Like ``optax.trace``, and ``torch.optim.SGD`` by default, it has no dampening.

    Attributes:
      decay: Number in [0, 1), or f32[].
      nesterov: Look one step ahead.
    """

    decay: Scalar
    nesterov: bool = False

    def __post_init__(self) -> None:
        in_range("trace: decay", self.decay, below=1.0)

    def init(self, params: Params) -> TraceState:
        return TraceState(full_like_tree(params))

    def update(
        self, updates: Updates, state: TraceState, params: Params | None = None
    ) -> tuple[Updates, TraceState]:
        decay = shared(self.decay)
        new = tree.map(lambda u, t: u + decay(t) * t, updates, state.trace)
        out = tree.map(lambda u, t: u + decay(t) * t, updates, new) if self.nesterov else new
        return out, TraceState(new)


class ScaleByAdamState(NamedTuple):
    """State of :class:`scale_by_adam`, :class:`scale_by_yogi` and the optimizers built on them."""

    count: Tensor  # type: ignore[assignment]  # i64[], updates so far
    mu: Updates  # first moment, like params
    nu: Updates  # second moment, like params


def bias_corrected(state: ScaleByAdamState, b1: Scalar, b2: Scalar, eps: Scalar) -> Updates:
    """Compute ``mu_hat / (sqrt(nu_hat) + eps)`` for every leaf; both corrections are f64[], computed once."""
    count = state.count.to(torch.float64)
    mu_scale = shared(1 / (1 - b1**count))
    root_scale = shared(1 / torch.sqrt(1 - b2**count))
    small = shared(eps)
    return tree.map(
        lambda m, v: (m * mu_scale(m)) / (v.sqrt() * root_scale(v) + small(v)), state.mu, state.nu
    )


def check_adam(name: str, b1: object, b2: object, eps: object) -> None:
    """Raise for decay rates outside [0, 1) and for a negative ``eps``."""
    in_range(f"{name}: b1", b1, below=1.0)
    in_range(f"{name}: b2", b2, below=1.0)
    in_range(f"{name}: eps", eps)


@dataclass(frozen=True)
class scale_by_adam(Direction):
    r"""Scale by Adam's bias-corrected moments.

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

    b1: Scalar = 0.9
    b2: Scalar = 0.999
    eps: Scalar = 1e-8
    bias_correction: bool = True

    def __post_init__(self) -> None:
        check_adam("scale_by_adam", self.b1, self.b2, self.eps)

    def init(self, params: Params) -> ScaleByAdamState:
        return ScaleByAdamState(zero_count(params), full_like_tree(params), full_like_tree(params))

    def update(
        self, updates: Updates, state: ScaleByAdamState, params: Params | None = None
    ) -> tuple[Updates, ScaleByAdamState]:
        mu = averaged(self.b1, state.mu, updates)
        nu = averaged(self.b2, state.nu, squared(updates))
        new = ScaleByAdamState(state.count + 1, mu, nu)
        if self.bias_correction:
            return bias_corrected(new, self.b1, self.b2, self.eps), new
        eps = shared(self.eps)
        return tree.map(lambda m, v: m / (v.sqrt() + eps(v)), mu, nu), new


@dataclass(frozen=True)
class scale_by_yogi(Direction):
    r"""Scale by Yogi's moments, the second of which changes by a bounded amount per step.

    Like :class:`scale_by_adam`, but ``nu <- nu - (1 - b2) sign(nu - u^2) u^2``.

    Source: Zaheer et al. 2018; ``optax.scale_by_yogi``, ``torch_optimizer.Yogi``.

    Attributes:
      b1: Decay of the first moment, in [0, 1).
      b2: Decay of the second moment, in [0, 1).
      eps: Added outside the root.
      initial_accumulator_value: Initial value of both moments.
    """

    b1: Scalar = 0.9
    b2: Scalar = 0.999
    eps: Scalar = 1e-3
    initial_accumulator_value: float = 1e-6

    def __post_init__(self) -> None:
        check_adam("scale_by_yogi", self.b1, self.b2, self.eps)
        in_range("scale_by_yogi: initial_accumulator_value", self.initial_accumulator_value)

    def init(self, params: Params) -> ScaleByAdamState:
        start = self.initial_accumulator_value
        return ScaleByAdamState(
            zero_count(params), full_like_tree(params, start), full_like_tree(params, start)
        )

    def update(
        self, updates: Updates, state: ScaleByAdamState, params: Params | None = None
    ) -> tuple[Updates, ScaleByAdamState]:
        rest = shared(1 - self.b2)

        def second(v: Tensor, u: Tensor) -> Tensor:
            square = u * u
            return v - rest(v) * torch.sign(v - square) * square

        mu = averaged(self.b1, state.mu, updates)
        new = ScaleByAdamState(state.count + 1, mu, tree.map(second, state.nu, updates))
        return bias_corrected(new, self.b1, self.b2, self.eps), new


class ScaleByRssState(NamedTuple):
    """State of :class:`scale_by_rss`."""

    sum_of_squares: Updates  # like params


@dataclass(frozen=True)
class scale_by_rss(Direction):
    """Scale by the root of the sum of squared updates: ``s <- s + u^2``, giving ``u / (sqrt(s) + eps)``.

    ``eps`` is outside the root and ``s`` starts at 0, as in ``torch.optim.Adagrad``; ``optax.scale_by_rss`` has it
    inside and starts at 0.1.

    Attributes:
      initial_accumulator_value: Initial value of the sums.
      eps: Added outside the root.
    """

    initial_accumulator_value: float = 0.0
    eps: Scalar = 1e-10

    def __post_init__(self) -> None:
        in_range("scale_by_rss: initial_accumulator_value", self.initial_accumulator_value)
        in_range("scale_by_rss: eps", self.eps)

    def init(self, params: Params) -> ScaleByRssState:
        return ScaleByRssState(full_like_tree(params, self.initial_accumulator_value))

    def update(
        self, updates: Updates, state: ScaleByRssState, params: Params | None = None
    ) -> tuple[Updates, ScaleByRssState]:
        sums = tree.map(lambda s, u: s + u * u, state.sum_of_squares, updates)
        eps = shared(self.eps)
        return tree.map(lambda s, u: u / (s.sqrt() + eps(s)), sums, updates), ScaleByRssState(sums)


@dataclass(frozen=True)
class scale_by_trust_ratio(Direction, Stateless):
    """Scale each leaf by ``|p| / |u|``, or by 1 where either norm is 0.

    Norms are per leaf, in float32 or wider. Source: You et al. 2020; ``optax.scale_by_trust_ratio``.
    """

    def update(
        self, updates: Updates, state: OptState, params: Params | None = None
    ) -> tuple[Updates, OptState]:
        def rescale(u: Tensor, p: Tensor) -> Tensor:
            ours, theirs = norm(p), norm(u)
            ratio = torch.where((ours == 0) | (theirs == 0), torch.ones_like(ours), ours / theirs)
            return u * ratio.to(u.dtype)

        return tree.map(rescale, updates, need_params("scale_by_trust_ratio", params)), state

    acts_per_leaf = True


@dataclass(frozen=True)
class add_decayed_weights(Direction, Stateless):
    """Add a multiple of the parameters: ``u <- u + weight_decay * p`` where ``mask`` is True.

    Before the moments this is L2 regularization; after them, decoupled weight decay. A parameter the loss does not
    use has a zero gradient, so it decays too (``torch.optim`` skips parameters without a gradient).

    Source: ``optax.add_decayed_weights``.

    Attributes:
      weight_decay: Number or f32[].
      mask: None for all leaves, a prefix tree of bools, or a function from the parameters to one.
    """

    weight_decay: Scalar
    mask: Mask = None

    def __post_init__(self) -> None:
        in_range("add_decayed_weights: weight_decay", self.weight_decay)
        object.__setattr__(self, "mask", freeze(self.mask))

    def update(
        self, updates: Updates, state: OptState, params: Params | None = None
    ) -> tuple[Updates, OptState]:
        params = need_params("add_decayed_weights", params)
        rate = shared(self.weight_decay)
        return where_selected(self.mask, lambda u, p: u + rate(p) * p, updates, params), state
