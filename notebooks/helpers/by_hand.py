"""An ordinary training loop on a small task, which the second notebook captures by hand."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Usual", "flat", "losses_of_accumulation", "new_model", "noisy_sine"]

MICRO_BATCHES = 4


def noisy_sine(count: int, batch_size: int) -> tuple[Tensor, Tensor]:
    """Make batches of points: x, y, each f32[count, batch_size, 1].

    Example:
      >>> from notebooks.helpers.by_hand import noisy_sine
      >>> x, y = noisy_sine(100, 32)
      >>> x.shape
      torch.Size([100, 32, 1])
    """
    generator = torch.Generator().manual_seed(0)
    x = 4 * torch.rand(count, batch_size, 1, generator=generator) - 2
    return x, (2 * x).sin() + 0.1 * torch.randn(count, batch_size, 1, generator=generator)


def new_model() -> nn.Module:
    """Make a network with one hidden layer, with the same weights at each call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))


def flat(model: nn.Module) -> Tensor:
    """Copy all parameters of a module into one vector, sorted by name."""
    return torch.cat([value.detach().flatten() for _, value in sorted(model.named_parameters())])


class Usual:
    """A model, its optimizer and an ordinary loop body.

    Attributes:
      model: A module, trained in place.
      sgd: Its optimizer.
    """

    def __init__(self, lr: float = 0.1, *, reduction: str = "mean", **zero_grad: Any) -> None:
        self.model = new_model()
        self.sgd = torch.optim.SGD(self.model.parameters(), lr=lr)
        self._reduction = reduction
        self._zero_grad = zero_grad

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.model(x), y, reduction=self._reduction)

    def train(self, x: Tensor, y: Tensor) -> Tensor:
        """Take one step, and return the loss."""
        self.sgd.zero_grad()
        loss = self.loss(x, y)
        loss.backward()
        self.sgd.step()
        return loss.detach()

    def backward(self, x: Tensor, y: Tensor) -> Tensor:
        """Accumulate the gradients of one of four micro-batches, and return its loss."""
        loss = self.loss(x, y)
        (loss / MICRO_BATCHES).backward()
        return loss.detach()

    def update(self) -> None:
        """Take one step with the accumulated gradients, then call ``zero_grad``."""
        self.sgd.step()
        self.sgd.zero_grad(**self._zero_grad)

    def gradient(self) -> Tensor:
        """Return all gradients in one vector."""
        return torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None])


def losses_of_accumulation(add: Any, update: Any, x: Tensor, y: Tensor) -> Tensor:
    """Run four epochs, with an update after every four batches.

    Args:
      add: ``add(x, y)`` adds the gradients of a batch and returns its loss.
      update: ``update()`` changes the parameters.
      x: f32[count, batch, 1].
      y: f32[count, batch, 1].
    Returns:
      Mean loss of the batches of each update.
    """
    losses = []
    for call in range(4 * len(x)):
        losses.append(float(add(x[call % len(x)], y[call % len(x)])))
        if call % MICRO_BATCHES == MICRO_BATCHES - 1:
            update()
    return torch.tensor(losses).view(-1, MICRO_BATCHES).mean(1)
