"""Learns a potential from energies and forces: ``python -m functional_cg.examples.programs.force_matching``.

Forces are minus the gradient of the energy with respect to the positions. They stand in the loss, so its gradient with
respect to the parameters is a second derivative: ``fcg.grad`` inside of ``fcg.value_and_grad``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import functional_cg as fcg

ATOMS, BATCH = 6, 32


class Potential(nn.Module):
    """A sum over pairs of atoms of a function of their distance."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.Sequential(
            nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1)
        )
        self.centers = nn.Buffer(torch.linspace(0.6, 3.0, 16))

    def forward(self, positions: Tensor) -> Tensor:
        """Return the energies of configurations of shape (batch, atoms, 3), f32[batch]."""
        distance = distances(positions)
        near: Tensor = self.pair((-8 * (distance[..., None] - self.centers) ** 2).exp())
        return near.sum(dim=(1, 2))


def distances(positions: Tensor) -> Any:
    """Distances of all pairs, f32[batch, pairs]."""
    first, second = torch.triu_indices(ATOMS, ATOMS, offset=1, device=positions.device)
    return (positions[:, first] - positions[:, second]).norm(dim=-1)


def morse(positions: Tensor) -> Any:
    """The energy to learn, f32[batch]."""
    return ((1 - (1 - distances(positions)).exp()) ** 2 - 1).sum(dim=1)


def configurations(count: int, draw: torch.Generator) -> dict[str, Tensor]:
    """Positions around a ring, with their energies and forces."""
    angle = torch.arange(ATOMS) * 2 * torch.pi / ATOMS
    ring = torch.stack([angle.cos(), angle.sin(), torch.zeros(ATOMS)], dim=1)
    x = (ring + 0.1 * torch.randn(count, ATOMS, 3, generator=draw)).requires_grad_()
    energy = morse(x)
    (slope,) = torch.autograd.grad(energy.sum(), x)
    return {"x": x.detach(), "energy": energy.detach(), "force": -slope}


def build(steps: int, device: str = "cpu") -> tuple[Any, Any]:
    """Make the step and the state."""
    apply, params, buffers = fcg.from_module(Potential().to(device))
    optimizer = fcg.optim.adam(fcg.optim.warmup_cosine(3e-3, 20, steps))
    state = fcg.TrainState.create(params=params, buffers=buffers, optimizer=optimizer)

    @fcg.graph_step
    def train_step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            def energies(x: Tensor) -> Any:
                energy, _ = apply(params, state.buffers, x)
                return energy.sum(), energy

            (_, energy), slope = fcg.value_and_grad(energies, has_aux=True)(batch["x"])
            of_energy = (energy - batch["energy"]).square().mean()
            of_force = (-slope - batch["force"]).square().mean()
            return 0.01 * of_energy + of_force, {"energy": of_energy.sqrt(), "force": of_force.sqrt()}

        (_, errors), grads = fcg.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads), errors

    return train_step, state


def train(steps: int = 600, device: str = "cpu") -> list[float]:
    """Train, and return the errors of the forces, per component."""
    train_step, state = build(steps, device)
    draw = torch.Generator().manual_seed(0)
    errors = []
    for step in range(steps):
        state, error = train_step(state, configurations(BATCH, draw))
        errors.append(float(error["force"]))
        if step % 100 == 99:
            print(
                f"step {step}: force ±{sum(errors[-100:]) / 100:.3f}, energy ±{float(error['energy']):.3f} by now"
            )
    return errors


if __name__ == "__main__":
    train(device="cuda" if torch.cuda.is_available() else "cpu")
