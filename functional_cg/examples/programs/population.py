"""Trains 64 networks in one graph: ``python -m functional_cg.examples.programs.population``.

A small network learns to tell two spirals apart. Each member has its own seed and its own rate. After every round, the
worst quarter starts again from copies of the best, at rates near theirs: population-based training (Jaderberg et al.
2017, https://arxiv.org/abs/1711.09846).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import functional_cg as fcg

from .exploration import spirals

Params = dict[str, Tensor]
State = fcg.TrainState[Params]
Batch = dict[str, Tensor]


def create_member(seed: int, device: str = "cpu") -> State:
    first, second, third = fcg.random.split(fcg.random.key(seed, device), 3)
    params = {
        "w1": fcg.random.normal(first, (2, 64), std=3.0),
        "w2": fcg.random.normal(second, (64, 64), std=0.125),
        "w3": fcg.random.normal(third, (64,), std=0.125),
    }
    optimizer = fcg.optim.inject_hyperparams(fcg.optim.adam)(learning_rate=1e-3)
    return fcg.TrainState.create(params=params, optimizer=optimizer)


def create_state(rates: Tensor, device: str = "cpu") -> State:
    """Create as many members as there are rates, with one state for all of them."""
    state = fcg.tree.stack([create_member(seed, device) for seed in range(len(rates))])
    return fcg.optim.set_hyperparams(state, learning_rate=rates)


def loss_fn(params: Params, batch: Batch) -> Tensor:
    hidden = torch.tanh(batch["x"] @ params["w1"])
    logits = torch.relu(hidden @ params["w2"]) @ params["w3"]
    return F.binary_cross_entropy_with_logits(logits, batch["y"])


@fcg.graph_step
@fcg.sweep
def train_step(state: State, batch: Batch) -> tuple[State, dict[str, Tensor]]:
    """Train one member, which knows nothing of the others."""
    loss, grads = fcg.value_and_grad(loss_fn)(state.params, batch)
    return state.apply_gradients(grads), {"loss": loss}


@fcg.graph_fn
@fcg.sweep
def evaluate(state: State, batch: Batch) -> Tensor:
    return loss_fn(state.params, batch)


def moved(state: State, rates: Tensor, losses: Tensor, generator: torch.Generator) -> tuple[State, Tensor]:
    """Replace the worst quarter by copies of the best one, whose rates go up or down by a fifth."""
    order, quarter = losses.nan_to_num(torch.inf).argsort(), len(losses) // 4
    chosen = torch.arange(len(losses))
    chosen[order[-quarter:]] = order[:quarter]
    rates = rates[chosen]
    up = torch.rand(quarter, generator=generator) < 0.5
    rates[order[-quarter:]] *= torch.where(up, 1.2, 0.8)
    return fcg.optim.set_hyperparams(fcg.tree.take(state, chosen), learning_rate=rates), rates


def train(
    members: int = 64, rounds: int = 6, steps: int = 100, device: str = "cpu"
) -> tuple[list[Tensor], State]:
    """Train a population.

    Returns:
      Held-out losses f32[members] before the first round and after each, and the state of the best member.
    """
    generator, batches, held_out = torch.Generator().manual_seed(0), spirals(seed=0), next(spirals(1, 2000))
    rates = torch.logspace(-4, 0, members)
    state = create_state(rates, device)
    losses = [evaluate(state, held_out).cpu()]
    for number in range(1, rounds + 1):
        if number > 1:
            state, rates = moved(state, rates, losses[-1], generator)
        for _ in range(steps):
            state, _ = train_step(state, next(batches))
        losses.append(evaluate(state, held_out).cpu())
        best = int(losses[-1].nan_to_num(torch.inf).argmin())
        low, median = losses[-1].nanquantile(torch.tensor([0.0, 0.5]))
        print(f"round {number}: best {low:.4f} at a rate of {rates[best]:.1e}, median {median:.4f}")
    return losses, fcg.tree.take(state, int(losses[-1].nan_to_num(torch.inf).argmin()))


if __name__ == "__main__":
    train(device="cuda" if torch.cuda.is_available() else "cpu")
