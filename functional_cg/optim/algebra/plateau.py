"""A factor for the learning rate that falls when a loss has stopped falling, as part of the state."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from functional_cg import tree
from functional_cg.manual import Documented
from functional_cg.optim.algebra.arguments import are_numbers, in_range, require


@tree.register_dataclass
@dataclass(frozen=True)
class ReduceOnPlateau(metaclass=Documented):
    """A factor for the learning rate that falls when a loss has stopped falling; on the device, without a host sync.

    A field of the state, updated by the step with its loss, or between steps with that of an evaluation. A loss is
    better if it is below ``best - rtol * |best| - atol``, so that ``best`` never rises.

    Source: ``optax.contrib.reduce_on_plateau`` and ``torch.optim.lr_scheduler.ReduceLROnPlateau``, whose bound
    ``best * (1 - rtol)`` lies above a negative ``best``; torch waits for one loss more.

    Attributes:
      scale: f64[], the factor; 1 at first.
      best: f64[], the lowest loss that was better than the one before.
      bad: i64[], losses since then, or since the last reduction.
      wait: i64[], losses to go until they count again.
      factor: By which the scale is multiplied, in (0, 1).
      patience: After so many losses that are not better, at least 1.
      rtol: See above, in [0, 1).
      atol: See above, not negative.
      cooldown: How many losses do not count after a reduction.
      min_scale: The scale falls no further, in [0, 1).
    Methods:
      create: Make one.
      adjusted: The next one, from a loss.

    Example:
      >>> import torch, functional_cg as fcg
      >>> class State(fcg.TrainState):
      ...     plateau: fcg.optim.ReduceOnPlateau
      >>> @fcg.graph_step
      ... def train_step(state, x):
      ...     loss, grads = fcg.value_and_grad(lambda p: (p["w"] - x).abs().sum())(state.params)
      ...     plateau = state.plateau.adjusted(loss)
      ...     state = fcg.optim.set_hyperparams(state, learning_rate=plateau.scale)
      ...     return state.apply_gradients(grads, plateau=plateau), {"loss": loss}
      >>> state = State.create(
      ...     params={"w": torch.zeros(1)},
      ...     optimizer=fcg.optim.inject_hyperparams(fcg.optim.sgd)(learning_rate=1.0),
      ...     plateau=fcg.optim.ReduceOnPlateau.create(factor=0.5, patience=1),
      ... )
      >>> losses = []
      >>> for _ in range(5):
      ...     state, metrics = train_step(state, torch.tensor([2.5]))
      ...     losses.append(float(metrics["loss"]))
      >>> losses, float(state.plateau.scale)
      ([2.5, 1.5, 0.5, 0.5, 0.0], 0.5)
    """

    scale: Tensor
    best: Tensor
    bad: Tensor
    wait: Tensor
    factor: float = tree.static(default=0.1)
    patience: int = tree.static(default=10)
    rtol: float = tree.static(default=1e-4)
    atol: float = tree.static(default=0.0)
    cooldown: int = tree.static(default=0)
    min_scale: float = tree.static(default=0.0)

    def __post_init__(self) -> None:
        are_numbers("ReduceOnPlateau", **vars(self))
        in_range("ReduceOnPlateau: factor", self.factor, below=1.0, zero=False)
        in_range("ReduceOnPlateau: patience", self.patience, low=1.0, count=True)
        in_range("ReduceOnPlateau: rtol", self.rtol, below=1.0)
        in_range("ReduceOnPlateau: atol", self.atol)
        in_range("ReduceOnPlateau: cooldown", self.cooldown, count=True)
        in_range("ReduceOnPlateau: min_scale", self.min_scale, below=1.0)

    @classmethod
    def create(cls, *, device: torch.device | str = "cpu", **numbers: float) -> Self:
        """Make one, on the device of the state.

        Args:
          device: Of the state.
          numbers: ``factor``, ``patience``, ``rtol``, ``atol``, ``cooldown``, ``min_scale``.
        Raises:
          ValueError: If a number is out of range.
        """
        scale, best = torch.tensor([1.0, float("inf")], dtype=torch.float64, device=device)
        bad, wait = torch.zeros(2, dtype=torch.int64, device=device)
        return cls(scale.clone(), best.clone(), bad.clone(), wait.clone(), **numbers)  # type: ignore[arg-type]

    def adjusted(self, loss: Any) -> Self:
        """Compute the next one from a loss, a number or a 0-dim tensor; on a mesh, the same on all ranks.

        Raises:
          ValueError: If the loss has dimensions.
        """
        shape = list(getattr(loss, "shape", ()))
        require(
            not shape,
            f"ReduceOnPlateau: a loss is a number or a 0-dim tensor, got the shape {shape}.\n"
            "To fix: `plateau.adjusted(loss.mean())`.",
        )
        loss = loss * torch.ones_like(self.best)
        # By the sign, since infinity, the first best, less infinity is NaN.
        better = loss < self.best * (1 - self.rtol * self.best.sign()) - self.atol
        bad = torch.where(better | (self.wait > 0), 0, self.bad + 1)
        due = bad >= self.patience
        return replace(
            self,
            scale=torch.where(due, (self.scale * self.factor).clamp(min=self.min_scale), self.scale),
            best=torch.where(better, loss, self.best),
            bad=torch.where(due, 0, bad),
            wait=torch.where(due, self.cooldown, (self.wait - 1).clamp(min=0)),
        )
