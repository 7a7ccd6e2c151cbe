"""Logs a run without waiting for the device: ``python -m functional_cg.examples.programs.logged``.

``fcg.tap("loss", loss, keep=50)`` keeps the last 50 losses on the device, from any depth of the step; the loop fetches
them once in 50 calls. The writer is TensorBoard's where it is installed. For wandb, pass ``wandb.log`` in its place:
``lambda name, value, step: wandb.log({name: value}, step=step)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import functional_cg as fcg

EVERY = 50

Log = Callable[[str, float, int], None]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 64), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.inner(x))
        fcg.tap("saturated", (hidden.abs() > 0.99).float().mean(), keep=EVERY)
        return self.outer(hidden)[:, 0]


def build(device: str = "cpu") -> tuple[Any, Any]:
    """Make the step and the state."""
    apply, params, buffers = fcg.from_module(Net().to(device))
    optimizer = fcg.optim.adam(fcg.optim.warmup_cosine(1e-2, 20, 500))
    state = fcg.TrainState.create(params=params, buffers=buffers, optimizer=optimizer)

    @fcg.graph_step
    def train_step(state: Any, x: Tensor) -> Any:
        def loss_fn(params: Any) -> Tensor:
            out, _ = apply(params, state.buffers, x)
            return F.mse_loss(out, (3 * x).sin().sum(dim=1))

        loss, grads = fcg.value_and_grad(loss_fn)(state.params)
        fcg.tap("loss", loss, keep=EVERY)
        fcg.tap("norm of the gradient", fcg.optim.global_norm(grads), keep=EVERY)
        return state.apply_gradients(grads), {}

    return train_step, state


def train(log: Log, steps: int = 500, device: str = "cpu") -> None:
    """Train, and log each step's values, fetched once in 50 steps."""
    train_step, state = build(device)
    draw = torch.Generator().manual_seed(0)
    for step in range(1, steps + 1):
        state, _ = train_step(state, 2 * torch.rand(128, 4, generator=draw) - 1)
        if step % EVERY == 0:
            for name, values in train_step.taps.items():
                for ago, value in enumerate(reversed(values.tolist())):  # one wait for 50 steps
                    log(name, value, step - ago)


def to_the_screen(name: str, value: float, step: int) -> None:
    if step % EVERY == 0:
        print(f"step {step}: {name} {value:.4f}")


def writer() -> Log:
    """Return TensorBoard's writer, or one to the screen where that is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return to_the_screen
    return SummaryWriter().add_scalar


if __name__ == "__main__":
    train(writer(), device="cuda" if torch.cuda.is_available() else "cpu")
