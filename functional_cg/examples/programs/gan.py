"""Trains a GAN, two states in alternating steps: ``python -m functional_cg.examples.programs.gan``.

Generator and critic are states of their own, each with its optimizer. A step updates one and reads the other's
parameters as an input, so either can be stepped more often, saved or forked by itself. The data are points on a ring.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import functional_cg as fcg

NOISE, BATCH = 4, 256


def mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, outputs)
    )


def ring(seed: int) -> Iterator[Tensor]:
    """Draw batches of points, f32[256, 2], endlessly: at a radius of about 1."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        angle = 2 * torch.pi * torch.rand(BATCH, generator=generator)
        radius = 1 + 0.05 * torch.randn(BATCH, generator=generator)
        yield torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)


def build(device: str = "cpu") -> tuple[Any, Any, Any, fcg.TrainState, fcg.TrainState]:
    """Build a step for the critic, one for the generator, the sampling, and the states of generator and critic."""
    torch.manual_seed(0)
    draw, drawing, _ = fcg.from_module(mlp(NOISE, 2).to(device))
    score, scoring, _ = fcg.from_module(mlp(2, 1).to(device))
    adam = fcg.optim.adam(2e-3, b1=0.5)
    generator = fcg.TrainState.create(params=drawing, optimizer=adam, key=fcg.random.key(1))
    critic = fcg.TrainState.create(params=scoring, optimizer=adam, key=fcg.random.key(2))

    def samples(params: Any, key: Tensor) -> Tensor:
        return draw(params, {}, fcg.random.normal(key, (BATCH, NOISE)))[0]  # type: ignore[no-any-return]

    def penalty(params: Any, real: Tensor) -> Any:
        """Compute the mean squared slope of the critic at real points; its gradient is a second derivative."""
        slope = fcg.grad(lambda x: score(params, {}, x)[0].sum())(real)
        return slope.square().sum(-1).mean()

    @fcg.graph_step
    def train_critic(critic: Any, generator: Any, real: Tensor) -> tuple[Any, dict[str, Tensor]]:
        fake = samples(generator, fcg.random.fold_in(critic.key, critic.step))

        def loss_fn(params: Any) -> Any:
            margin = score(params, {}, real)[0] - score(params, {}, fake)[0]
            return F.softplus(-margin).mean() + 0.1 * penalty(params, real)

        loss, grads = fcg.value_and_grad(loss_fn)(critic.params)
        return critic.apply_gradients(grads), {"loss": loss}

    @fcg.graph_step
    def train_generator(generator: Any, critic: Any, real: Tensor) -> tuple[Any, dict[str, Tensor]]:
        key = fcg.random.fold_in(generator.key, generator.step)

        def loss_fn(params: Any) -> Any:
            margin = score(critic, {}, samples(params, key))[0] - score(critic, {}, real)[0]
            return F.softplus(-margin).mean()

        loss, grads = fcg.value_and_grad(loss_fn)(generator.params)
        return generator.apply_gradients(grads), {"loss": loss}

    @fcg.graph_fn
    def generate(params: Any, key: Tensor) -> Tensor:
        return samples(params, key)

    return train_critic, train_generator, generate, generator, critic


def off_the_ring(points: Tensor) -> tuple[float, float]:
    """Compute how far points are from a radius of 1 on average, and how far their mean is from the center."""
    return (points.norm(dim=1) - 1).abs().mean().item(), points.mean(dim=0).norm().item()


def train(steps: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Train, and return samples before and after, f32[256, 2]."""
    train_critic, train_generator, generate, generator, critic = build(device)
    key = fcg.random.key(3, device)
    before = generate(generator.params, key)
    for real in itertools.islice(ring(seed=0), steps):
        critic, _ = train_critic(critic, generator.params, real)
        generator, _ = train_generator(generator, critic.params, real)
    return before, generate(generator.params, key)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for when, points in zip(("before", "after"), train(1000, device), strict=True):
        print("{}: {:.2f} off the radius, mean {:.2f} off the center".format(when, *off_the_ring(points)))


if __name__ == "__main__":
    main()
