"""Trains an image classifier: ``python -m functional_cg.examples.programs.image_classifier run.safetensors``.

A module with BatchNorm, a ``DataLoader`` and its short last batch, evaluation, early stopping, a learning rate lowered
in mid-run, and a checkpoint after each epoch: the same command resumes an interrupted run.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import functional_cg as fcg

EPOCHS, BATCH, PATIENCE = 30, 64, 4

Batch = tuple[Tensor, Tensor, Tensor]  # images, labels, and which of them are no padding


class State(fcg.TrainState):
    best: Tensor  # the highest accuracy so far
    epoch: Tensor  # epochs done
    stale: Tensor  # epochs since the best


def stripes(count: int, seed: int) -> TensorDataset:
    """Draw images, f32[count, 1, 16, 16], of noisy stripes in one of four directions, and the directions."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (count,), generator=generator)
    angle = (labels * torch.pi / 4)[:, None, None]
    x, y = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="xy")
    phase = 6 * torch.rand(count, 1, 1, generator=generator)
    clean = torch.sin(angle.cos() * x + angle.sin() * y + phase)
    return TensorDataset((clean + 2 * torch.randn(count, 16, 16, generator=generator))[:, None], labels)


def model() -> nn.Module:
    def block(inputs: int, outputs: int) -> nn.Module:
        conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2))

    return nn.Sequential(block(1, 16), block(16, 32), nn.Flatten(), nn.Dropout(0.2), nn.Linear(512, 4))


def build(device: str = "cpu") -> tuple[Any, Any, State]:
    """Build the training step, the evaluation and the initial state."""
    torch.manual_seed(0)
    apply, params, buffers = fcg.from_module(model().to(device))
    optimizer = fcg.optim.inject_hyperparams(fcg.optim.adamw)(learning_rate=2e-3, weight_decay=0.01)
    state = State.create(
        params=params,
        buffers=buffers,
        optimizer=optimizer,
        key=fcg.random.key(1),
        best=torch.tensor(0.0, device=device),
        epoch=torch.tensor(0, device=device),
        stale=torch.tensor(0, device=device),
    )

    @fcg.graph_step
    def train_step(state: State, batch: list[Tensor]) -> tuple[State, dict[str, Tensor]]:
        images, labels = batch

        def loss_fn(params: Any) -> tuple[Tensor, Any]:
            key = fcg.random.fold_in(state.key, state.step)
            logits, buffers = apply(params, state.buffers, images, key=key)
            return F.cross_entropy(logits, labels), buffers

        (loss, buffers), grads = fcg.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads, buffers=buffers), {"loss": loss}

    @fcg.graph_fn
    def count_right(state: State, batch: Batch) -> Any:
        images, labels, mask = batch
        logits, _ = apply(state.params, state.buffers, images, train=False)
        return ((logits.argmax(-1) == labels) & mask).sum()

    return train_step, count_right, state


def train(path: Path, epochs: int = EPOCHS, device: str = "cpu") -> State:
    """Train until the accuracy no longer rises, saving to ``path``; resume if the file is there."""
    train_step, count_right, state = build(device)
    training, held_out = stripes(2000, seed=0), stripes(500, seed=1)
    # A padded row would count in BatchNorm's statistics, so training drops the short last batch; evaluation pads it.
    evaluation = fcg.bucket(DataLoader(held_out, BATCH), sizes=[BATCH], dim=0)
    if path.exists():
        state = fcg.load(path, state)
    for epoch in range(int(state.epoch), epochs):
        if int(state.stale) >= PATIENCE:
            print("stopped early")
            break
        shuffle = torch.Generator().manual_seed(epoch)  # so a resumed run sees the batches of an unbroken one
        loader = DataLoader(training, BATCH, shuffle=True, drop_last=True, generator=shuffle)
        for batch in fcg.prefetch(loader, train_step):
            state, metrics = train_step(state, batch)
        accuracy = sum(int(count_right(state, batch)) for batch in evaluation) / len(held_out)
        print(f"epoch {epoch}: loss {float(metrics['loss']):.3f}, held-out accuracy {accuracy:.1%}")
        stale = 0 if accuracy > float(state.best) else int(state.stale) + 1
        state = state.replace(best=max(accuracy, float(state.best)), epoch=epoch + 1, stale=stale)
        if stale == PATIENCE // 2:
            state = fcg.optim.set_hyperparams(state, learning_rate=2e-4)
        fcg.save(path, state)
    return state


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train(Path(sys.argv[1] if len(sys.argv) > 1 else "image_classifier.safetensors"), device=device)


if __name__ == "__main__":
    main()
