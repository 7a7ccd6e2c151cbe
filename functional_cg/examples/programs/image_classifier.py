"""Trains a convolutional net until it stops improving: ``python -m functional_cg.examples.programs.image_classifier``.

The commonest job: a module with batch norm and dropout, a ``DataLoader`` whose last batch is short, evaluation after
each epoch, a checkpoint of the best model so far, a learning rate that drops on a plateau, and early stopping. Started
again, it resumes from ``classifier.safetensors``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import functional_cg as fcg

BATCH, PATIENCE = 64, 3


class State(fcg.TrainState[dict[str, Tensor]]):
    best: Tensor  # accuracy of the checkpoint, f32[]; saved with it


def stripes(count: int, seed: int) -> Dataset[Any]:
    """Images of noisy stripes, f32[count, 1, 12, 12]; the class, 0 to 3, is their direction."""
    draw = torch.Generator().manual_seed(seed)
    label = torch.randint(4, (count,), generator=draw)
    angle = (label * torch.pi / 4)[:, None, None]
    y, x = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")
    phase = 6 * torch.rand(count, 1, 1, generator=draw)
    image = torch.sin(1.5 * (x * angle.cos() + y * angle.sin()) + phase)
    noise = torch.randn(count, 12, 12, generator=draw)
    return TensorDataset((image + 1.5 * noise)[:, None], label)


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(16 * 36, 4),
    )


def build(device: str = "cpu") -> tuple[Any, Any, State]:
    """Make the two steps and the state."""
    apply, params, buffers = fcg.from_module(net().to(device))
    adamw = fcg.optim.inject_hyperparams(fcg.optim.adamw)(learning_rate=3e-3, weight_decay=0.01)
    state = State.create(
        params=params, buffers=buffers, optimizer=adamw, key=fcg.random.key(0), best=torch.zeros(())
    )

    @fcg.graph_step
    def train_step(state: State, batch: Any) -> Any:
        image, label = batch

        def loss_fn(params: Any) -> Any:
            key = fcg.random.fold_in(state.key, state.step)
            logits, buffers = apply(params, state.buffers, image, key=key)
            return F.cross_entropy(logits, label), buffers

        (loss, buffers), grads = fcg.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads, buffers=buffers), {"loss": loss}

    @fcg.graph_fn
    def count_right(state: State, batch: Any, real: Tensor) -> Any:
        image, label = batch
        logits, _ = apply(state.params, state.buffers, image, train=False)
        return ((logits.argmax(dim=1) == label) & real).sum()

    return train_step, count_right, state


def train(folder: Path, epochs: int = 20, device: str = "cpu") -> tuple[State, list[float]]:
    """Train, and return the best state with the accuracy after each epoch."""
    train_step, count_right, state = build(device)
    path = folder / "classifier.safetensors"
    if path.exists():
        state = fcg.load(path, state)
        print(f"resumed at step {int(state.step)}, accuracy {float(state.best):.3f}")
    shuffle = torch.Generator().manual_seed(int(state.step))
    loader = DataLoader(stripes(1000, seed=0), BATCH, shuffle=True, drop_last=True, generator=shuffle)
    # The last batch of an evaluation is padded to a full one, and a mask leaves its padding out.
    test = DataLoader(stripes(500, seed=1), BATCH)
    accuracies: list[float] = []
    since_best = 0
    for epoch in range(epochs):
        for batch in fcg.prefetch(loader, train_step):
            state, metrics = train_step(state, batch)
        right = sum(
            int(count_right(state, batch, real)) for batch, real in fcg.bucket(test, sizes=[BATCH], axis=0)
        )
        accuracies.append(right / 500)
        print(f"epoch {epoch}: loss {float(metrics['loss']):.3f}, accuracy {accuracies[-1]:.3f}")
        if accuracies[-1] > state.best:
            state, since_best = state.replace(best=torch.tensor(accuracies[-1])), 0
            fcg.save(path, state)
            continue
        since_best += 1
        if since_best == PATIENCE:
            break
        state = fcg.optim.set_hyperparams(state, learning_rate=3e-3 / 3**since_best)
    return fcg.load(path, state), accuracies


if __name__ == "__main__":
    train(Path(), device="cuda" if torch.cuda.is_available() else "cpu")
