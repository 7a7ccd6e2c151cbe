"""Dynamic loss scaling as part of the state."""

from __future__ import annotations

from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from .. import tree as pytree
from ..manual import Documented

__all__ = ["LossScale"]

T = TypeVar("T")


@pytree.register_dataclass
@dataclass(frozen=True)
class LossScale(metaclass=Documented):
    """A dynamic loss scale for float16: shrinks when gradients overflow, grows after a run of finite steps.

    It keeps small gradients from underflowing. Micikevicius et al. 2018, Mixed Precision Training; same rule as
    ``torch.amp.GradScaler``, but on the device, without a host sync. bfloat16 does not need it.

    Attributes:
      scale: f32[], the factor.
      good: i32[], number of finite steps since the last change.
      growth_interval: Number of finite steps after which the scale grows.
      factor: Factor by which it grows and shrinks, above 1; a power of two scales without rounding.
    Methods:
      create: Make a scale; 65536 by default.
      scaled: The loss times the scale.
      unscaled: Gradients divided by it.
      adjusted: The scale for the next step, from whether all gradients were finite.

    Example:
      A step that skips the update, and counts no step, when a gradient is not finite:

      >>> import torch, functional_cg as fcg
      >>> class State(fcg.TrainState):
      ...     loss_scale: fcg.LossScale
      >>> @fcg.graph_step
      ... def train_step(state, x):
      ...     def loss_fn(params):
      ...         loss = (x.half() * params["w"].half()).float().sum()
      ...         return state.loss_scale.scaled(loss)
      ...     loss, grads = fcg.value_and_grad(loss_fn)(state.params)
      ...     grads = state.loss_scale.unscaled(grads)
      ...     finite = fcg.optim.global_norm(grads).isfinite()
      ...     new = fcg.cond(finite, lambda: state.apply_gradients(grads), lambda: state)
      ...     return new.replace(loss_scale=state.loss_scale.adjusted(finite)), {"skipped": ~finite}
      >>> state = State.create(
      ...     params={"w": torch.ones(2)}, optimizer=fcg.optim.sgd(0.1), loss_scale=fcg.LossScale.create(2.0**15)
      ... )
      >>> state, metrics = train_step(state, torch.full((2,), 3.0))  # 3 * 2**15 is more than float16 holds
      >>> bool(metrics["skipped"]), float(state.loss_scale.scale), int(state.step)
      (True, 16384.0, 0)
    """

    scale: Tensor
    good: Tensor
    growth_interval: int = pytree.static(default=2000)
    factor: float = pytree.static(default=2.0)

    @classmethod
    def create(
        cls,
        initial: float = 2.0**16,
        *,
        growth_interval: int = 2000,
        factor: float = 2.0,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Make an initial loss scale.

        Raises:
          ValueError: If ``initial`` is not positive, ``growth_interval`` is not a positive integer, ``factor`` is not
            above 1, or ``initial`` or ``factor`` is not finite in float32.
        """
        largest = torch.finfo(torch.float32).max
        for name, value, allowed, right, usual in (
            ("initial", initial, isinstance(initial, Real) and 0 < initial <= largest, "a number > 0", "2.0**16"),
            ("growth_interval", growth_interval, isinstance(growth_interval, int) and growth_interval >= 1,
             "an int >= 1", "2000"),
            ("factor", factor, isinstance(factor, Real) and 1 < factor <= largest, "a number > 1", "2.0"),
        ):  # fmt: skip
            if not allowed:
                raise ValueError(
                    f"LossScale: {name} must be {right}, got {value!r}.\nTo fix: leave it out, or `{name}={usual}`."
                )
        return cls(
            torch.tensor(float(initial), dtype=torch.float32, device=device),
            torch.tensor(0, dtype=torch.int32, device=device),
            growth_interval,
            float(factor),
        )

    def scaled(self, tree: T) -> T:
        """Multiply floating leaves, such as the loss, by the scale, keeping their dtypes."""
        return self._times(tree, self.scale)

    def unscaled(self, tree: T) -> T:
        """Divide floating leaves, such as gradients, by the scale, keeping their dtypes.

        Cast float16 gradients to float32 first: otherwise what the scale kept from underflowing would underflow here.
        Gradients of float32 parameters already are float32.
        """
        return self._times(tree, 1 / self.scale)

    def _times(self, tree: T, factor: Tensor) -> T:
        def times(leaf: Any) -> Any:
            floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
            return leaf * factor.to(leaf.dtype) if floating else leaf

        return pytree.map(times, tree)  # type: ignore[no-any-return]

    def adjusted(self, finite: Tensor) -> Self:
        """Compute the scale for the next step.

        Args:
          finite: bool[], whether all gradients of this step were finite.
        Raises:
          TypeError: If ``finite`` is not a bool[].
        """
        if not isinstance(finite, Tensor) or finite.dtype != torch.bool or finite.dim():
            got = f"{finite.dtype} {list(finite.shape)}" if isinstance(finite, Tensor) else repr(finite)
            raise TypeError(
                f"LossScale.adjusted: expected `finite` as a tensor of dtype bool and shape [], got {got}. To fix: "
                "`fcg.optim.global_norm(grads).isfinite()`."
            )
        grows = self.good + 1 >= self.growth_interval
        grown = torch.where(grows, self.scale * self.factor, self.scale)
        grown = torch.where(grown.isfinite(), grown, self.scale)
        scale = torch.where(finite, grown, self.scale / self.factor)
        good = torch.where(finite & ~grows, self.good + 1, 0)
        return replace(self, scale=scale, good=good.to(self.good.dtype))
