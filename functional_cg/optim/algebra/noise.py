"""Adds annealed Gaussian noise to gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from functional_cg import random, tree
from functional_cg.optim.algebra.base import (
    Checked,
    OptState,
    Params,
    Scalar,
    Updates,
    device_of,
    zero_count,
)
from functional_cg.optim.algebra.whole import placed_like


class AddNoiseState(NamedTuple):
    """State of :class:`add_noise`."""

    count: Tensor  # type: ignore[assignment]  # i64[], updates so far
    key: Tensor  # i64[2]


@dataclass(frozen=True)
class add_noise(Checked):
    """Add Gaussian noise of decaying variance: ``u + n``, ``n ~ N(0, eta / (1 + t)^gamma)``, with ``t`` from 0.

    Each update folds its number into the key, and each leaf draws from a separate stream. For a sharded leaf, each
    rank draws the whole and keeps its part, so the noise does not depend on the number of ranks; all ranks need the
    same key.

    Source: Neelakantan et al. 2015, "Adding Gradient Noise Improves Learning for Very Deep Networks";
    ``optax.add_noise``, with other draws.

    State: the count, i64[], and the key, i64[2].

    Attributes:
      eta: Variance of the first noise, number or f32[].
      gamma: Decay exponent of the variance, number or f32[]; 0.55 in the paper.
      key: A key, i64[2], that nothing else draws from, or a seed; stored as a Python int.
    Raises:
      TypeError: If ``key`` is neither a key nor a Python int.
      ValueError: If a number is out of range.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> noise = optim.add_noise(0.01, 0.55, key=0)
      >>> updates, state = noise.update({"w": torch.zeros(1000)}, noise.init({"w": torch.zeros(1000)}))
      >>> round(updates["w"].std().item(), 2)
      0.1
      >>> optim.chain(optim.clip_by_global_norm(1.0), noise, optim.sgd(0.1)).links[1]
      add_noise(eta=0.01, gamma=0.55, key=0)
    """

    eta: Scalar
    gamma: Scalar
    key: Tensor | int

    acts_per_leaf = True

    def init(self, params: Params) -> AddNoiseState:
        assert isinstance(self.key, int)
        return AddNoiseState(zero_count(params), random.key(self.key, device_of(params)))

    def update(
        self, updates: Updates, state: AddNoiseState, params: Params | None = None
    ) -> tuple[Updates, OptState]:
        flat, treedef = tree.flatten(updates)
        key = random.fold_in(state.key, state.count)
        deviation = torch.sqrt(self.eta / (state.count.to(torch.float64) + 1) ** self.gamma)

        def noisy(stream: int, u: Tensor) -> Tensor:
            dtype = torch.promote_types(u.dtype, torch.float32)
            draws = random.normal(key, u.shape, dtype=dtype, stream=stream)
            noise = draws * deviation.to(dtype)
            return (u + placed_like(noise.to(u.device), u)).to(u.dtype)

        out = [noisy(stream, u) for stream, u in enumerate(flat)]
        return tree.unflatten(treedef, out), AddNoiseState(state.count + 1, state.key)
