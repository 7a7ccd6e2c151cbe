"""Trains on sequences of many lengths: ``python -m functional_cg.examples.programs.lengths``.

``fcg.bucket`` pads each batch to the next of a few sizes, with one capture per size. The mask keeps padding out of the
loss, so it is that of the sequences alone. The task: tell whether a sequence has more ones than twos.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import functional_cg as fcg

SIZES = (16, 32, 64)

Batch = dict[str, Tensor]


def sequences(count: int, seed: int) -> list[Tensor]:
    """Draw sequences of ones, twos and threes, of 4 to 64 elements."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (
        torch.randint(4, 65, (count,), generator=generator).sort().values
    )  # neighbours are of like length
    return [torch.randint(1, 4, (int(n),), generator=generator) for n in lengths]


def collate(rows: list[Tensor]) -> Batch:
    """Pad rows to the longest of them; ``mask`` marks their elements, which ``fcg.bucket`` goes on padding."""
    labels = torch.tensor([bool((row == 1).sum() > (row == 2).sum()) for row in rows]).float()
    tokens = pad_sequence(rows, batch_first=True)
    return {"tokens": tokens, "mask": tokens > 0, "label": labels}


def loader(rows: list[Tensor], seed: int) -> DataLoader[Any]:
    """Batches of 32 neighbours in random order."""
    order = torch.randperm(len(rows) // 32, generator=torch.Generator().manual_seed(seed))
    chunks = torch.arange(len(rows) // 32 * 32).view(-1, 32)[order].tolist()
    return DataLoader(rows, batch_sampler=chunks, collate_fn=collate)  # type: ignore[arg-type]


class Votes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(4, 16), nn.Linear(16, 1)
        self.mix = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, tokens: Tensor, mask: Tensor) -> Any:
        hidden = self.mix(self.embedding(tokens), src_key_padding_mask=~mask)
        return (self.out(hidden).squeeze(-1) * mask).sum(dim=1)


def build(device: str = "cpu") -> tuple[Any, fcg.TrainState]:
    torch.manual_seed(0)
    apply, params, buffers = fcg.from_module(Votes().to(device))
    state = fcg.TrainState.create(params=params, buffers=buffers, optimizer=fcg.optim.adam(3e-3))

    @fcg.graph_step(max_captures=len(SIZES))
    def train_step(state: Any, batch: Batch) -> tuple[Any, dict[str, Tensor]]:
        def loss_fn(params: Any) -> tuple[Tensor, Tensor]:
            logits, _ = apply(params, state.buffers, batch["tokens"], batch["mask"])
            right = (logits > 0) == (batch["label"] > 0.5)
            return F.binary_cross_entropy_with_logits(logits, batch["label"]), right.float().mean()

        (loss, accuracy), grads = fcg.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads), {"loss": loss, "accuracy": accuracy}

    return train_step, state


def train(epochs: int, device: str = "cpu") -> list[float]:
    """Train; return the mean accuracy of each epoch."""
    train_step, state = build(device)
    rows, accuracies = sequences(1600, seed=0), []
    for epoch in range(epochs):
        batches, found = fcg.bucket(loader(rows, seed=epoch), sizes=SIZES), []
        for batch in fcg.prefetch(batches, train_step):
            state, metrics = train_step(state, batch)
            found.append(metrics["accuracy"])
        accuracies.append(float(torch.stack(found).mean()))
        print(
            f"epoch {epoch}: accuracy {accuracies[-1]:.1%}, {batches.waste:.0%} of the elements are padding"
        )
    print(f"{train_step.stats.captures} captures:", *train_step.explain().splitlines()[1:4], sep="\n")
    return accuracies


if __name__ == "__main__":
    train(epochs=8, device="cuda" if torch.cuda.is_available() else "cpu")
