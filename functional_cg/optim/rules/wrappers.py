"""Wrappers: ``lookahead``, ``ema`` and ``schedule_free`` around an optimizer, ``sam`` around a gradient."""

# Annotations are values here, not strings: dataclasses of other modules inherit the fields.
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_cg import tree
from functional_cg.optim.algebra.base import (
    GradientTransformation,
    OptState,
    Params,
    Rule,
    Scalar,
    ScalarOrSchedule,
    Shared,
    Stepper,
    Updates,
    in_range,
    need_params,
    need_steps,
    rate_at,
    require,
    step_or_update,
    zero_count,
)
from functional_cg.optim.algebra.fitting import in_dtypes_of
from functional_cg.optim.rules.gradients import global_norm

from ...tensors.parts import as_complex, as_real


def interpolated(weight: Scalar, a: Params, b: Params) -> Params:
    """Interpolate every leaf: ``a + weight (b - a)``."""
    factor = Shared(weight)
    return tree.map(lambda x, y: x + factor(x) * (y - x), a, b)


@dataclass(frozen=True)
class Around(Stepper):
    """An optimizer that computes new parameters with the help of ``inner``.

    Attributes:
      inner: The optimizer inside.
    """

    inner: GradientTransformation

    def __post_init__(self) -> None:
        need_steps(type(self).__name__, self.inner)
        super().__post_init__()

    def rules(self, state: Any, params: Params) -> Iterator[Rule]:
        yield self, state._replace(inner_state=None), params
        yield from self.inner.rules(state.inner_state, params)


class LookaheadState(NamedTuple):
    """State of :class:`lookahead`."""

    count: Tensor  # type: ignore[assignment]  # i64[], updates so far
    slow: Params  # slow parameters, like params
    inner_state: OptState


@dataclass(frozen=True)
class lookahead(Around):
    """Pull back toward slow weights every few steps: ``slow <- slow + slow_step_size (p - slow)``, ``p <- slow``.

    In between, ``inner`` runs unchanged. Every ``inner`` gets a ``step``, which runs its fused op if it has one.

    State: count i64[]; slow parameters like params; that of ``inner``.

    Source: Zhang et al. 2019; ``optax.lookahead``. ``torch_optimizer.Lookahead`` initializes its slow parameters after
    the first step.

    Attributes:
      inner: The optimizer that makes the fast steps.
      sync_period: Fast steps per slow step, at least 1.
      slow_step_size: In [0, 1]; 1 gives plain ``inner``.
    Raises:
      ValueError: If a number is out of range.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> optimizer = optim.lookahead(optim.sgd(1.0), sync_period=2, slow_step_size=0.5)
      >>> params, grads = {"w": torch.tensor([4.0])}, {"w": torch.tensor([1.0])}
      >>> params, state = optimizer.step(grads, optimizer.init(params), params)
      >>> params, state = optimizer.step(grads, state, params)
      >>> params  # 4 to 2 by two steps, and half of the way back
      {'w': tensor([3.])}
    """

    sync_period: int = 6
    slow_step_size: Scalar = 0.5

    def __post_init__(self) -> None:
        require(
            isinstance(self.sync_period, int) and self.sync_period >= 1,
            f"lookahead: sync_period must be a positive int, got {self.sync_period!r}",
        )
        super().__post_init__()
        require(
            isinstance(self.slow_step_size, Tensor) or self.slow_step_size <= 1,
            f"lookahead: slow_step_size must be in [0, 1], got {self.slow_step_size!r}",
        )

    def init(self, params: Params) -> LookaheadState:
        return LookaheadState(zero_count(params), tree.map(torch.clone, params), self.inner.init(params))

    def update(
        self, updates: Updates, state: LookaheadState, params: Params | None = None
    ) -> tuple[Updates, LookaheadState]:
        params = need_params("lookahead", params)
        updates, inner_state = self.inner.update(updates, state.inner_state, params)
        new, state = self._synced(tree.map(torch.add, params, updates), state, inner_state)
        return tree.map(torch.sub, new, params), state

    def advance(self, grads: Updates, state: LookaheadState, params: Params) -> tuple[Params, LookaheadState]:
        fast, inner_state = step_or_update(self.inner, grads, state.inner_state, params)
        return self._synced(fast, state, inner_state)

    def _synced(
        self, fast: Params, state: LookaheadState, inner_state: OptState
    ) -> tuple[Params, LookaheadState]:
        count = state.count + 1
        due = Shared(count % self.sync_period == 0)
        ahead = interpolated(self.slow_step_size, state.slow, fast)
        slow, new = (
            tree.map(lambda yes, no: torch.where(due(yes), yes, no), ahead, others)
            for others in (state.slow, fast)
        )
        return new, LookaheadState(count, slow, inner_state)


