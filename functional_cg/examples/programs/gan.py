"""Two networks against each other: ``python -m functional_cg.examples.programs.gan``.

A generator learns to place points on a ring; a discriminator, the judge, learns to tell them from real ones. Each has
its state and its optimizer, and one step updates both: the state of a step may be any tree, here a dict of two. The
judge's loss holds a gradient penalty (Mescheder et al. 2018), a second derivative.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import functional_cg as fcg

BATCH, NOISE = 256, 4


def mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, outputs)
    )


def ring(count: int, draw: torch.Generator) -> Tensor:
    """Points near the unit circle, f32[count, 2]."""
    angle = 2 * torch.pi * torch.rand(count, generator=draw)
    points = torch.stack([angle.cos(), angle.sin()], dim=1)
    return points + 0.05 * torch.randn(count, 2, generator=draw)


def build(device: str = "cpu") -> tuple[Any, Any, Any]:
    """Make the step of both networks, a sampler, and the states."""
    generate, of_generator, _ = fcg.from_module(mlp(NOISE, 2).to(device))
    judge, of_judge, _ = fcg.from_module(mlp(2, 1).to(device))
    adam = fcg.optim.adam(2e-3, b1=0.0)
    states = fcg.place(
        {
            "generator": fcg.TrainState.create(params=of_generator, optimizer=adam, key=fcg.random.key(0)),
            "judge": fcg.TrainState.create(params=of_judge, optimizer=adam),
        }
    )

    def fakes(params: Any, key: Tensor) -> Any:
        return generate(params, {}, fcg.random.normal(key, (BATCH, NOISE)))[0]

    def verdict(params: Any, points: Tensor) -> Any:
        return judge(params, {}, points)[0][:, 0]

    @fcg.graph_step
    def train_step(states: Any, real: Tensor) -> Any:
        generator, judged = states["generator"], states["judge"]
        one, another = fcg.random.split(fcg.random.fold_in(generator.key, generator.step))
        fake = fakes(generator.params, one)

        def judge_loss(params: Any) -> Any:
            slope = fcg.grad(lambda points: verdict(params, points).sum())(real)
            penalty = slope.square().sum(dim=1).mean()
            return (
                F.softplus(-verdict(params, real)).mean()
                + F.softplus(verdict(params, fake)).mean()
                + 0.1 * penalty
            )

        loss, grads = fcg.value_and_grad(judge_loss)(judged.params)
        judged = judged.apply_gradients(grads)

        def generator_loss(params: Any) -> Any:
            return F.softplus(-verdict(judged.params, fakes(params, another))).mean()

        gloss, grads = fcg.value_and_grad(generator_loss)(generator.params)
        states = {"generator": generator.apply_gradients(grads), "judge": judged}
        return states, {"judge": loss, "generator": gloss}

    @fcg.graph_fn
    def sample(states: Any, number: int) -> Any:
        return fakes(states["generator"].params, fcg.random.fold_in(fcg.random.key(1), number))

    return train_step, sample, states


def train(steps: int = 2000, device: str = "cpu") -> Tensor:
    """Train, and return samples, f32[256, 2]."""
    train_step, sample, states = build(device)
    draw = torch.Generator().manual_seed(0)
    for step in range(steps):
        states, metrics = train_step(states, ring(BATCH, draw))
        if step % 500 == 0:
            print(
                f"step {step}: judge {float(metrics['judge']):.3f}, generator {float(metrics['generator']):.3f}"
            )
    points: Tensor = sample(states, 0).cpu()
    radius = points.norm(dim=1)
    print(f"radius of the samples: {float(radius.mean()):.2f} ± {float(radius.std()):.2f}")
    return points


if __name__ == "__main__":
    train(device="cuda" if torch.cuda.is_available() else "cpu")
