"""What all learners in jax share: nets, gradients, updates and averages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Jax", "Step", "numbers"]

Step = Callable[[Any, Any], tuple[Any, Any]]


def numbers(tree: Any) -> Any:
    """Copy tensors of a dict of dicts to numpy, with jax's integers."""
    if isinstance(tree, Tensor):
        return (tree.to(torch.int32) if tree.dtype == torch.int64 else tree).numpy().copy()
    return {name: numbers(value) for name, value in tree.items()}


class Jax:
    """Functions made of the modules ``jax`` and ``optax``, which are imported where they are there.

    Args:
      jax: The module.
      optax: The module.
    """

    def __init__(self, jax: Any, optax: Any) -> None:
        self.jax, self.optax, self.np = jax, optax, jax.numpy
        self.grad = jax.value_and_grad

    def mlp(self, p: Any, x: Any, act: Any = None) -> Any:
        """Run an MLP; see :func:`.nets.mlp`."""
        h, act = x, act or self.jax.nn.relu
        for i in range(len(p) // 2):
            h = h if i == 0 else act(h)
            h = h @ self.np.swapaxes(p[f"w{i}"], -1, -2) + p[f"b{i}"]
        return h

    def updated(self, optimizer: Any, params: Any, opt: Any, grads: Any) -> Any:
        """Apply gradients; return parameters and the optimizer's state."""
        updates, opt = optimizer.update(grads, opt, params)
        return self.optax.apply_updates(params, updates), opt

    def average(self, old: Any, new: Any, tau: float) -> Any:
        """Move a target towards its net."""
        return self.jax.tree.map(lambda before, now: before + tau * (now - before), old, new)