class EmaState(NamedTuple):
    """State of :class:`ema`."""

    ema: Params  # the average, like params, in f32 or wider
    inner_state: OptState


@dataclass(frozen=True)
class ema(Around):
    """Keep an exponential moving average of the parameters: ``ema <- decay * ema + (1 - decay) * p``.

    ``inner`` runs unchanged, with its fused op if it has one. The average begins at the parameters, is float32 or
    wider, and is sharded as the moments are. It is ``state.opt_state.ema``, a tree like ``state.params``: evaluate it,
    ``apply(state.opt_state.ema, state.buffers, x)``, or load it from a run,
    ``fcg.load("run", model, part="opt_state.ema")``. The average of a complex parameter has its real and imaginary
    parts side by side in the last axis.

    State: the average, like params; that of ``inner``.

    Source: Polyak and Juditsky 1992; ``torch.optim.swa_utils.AveragedModel`` with ``get_ema_multi_avg_fn``.
    ``optax.ema`` averages gradients.

    Attributes:
      inner: The optimizer, with all that belongs to it: ``ema(chain(clip, adamw), 0.999)``.
      decay: In [0, 1): how much of the average stays.
    Raises:
      ValueError: If a number is out of range.

    Example:
      >>> import torch, functional_cg as fcg
      >>> optimizer = fcg.optim.ema(fcg.optim.sgd(1.0), decay=0.5)
      >>> state = fcg.TrainState.create(params={"w": torch.tensor([4.0])}, optimizer=optimizer)
      >>> step = fcg.graph_step(lambda state, grad: (state.apply_gradients({"w": grad}), {}))
      >>> state, _ = step(state, torch.tensor([2.0]))
      >>> fcg.snapshot(state.params), fcg.snapshot(state.opt_state.ema)
      ({'w': tensor([2.])}, {'w': tensor([3.])})
    """

    decay: Scalar = 0.999

    def init(self, params: Params) -> EmaState:
        average = tree.map(lambda p: p.to(torch.promote_types(p.dtype, torch.float32), copy=True), params)
        return EmaState(average, self.inner.init(params))

    def advance(self, grads: Updates, state: EmaState, params: Params) -> tuple[Params, EmaState]:
        new, inner_state = step_or_update(self.inner, grads, state.inner_state, params)
        return new, EmaState(interpolated(1 - self.decay, state.ema, new), inner_state)


class ScheduleFreeState(NamedTuple):
    """State of :class:`schedule_free`."""

    count: Tensor  # type: ignore[assignment]  # i64[], updates so far
    largest: Tensor  # f64[], the largest rate so far
    total: Tensor  # f64[], sum of the weights so far
    z: Params  # the iterate of `inner`, like params
    inner_state: OptState


