"""Learns a potential from energies and forces: ``python -m functional_cg.examples.programs.force_matching``.

A force is the negative gradient of the energy at a position, so a loss of forces takes second derivatives: ``fcg.grad``
inside of ``fcg.value_and_grad``. The atoms of the data attract and repel each other by a Morse potential.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import functional_cg as fcg

ATOMS, CENTERS = 5, 24

Params = dict[str, Tensor]
Batch = dict[str, Tensor]


def pairs(positions: Tensor) -> Any:
    """Compute the distances between atoms, f32[batch, pairs], from f32[batch, atoms, 3]."""
    first, second = torch.triu_indices(ATOMS, ATOMS, offset=1, device=positions.device)
    return (positions[:, first] - positions[:, second]).norm(dim=-1)


def morse(positions: Tensor) -> Tensor:
    """The potential to be learned: energies, f32[batch]."""
    return ((1 - torch.exp(-1.5 * (pairs(positions) - 1.5))) ** 2 - 1).sum(-1)


def molecules(count: int, seed: int) -> Batch:
    """Draw positions around a fixed shape, with their energies and forces."""
    shape = 1.3 * torch.randn(ATOMS, 3, generator=torch.Generator().manual_seed(1))
    noise = torch.randn(count, ATOMS, 3, generator=torch.Generator().manual_seed(seed))
    x = shape + 0.1 * noise
    return {"x": x, "energy": morse(x), "forces": -fcg.grad(lambda x: morse(x).sum())(x)}


def create_state(device: str = "cpu", steps: int = 500) -> fcg.TrainState[Params]:
    first, second = fcg.random.split(fcg.random.key(0, device), 2)
    params = {
        "w1": fcg.random.normal(first, (CENTERS, 64), std=CENTERS**-0.5),
        "b1": torch.zeros(64, device=device),
        "w2": fcg.random.normal(second, (64,), std=0.1),
        "shift": torch.zeros((), device=device),
    }
    optimizer = fcg.optim.adam(fcg.optim.warmup_cosine(1e-2, steps // 10, steps))
    return fcg.TrainState.create(params=params, optimizer=optimizer)


def energy(params: Params, x: Tensor) -> Tensor:
    """The model: energies, f32[batch], the sum over pairs of a function of their distance."""
    centers = torch.linspace(0.3, 5.0, CENTERS, device=x.device)
    bumps = torch.exp(-8 * (pairs(x)[..., None] - centers) ** 2)
    return (F.silu(bumps @ params["w1"] + params["b1"]) @ params["w2"]).sum(-1) + params["shift"]


def predict(params: Params, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return energies, f32[batch], and forces, f32[batch, atoms, 3]."""

    def total(x: Tensor) -> tuple[Tensor, Tensor]:
        energies = energy(params, x)
        return energies.sum(), energies

    (_, energies), slope = fcg.value_and_grad(total, has_aux=True)(x)
    return energies, -slope


@fcg.graph_step
def train_step(
    state: fcg.TrainState[Params], batch: Batch
) -> tuple[fcg.TrainState[Params], dict[str, Tensor]]:
    def loss_fn(params: Params) -> Tensor:
        energies, forces = predict(params, batch["x"])
        return F.mse_loss(forces, batch["forces"]) + 0.1 * F.mse_loss(energies, batch["energy"])

    loss, grads = fcg.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads), {"loss": loss}


@fcg.graph_fn
def force_error(params: Params, batch: Batch) -> Tensor:
    return (predict(params, batch["x"])[1] - batch["forces"]).abs().mean()


def train(steps: int, device: str = "cpu") -> tuple[float, float]:
    """Train; return the mean error of held-out forces before and after."""
    state, held_out = create_state(device, steps), molecules(256, seed=2**20)
    before = float(force_error(state.params, held_out))
    for step in range(steps):
        state, _ = train_step(state, molecules(32, seed=step))
    return before, float(force_error(state.params, held_out))


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print("error of a force: {:.3f} at first, {:.3f} in the end".format(*train(500, device)))


if __name__ == "__main__":
    main()
