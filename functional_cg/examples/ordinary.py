"""An ordinary training loop (module, ``torch.optim``, ``backward()``): the baseline for the captured step."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from .text import Batch

__all__ = ["train_ordinary"]

_UNTIMED = 5


def train_ordinary(
    module: nn.Module, stream: Iterator[Batch], steps: int, of_steps: int, peak_lr: float
) -> tuple[list[float], float]:
    """Train a module in place, with the recipe of the GPT example.

    Args:
      module: Returns logits for i64[batch, time].
      stream: Batches on any device.
      steps: Number of steps, more than 5.
      of_steps: Length of the schedule in steps.
      peak_lr: The largest learning rate.
    Returns:
      The losses, and steps per second, not counting the first few.
    """
    device = next(module.parameters()).device
    matrices = [p for p in module.parameters() if p.ndim >= 2]
    others = [p for p in module.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=peak_lr, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _factor(step, of_steps))
    module.train()
    losses, start = [], 0.0
    for i in range(steps):
        if i == _UNTIMED:
            start = time.perf_counter()
        batch = next(stream)
        logits = module(batch["x"].to(device))
        loss = F.cross_entropy(logits.flatten(0, 1), batch["y"].to(device).flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    values = torch.stack(losses).tolist()  # waits for the device
    return values, (steps - _UNTIMED) / (time.perf_counter() - start)


def _factor(step: int, steps: int) -> float:
    """Warm up linearly over a tenth of the steps, then decay by a cosine to a tenth of the peak."""
    warm_up = steps // 10
    if step < warm_up:
        return step / warm_up
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))