@dataclass(frozen=True)
class schedule_free(Around):
    """Average the iterates of ``inner`` instead of decaying its rate: no need to know when training ends.

    With ``z`` the iterate of ``inner``, ``x`` its average and ``y = (1 - b1) z + b1 x`` the parameters in the state,
    where gradients are computed: ``z <- z + inner(gradient at y)``, ``x <- (1 - c) x + c z``, with ``c = w / (sum of w
    so far)`` and ``w`` the largest rate so far to the power ``weight_lr_power``. Evaluate at ``x``: see
    :meth:`eval_params`. Use an ``inner`` without momentum: ``sgd(lr)``, or ``scale_by_rms`` and a rate. Its weight
    decay acts at ``y``.

    State: count i64[]; largest and total f64[]; z like params; that of ``inner``.

    Source: Defazio et al. 2024, "The Road Less Scheduled"; ``optax.contrib.schedule_free``.

    Attributes:
      inner: The optimizer, with a constant rate or a warmup.
      learning_rate: The schedule of ``inner`` if it has one; any number means a constant rate.
      b1: In (0, 1): how close to the average gradients are computed.
      weight_lr_power: Nonnegative; 0 weights all steps equally.
    Raises:
      ValueError: If a number is out of range.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> optimizer = optim.schedule_free(optim.sgd(1.0), b1=0.5)
      >>> params, grads = {"w": torch.tensor([4.0])}, {"w": torch.tensor([1.0])}
      >>> params, state = optimizer.step(grads, optimizer.init(params), params)
      >>> params, state = optimizer.step(grads, state, params)
      >>> params, optimizer.eval_params(state, params)  # z is 2, after 3
      ({'w': tensor([2.2500])}, {'w': tensor([2.5000])})
    """

    learning_rate: ScalarOrSchedule = 1.0
    b1: Scalar = 0.9
    weight_lr_power: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(isinstance(self.b1, Tensor) or self.b1, "schedule_free: b1 is 0")

    def init(self, params: Params) -> ScheduleFreeState:
        count = zero_count(params)
        largest, total = (torch.zeros((), dtype=torch.float64, device=count.device) for _ in range(2))
        z = tree.map(torch.clone, params)
        return ScheduleFreeState(count, largest, total, z, self.inner.init(params))

    def eval_params(self, state: ScheduleFreeState, params: Params) -> Params:
        """The average ``x``, at which to evaluate the model: ``(y - (1 - b1) z) / b1``.

        Args:
          state: The state of this optimizer, ``state.opt_state``.
          params: The parameters that go with it.
        """
        average = interpolated(1 / self.b1, state.z, tree.map(as_real, params))
        return tree.map(as_complex, average, params)

    def advance(
        self, grads: Updates, state: ScheduleFreeState, params: Params
    ) -> tuple[Params, ScheduleFreeState]:
        updates, inner_state = self.inner.update(in_dtypes_of(params, grads), state.inner_state, params)
        z = tree.map(torch.add, state.z, updates)
        largest = state.largest.clamp(min=rate_at(self.learning_rate, state.count))
        weight = largest**self.weight_lr_power
        total = state.total + weight
        part = torch.where(total > 0, weight / total, torch.zeros_like(total))
        x = interpolated(part, self.eval_params(state, params), z)
        y = interpolated(self.b1, z, x)
        return y, ScheduleFreeState(state.count + 1, largest, total, z, inner_state)


def sam(
    value_and_grad: Callable[..., tuple[Any, Updates]], rho: Scalar = 0.05, *, adaptive: bool = False
) -> Callable[..., tuple[Any, Updates]]:
    """Compute sharpness-aware gradients: those at ``p + rho g / |g|``, where the loss near ``p`` is highest.

    ``g`` is the gradient at ``p`` and ``|g|`` its norm over all leaves. With ``adaptive``, the neighborhood scales with
    the parameters: ``p + rho p^2 g / |p g|``. Each call computes two gradients; pass the result to any optimizer.

    Source: Foret et al. 2021; Kwon et al. 2021 for ``adaptive``; ``optax.contrib.sam``.

    Args:
      value_and_grad: ``(params, *args) -> (value, grads)``, as returned by :func:`functional_cg.value_and_grad`; called
        twice with the same arguments.
      rho: Radius of the neighborhood, positive number or f32[].
      adaptive: Scale the neighborhood by the parameters.
    Returns:
      A function with the same arguments that returns the value at ``p`` and the gradients at the perturbed point.
    Raises:
      ValueError: If ``rho`` is negative.

    Example:
      >>> import torch, functional_cg as fcg
      >>> grads_of = fcg.optim.sam(fcg.value_and_grad(lambda p: (p["w"] ** 2).sum()), rho=0.5)
      >>> grads_of({"w": torch.tensor([3.0, 4.0])})
      (tensor(25.), {'w': tensor([6.6000, 8.8000])})
    """
    in_range("sam: rho", rho)

    def nearby(params: Params, *args: Any, **kwargs: Any) -> tuple[Any, Updates]:
        value, grads = value_and_grad(params, *args, **kwargs)
        scaled = tree.map(lambda g, p: g * p.abs(), grads, params) if adaptive else grads
        factor = Shared(rho / (global_norm(scaled) + 1e-12))
        uphill = tree.map(lambda g, p: g * p.abs(), scaled, params) if adaptive else scaled
        _, grads = value_and_grad(tree.map(lambda p, g: p + factor(p) * g, params, uphill), *args, **kwargs)
        return value, grads

    return nearby
