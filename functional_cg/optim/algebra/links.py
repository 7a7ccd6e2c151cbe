"""The links from which optimizers are built: scaling, momentum, moments, trust ratio, weight decay.

Every transformation is a frozen dataclass; its state is a NamedTuple. Scalars shared by all leaves are computed
once per step as 0-dim tensors, in float64 where digits would be lost, and cast to a leaf's dtype on use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_cg import tree
from functional_cg.optim.algebra.arithmetic import norm
from functional_cg.optim.algebra.base import (
    Checked,
    Direction,
    EmptyState,
    Link,
    OptState,
    Params,
    Scalar,
    ScalarOrSchedule,
    Shared,
    Updates,
    rate_at,
    zero_count,
)
from functional_cg.optim.algebra.schedules import Schedule

Mask = Any  # None, a prefix tree of bools, or a function of the parameters


@dataclass(frozen=True)
class identity(Link):
    """Return the updates unchanged. Source: ``optax.identity``."""

    def leaf(self, n: Any, u: Tensor, p: Any) -> Tensor:
        return u


@dataclass(frozen=True)
class set_to_zero(Link):
    """Replace updates with zeros; use with ``partition`` to freeze parameters. Source: ``optax.set_to_zero``."""

    role = "trusted"

    def leaf(self, n: Any, u: Tensor, p: Any) -> Tensor:
        return torch.zeros_like(u)


@dataclass(frozen=True)
class scale(Link):
    """Multiply by a constant: ``u <- step_size * u``. Source: ``optax.scale``.

    Attributes:
      step_size: Number or f32[]; a negative number counts as a learning rate (see ``masked``).
    """

    step_size: Scalar

    def leaf(self, n: Any, u: Tensor, p: Any) -> Tensor:
        return u * n.step_size(u)  # type: ignore[no-any-return]

    @property
    def role(self) -> str:  # type: ignore[override]
        if isinstance(self.step_size, Tensor):
            return "trusted"
        return "step" if self.step_size < 0 else "neutral"


class ScaleByScheduleState(NamedTuple):
    """State of :class:`scale_by_schedule`."""

    count: Tensor  # type: ignore[assignment]  # i64[], updates so far


@dataclass(frozen=True)
class scale_by_schedule(Link):
    """Multiply by a schedule without flipping the sign: ``u <- schedule(count) * u``.

    The count starts at 0, so the first update uses ``schedule(0)``. Source: ``optax.scale_by_schedule``.

    Attributes:
      schedule: Function of an i64[] count.
    """

    schedule: Any

    keeps = ScaleByScheduleState

    def begin(self, state: ScaleByScheduleState) -> tuple[Any, dict[str, Scalar]]:
        return ScaleByScheduleState(state.count + 1), {"factor": rate_at(self.schedule, state.count)}

    def leaf(self, n: Any, u: Tensor, p: Any) -> Tensor:
        return u * n.factor(u)  # type: ignore[no-any-return]

    @property
    def role(self) -> str:  # type: ignore[override]
        """Positive schedules leave the sign to another link."""
        if not isinstance(self.schedule, Schedule):
            return "step"
        return "step" if all(self.schedule(t) <= 0 for t in (0, 1, 1000)) else "factor"


@dataclass(frozen=True)
class scale_by_learning_rate(Checked):
    """Turn a direction into an update: ``u <- -learning_rate * u``. Source: ``optax.scale_by_learning_rate``.

    Attributes:
      learning_rate: Number (a constant of the capture), f32[], or a schedule of the i64[] count.
    """

    learning_rate: ScalarOrSchedule

    role = "rate"

    def init(self, params: Params) -> OptState:
        return ScaleByScheduleState(zero_count(params)) if callable(self.learning_rate) else EmptyState()

    def update(
        self, updates: Updates, state: OptState, params: Params | None = None
    ) -> tuple[Updates, OptState]:
        rate, state = self.rate(state)
        return descend(updates, rate), state

    def rate(self, state: OptState) -> tuple[float | Tensor, OptState]:
        """The learning rate of this update, and the next state."""
        if callable(self.learning_rate):
            return rate_at(self.learning_rate, state.count), ScaleByScheduleState(state.count + 1)
        return rate_at(self.learning_rate, None), state


def descend(updates: Updates, rate: Scalar) -> Updates:
    """Compute ``-rate * u`` for every leaf."""
    factor = Shared(-rate)
    return tree.map(lambda u: u * factor(u), updates)


class TraceState(NamedTuple):
    """State of :class:`trace`."""

    trace: Updates  # decayed sum of the updates so far, like params


@dataclass(frozen=True)
class trace(Link):
    """Momentum: ``t <- decay * t + u``; returns ``t``, or ``u + decay * t`` with ``nesterov``.

    Like ``optax.trace``, and ``torch.optim.SGD`` by default, it has no dampening.

    Attributes:
      decay: Number in [0, 1), or f32[].
      nesterov: Look one step ahead.
    """

    decay: Scalar
    nesterov: bool = False

    keeps = TraceState

    def leaf(self, n: Any, u: Tensor, p: Any, t: Tensor) -> tuple[Tensor, Tensor]:
        t = u + n.decay(t) * t
        return (u + n.decay(t) * t if self.nesterov else t), t


@dataclass(frozen=True)
class scale_by_trust_ratio(Direction):
    """Scale each leaf by ``|p| / |u|``, or by 1 where either norm is 0.

    Norms are per leaf, in float32 or wider. Source: You et al. 2020; ``optax.scale_by_trust_ratio``.
    """

    needs_params = True
    acts_per_leaf = True

    def leaf(self, n: Any, u: Tensor, p: Tensor) -> Tensor:
        ours, theirs = norm(p), norm(u)
        ratio = torch.where((ours == 0) | (theirs == 0), torch.ones_like(ours), ours / theirs)
        return u * ratio.to(u.dtype)


@dataclass(frozen=True)
class add_decayed_weights(Direction):
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

    needs_params = True

    def leaf(self, n: Any, u: Tensor, p: Tensor) -> Tensor:
        return u + n.weight_decay(p) * p  # type: ignore[no-any-return]
