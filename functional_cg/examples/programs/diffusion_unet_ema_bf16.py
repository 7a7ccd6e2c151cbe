"""Trains a diffusion model of small images: ``python -m functional_cg.examples.programs.diffusion_unet_ema_bf16``.

A U-Net trains in bfloat16 with float32 parameters and noise drawn in the step; samples use the parameters' EMA.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import functional_cg as fcg

Params = dict[str, Tensor]


class State(fcg.TrainState[Params]):
    key: Tensor
    ema: Params


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(8, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time, self.skip = nn.Linear(64, outputs), nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, time: Tensor) -> Any:
        hidden = self.conv1(F.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(hidden)))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU())
        self.enter, self.leave = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 1, 3, padding=1)
        self.down, self.middle, self.up = Block(16, 16), Block(16, 32), Block(48, 16)

    def forward(self, x: Tensor, time: Tensor) -> Any:
        angles = time[:, None] * torch.arange(1, 9, device=x.device) * math.pi
        time = self.time(torch.cat([angles.sin(), angles.cos()], dim=1))
        high = self.down(self.enter(x), time)
        low = F.interpolate(self.middle(F.avg_pool2d(high, 2), time), scale_factor=2.0)
        return self.leave(F.silu(self.up(torch.cat([high, low], dim=1), time)))


def discs(count: int, seed: int) -> Tensor:
    """Draw images, f32[count, 1, 16, 16] in [-1, 1]: a soft disc of random place and size."""
    x, y, radius = torch.rand(3, count, 1, 1, generator=torch.Generator().manual_seed(seed))
    grid = torch.arange(16) - 3.5
    return torch.tanh(2 + 2 * radius - torch.hypot(grid - 8 * x, grid[:, None] - 8 * y))[:, None]


def build(steps: int, device: str = "cpu") -> tuple[Any, Any, State]:
    """Build the training step, the sampling step and the initial state."""
    torch.manual_seed(0)
    apply, params, buffers = fcg.from_module(UNet().to(device))
    optimizer = fcg.optim.adamw(fcg.optim.warmup_cosine(4e-3, steps // 10, steps), weight_decay=0.01)
    ema = fcg.tree.map(torch.clone, params)
    state = State.create(params=params, optimizer=optimizer, key=fcg.random.key(1), ema=ema)

    def predict(params: Params, noisy: Tensor, time: Tensor) -> Any:
        with torch.autocast(noisy.device.type, dtype=torch.bfloat16):
            return apply(params, buffers, noisy, time)[0].float()

    @fcg.graph_step
    def train_step(state: State, images: Tensor) -> tuple[State, dict[str, Tensor]]:
        key = fcg.random.fold_in(state.key, state.step)
        time, noise = fcg.random.uniform(key, (len(images),)), fcg.random.normal(key, images.shape, stream=1)
        angle = time.view(-1, 1, 1, 1) * math.pi / 2
        noisy = angle.cos() * images + angle.sin() * noise
        velocity = angle.cos() * noise - angle.sin() * images

        def loss_fn(params: Params) -> Tensor:
            return F.mse_loss(predict(params, noisy, time), velocity)

        loss, grads = fcg.value_and_grad(loss_fn)(state.params)
        state = state.apply_gradients(grads)
        ema = fcg.tree.map(lambda old, new: old.lerp(new, 0.03), state.ema, state.params)
        return state.replace(ema=ema), {"loss": loss}

    @fcg.graph_fn
    def denoise(ema: Params, noisy: Tensor, time: Tensor, earlier: Tensor) -> Any:
        turn = (time - earlier) * math.pi / 2
        return turn.cos() * noisy - turn.sin() * predict(ema, noisy, time.expand(len(noisy)))

    return train_step, denoise, state


def train(steps: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Train, and return losses, f32[steps], and samples, f32[64, 1, 16, 16]."""
    train_step, denoise, state = build(steps, device)
    losses = []
    for step in range(steps):
        state, metrics = train_step(state, discs(32, seed=step))
        losses.append(metrics["loss"])
    images = fcg.random.normal(fcg.random.key(2, device), (64, 1, 16, 16))
    for i in range(25, 0, -1):
        images = denoise(state.ema, images, i / 25, (i - 1) / 25)
    return torch.stack(losses), images


def distance(images: Tensor) -> float:
    """Compute the mean RMS distance between each image and the nearest of 4000 discs."""
    return torch.cdist(images.cpu().flatten(1), discs(4000, 2**32).flatten(1)).amin(1).mean().item() / 16


if __name__ == "__main__":
    losses, samples = train(steps=200)
    print(f"loss {losses[0]:.2f} at first, {losses[-10:].mean():.2f} in the end")
    print(f"to the nearest disc: {distance(torch.randn(64, 1, 16, 16)):.2f} from noise,", end=" ")
    print(f"{distance(samples):.2f} from samples")
