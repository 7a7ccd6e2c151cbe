"""What draws: annealed Gaussian noise, and training of low-precision parameters by stochastic rounding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from functional_cg import random, tree
from functional_cg.optim.algebra.arithmetic import placed_like
from functional_cg.optim.algebra.base import (
    Checked,
    OptState,
    Params,
    Scalar,
    Updates,
    apply_updates,
    device_of,
    need_params,
    zero_count,
)
from functional_cg.optim.algebra.fitting import in_dtypes_of
from functional_cg.optim.rules.wrappers import Around
from functional_cg.precision import stochastic_round


class StochasticRoundingState(NamedTuple):
    """State of :class:`stochastic_rounding`."""

    count: Tensor  # type: ignore[assignment]  # i64[], updates so far
    key: Tensor  # i64[2]
    inner_state: OptState  # in float32


@dataclass(frozen=True)
class stochastic_rounding(Around):
    """Round new parameters stochastically, so that tiny steps count: bfloat16 training without masters.

    ``inner`` computes in float32: it sees parameters and gradients in float32, and its state is float32. Each new
    parameter is then rounded to its dtype such that its mean is the float32 value; leaves in float32 or float64 are not
    rounded. Rounding to nearest would lose any update below 2**-9 of its parameter, which is most updates late in
    training. Per parameter, bfloat16 with Adam's two moments takes 10 bytes; with masters it would take 14.

    Each update folds its number into the key, and each leaf draws from a separate stream. Shards draw what the whole
    leaf would, so the result does not depend on the number of ranks. ``update`` returns the differences, in float32,
    to the parameters that ``step`` returns.

    State: the count, i64[]; the key, i64[2]; that of ``inner``, in float32.

    Source: Zamirai et al. 2020, "Revisiting BFloat16 Training"; Gupta et al. 2015, "Deep Learning with Limited
    Numerical Precision".

    Attributes:
      inner: The optimizer.
      key: A key, i64[2], that nothing else draws from, or a seed; stored as a Python int. Parts of a ``partition``
        need different keys.
    Raises:
      TypeError: If ``key`` is neither a key nor a Python int, or ``inner`` is not a transformation.
      ValueError: If ``inner`` has no learning rate.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> params = {"w": torch.ones(10_000, dtype=torch.bfloat16)}
      >>> optimizer = optim.stochastic_rounding(optim.sgd(1e-3), key=0)
      >>> params, state = optimizer.step(params, optimizer.init(params), params)
      >>> params["w"].unique(), params["w"].double().mean()
      (tensor([0.9961, 1.0000], dtype=torch.bfloat16), tensor(0.9990, dtype=torch.float64))
    """

    key: Tensor | int

    acts_per_leaf = True

    def init(self, params: Params) -> StochasticRoundingState:
        key = random.key(int(self.key), device_of(params))
        return StochasticRoundingState(zero_count(params), key, self.inner.init(tree.map(_wide, params)))

    def update(
        self, updates: Updates, state: StochasticRoundingState, params: Params | None = None
    ) -> tuple[Updates, StochasticRoundingState]:
        params = need_params("stochastic_rounding", params)
        new, state = self.advance(updates, state, params)
        return tree.map(lambda q, p: _wide(q) - _wide(p), new, params), state

    def advance(
        self, grads: Updates, state: StochasticRoundingState, params: Params
    ) -> tuple[Params, StochasticRoundingState]:
        wide = tree.map(_wide, params)
        # Bypass the fused op of `inner`: a formula is compiled together with the casts, without a wide copy.
        updates, inner_state = self.inner.update(in_dtypes_of(wide, grads), state.inner_state, wide)
        key = random.fold_in(state.key, state.count)
        flat, treedef = tree.flatten(params)
        wanted = tree.leaves(apply_updates(wide, updates))
        rows = enumerate(zip(flat, wanted, strict=True))
        new = [
            value if value.dtype == p.dtype else stochastic_round(key, value, p.dtype, stream=stream)
            for stream, (p, value) in rows
        ]
        return tree.unflatten(treedef, new), StochasticRoundingState(state.count + 1, state.key, inner_state)


def _wide(leaf: Tensor) -> Tensor:
    return leaf.float() if leaf.is_floating_point() and leaf.dtype.itemsize < 4 else leaf


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
        return AddNoiseState(zero_count(params), random.key(int(self.key), device_of(params)))

    def update(
        self, updates: Updates, state: AddNoiseState, params: Params | None = None
    ) -> tuple[Updates, OptState]:
        flat, treedef = tree.flatten(updates)
        key = random.fold_in(state.key, state.count)
        deviation = torch.sqrt(self.eta / (state.count.to(torch.float64) + 1) ** self.gamma)

        def noisy(stream: int, u: Tensor) -> Tensor:
            dtype = torch.promote_types(u.dtype, torch.float32)
            noise = random.normal(key, u.shape, dtype=dtype, stream=stream) * deviation.to(dtype)
            return (u + placed_like(noise.to(u.device), u)).to(u.dtype)

        out = [noisy(stream, u) for stream, u in enumerate(flat)]
        return tree.unflatten(treedef, out), AddNoiseState(state.count + 1, state.key)
