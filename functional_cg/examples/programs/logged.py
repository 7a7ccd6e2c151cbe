"""Logs a run without waiting for the device: ``python -m functional_cg.examples.programs.logged``.

``fcg.tap`` keeps the last values on the device; every hundred steps they are read at once. A writer is any object with
``log(name, value, step)``. ``TensorBoard`` below adapts ``torch.utils.tensorboard`` (``pip install tensorboard``); for
wandb, call ``run.log({name: value}, step=step)`` in the same place.
"""

from __future__ import annotations

import importlib.util
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

import functional_cg as fcg

EVERY = 100

State = fcg.TrainState[dict[str, Tensor]]


class Writer(Protocol):
    def log(self, name: str, value: float, step: int) -> None: ...


class Printer:
    """Prints a value every hundred."""

    def log(self, name: str, value: float, step: int) -> None:
        if step % EVERY == 0:
            print(f"step {step:4} {name:>12} {value:.4f}")


class TensorBoard:
    """Writes to a folder that ``tensorboard --logdir FOLDER`` shows."""

    def __init__(self, folder: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(folder)

    def log(self, name: str, value: float, step: int) -> None:
        self._writer.add_scalar(name, value, step)


def create_state(device: str = "cpu") -> State:
    key = fcg.random.key(0, device)
    params = {
        "w1": fcg.random.normal(key, (2, 64), std=1.0),
        "b1": torch.zeros(64, device=device),
        "w2": fcg.random.normal(key, (64,), std=0.1, stream=1),
    }
    return fcg.TrainState.create(params=params, optimizer=fcg.optim.adam(1e-2))


@fcg.graph_step
def train_step(state: State, x: Tensor) -> tuple[State, dict[str, Tensor]]:
    def loss_fn(params: dict[str, Tensor]) -> Tensor:
        hidden = torch.tanh(x @ params["w1"] + params["b1"])
        fcg.tap("saturated", (hidden.abs() > 0.97).float().mean(), keep=EVERY)
        return F.mse_loss(hidden @ params["w2"], x.prod(dim=1))

    loss, grads = fcg.value_and_grad(loss_fn)(state.params)
    fcg.tap("loss", loss, keep=EVERY)
    fcg.tap("grad_norm", fcg.optim.global_norm(grads), keep=EVERY)
    return state.apply_gradients(grads), {}


def flush(writer: Writer, done: int, new: int) -> None:
    """Write the last ``new`` values of each tap; ``done`` steps were taken before them."""
    for name, values in train_step.taps.items():
        for step, value in enumerate(
            values[-new:].tolist(), start=done + 1
        ):  # the one wait in a hundred steps
            writer.log(name, value, step)


def train(steps: int, writer: Writer, device: str = "cpu") -> State:
    state, generator, written = create_state(device), torch.Generator().manual_seed(0), 0
    for step in range(1, steps + 1):
        state, _ = train_step(state, torch.rand(256, 2, generator=generator))
        if step % EVERY == 0 or step == steps:
            flush(writer, written, step - written)
            written = step
    return state


def main() -> None:
    board = importlib.util.find_spec("tensorboard") is not None
    writer: Writer = TensorBoard("runs/logged") if board else Printer()
    train(500, writer, "cuda" if torch.cuda.is_available() else "cpu")


if __name__ == "__main__":
    main()
