"""Runs a transformation on one vector instead of many leaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from functional_cg.optim.algebra.base import (
    Advance,
    Combined,
    GradientTransformation,
    OptState,
    Params,
    Updates,
    need_transformations,
    require,
)
from functional_cg.optim.algebra.fitting import in_dtypes_of
from functional_cg.state.flat import ravel, unravel


@dataclass(frozen=True)
class flatten(Combined):
    """Run ``inner`` on all leaves as one vector: a handful of ops, however many leaves there are.

    Moments become vectors, with the padding of :func:`functional_cg.state.flat.ravel` between leaves. Elementwise
    transformations give the same results as leaf by leaf, up to the last bits (SIMD blocks fall differently), and so
    does a norm of gradients. A norm *after* moments includes their values in the padding: zero for Adam with a
    positive ``eps``, nonzero for Yogi, which does not start at 0.

    ``inner`` never sees the tree: masks and labels go around it, as in
    ``partition({"decay": flatten(adamw(...)), "rest": flatten(adam(...))}, labels)``.

    Source: ``optax.flatten``.

    Attributes:
      inner: A transformation without per-leaf norms. All leaves need one dtype and one device.
    Raises:
      ValueError: If ``inner`` acts leaf by leaf, as ``lamb`` does.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> optimizer = optim.flatten(optim.sgd(0.5))
      >>> params = {"w": torch.tensor([1.0, 2.0]), "b": torch.tensor(3.0)}
      >>> optimizer.step(params, optimizer.init(params), params)[0]
      {'w': tensor([0.5000, 1.0000]), 'b': tensor(1.5000)}
    """

    inner: GradientTransformation

    def __post_init__(self) -> None:
        need_transformations("flatten", self.inner)
        require(
            not self.inner.acts_per_leaf,
            f"flatten: {self.inner!r} takes a norm per leaf, or a draw; on one vector it would be another optimizer",
        )

    @property
    def parts(self) -> tuple[GradientTransformation, ...]:
        return (self.inner,)

    def init(self, params: Params) -> OptState:
        return self.inner.init(ravel(params))

    def run(self, advance: Advance, updates: Updates, state: OptState, params: Any) -> tuple[Any, OptState]:
        like = updates if params is None else params
        vector = None if params is None else ravel(params)
        out, state = advance(self.inner, ravel(in_dtypes_of(like, updates), like), state, vector)
        return unravel(like, out), state
