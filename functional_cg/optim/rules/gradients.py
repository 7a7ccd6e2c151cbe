"""Preprocesses gradients: clipping, centralization, freezing. Nothing waits for the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from functional_cg import tree
from functional_cg.optim.algebra.arguments import are_numbers
from functional_cg.optim.algebra.arithmetic import leaf_norms, norm, placed_like, whole
from functional_cg.optim.algebra.base import (
    Link,
    OptState,
    Params,
    Scalar,
    Updates,
    device_of,
    require,
)
from functional_cg.optim.rules import fused as _fused


@dataclass(frozen=True)
class clip_by_value(Link):
    """Clip every element: ``min(max(u, -max_delta), max_delta)``.

    Source: ``optax.clip``; ``torch.nn.utils.clip_grad_value_``.

    Attributes:
      max_delta: Positive number, or f32[].
    Raises:
      ValueError: If a number is out of range.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> optim.clip_by_value(1.0).update({"w": torch.tensor([3.0, -0.5])}, ())[0]
      {'w': tensor([ 1.0000, -0.5000])}
    """

    max_delta: Scalar

    def leaf(self, n: Any, u: Tensor, p: Any) -> Tensor:
        most = n.max_delta(u)
        return u.clamp(-most, most)


@dataclass(frozen=True)
class clip_by_norm(Link):
    """Clip each leaf to a norm of ``max_norm``: ``u max_norm / max(|u|, max_norm)``.

    Source: Pascanu et al. 2013, leaf by leaf. ``clip_by_global_norm`` preserves the joint direction.

    Attributes:
      max_norm: Positive number, or f32[].
    Raises:
      ValueError: If a number is out of range.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> optim.clip_by_norm(1.0).update({"w": torch.tensor([3.0, 4.0]), "b": torch.tensor([0.5])}, ())[0]
      {'w': tensor([0.6000, 0.8000]), 'b': tensor([0.5000])}
    """

    max_norm: Scalar

    acts_per_leaf = True

    def leaf(self, n: Any, u: Tensor, p: Any) -> Tensor:
        size = norm(u)
        most = n.max_norm(size)
        return u * (most / size.clamp(min=most)).to(u.dtype)  # type: ignore[no-any-return]


def _unit_norm(leaf: Tensor) -> Tensor:
    """The norm of each unit, shaped to broadcast: each row of a matrix, or all of a vector or scalar."""
    return norm(leaf) if leaf.dim() < 2 else torch.linalg.vector_norm(leaf, dim=_inputs(leaf), keepdim=True)


def _inputs(leaf: Tensor) -> tuple[int, ...]:
    return tuple(range(1, leaf.dim()))


@dataclass(frozen=True)
class adaptive_clip(Link):
    """Clip each unit to a fraction of its parameter's norm: ``u min(1, clipping max(|p|, eps) / |u|)``.

    A unit is a row: the part of a leaf ``[out, ...]`` that computes one output, as in ``torch.nn.Linear``; a vector
    is one unit.

    Source: Brock et al. 2021, "High-Performance Large-Scale Image Recognition Without Normalization";
    ``optax.adaptive_grad_clip``, where a unit is a column.

    Attributes:
      clipping: Maximum ratio of the two norms, positive number or f32[].
      eps: Lower bound of the parameter norm.
    Raises:
      ValueError: If a number is out of range.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> params = {"w": torch.tensor([[3.0, 4.0], [0.0, 0.0]])}
      >>> grads = {"w": torch.tensor([[6.0, 8.0], [0.0, 1.0]])}
      >>> optim.adaptive_clip(0.5, eps=1.0).update(grads, (), params)[0]
      {'w': tensor([[1.5000, 2.0000],
              [0.0000, 0.5000]])}
    """

    clipping: Scalar
    eps: Scalar = 1e-3

    needs_params = True
    acts_per_leaf = True

    def leaf(self, n: Any, u: Tensor, p: Tensor) -> Tensor:
        units, weights = (whole(u), whole(p)) if u.dim() > 1 else (u, p)
        size, own = _unit_norm(units), _unit_norm(weights)
        bound = n.clipping(own) * own.clamp(min=n.eps(own))
        small = torch.finfo(size.dtype).tiny
        scaled = units * (bound / size.clamp(min=small)).clamp(max=1).to(u.dtype)
        return placed_like(scaled, u) if u.dim() > 1 else scaled


@dataclass(frozen=True)
class centralize(Link):
    """Subtract the mean of each row: ``u - mean(u)`` over all dimensions but the first.

    Vectors and scalars pass unchanged.

    Source: Yong et al. 2020, "Gradient Centralization"; ``optax.centralize``, over all dimensions but the last.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> optim.centralize().update({"w": torch.tensor([[3.0, 1.0], [0.0, 4.0]])}, ())[0]
      {'w': tensor([[ 1., -1.],
              [-2.,  2.]])}
    """

    acts_per_leaf = True

    def leaf(self, n: Any, u: Tensor, p: Any) -> Tensor:
        if u.dim() < 2:
            return u
        matrix = whole(u)
        return placed_like(matrix - matrix.mean(_inputs(u), keepdim=True), u)


@dataclass(frozen=True)
class freeze(Link):
    """Zero the updates where ``mask`` is True; use as the last link of a chain, so that nothing decays either.

    Frozen leaves still have state; ``partition`` with ``set_to_zero`` keeps none.

    Source: ``optax.transforms.freeze``.

    Attributes:
      mask: A prefix tree of bools, or a function from the parameters to one.
    Raises:
      TypeError: If a flag of the mask is not a bool.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> frozen = optim.freeze({"w": True, "b": False})
      >>> frozen.update({"w": torch.tensor(2.0), "b": torch.tensor(2.0)}, ())[0]
      {'w': tensor(0.), 'b': tensor(2.)}
    """

    mask: Any

    def leaf(self, n: Any, u: Tensor, p: Any) -> Tensor:
        return torch.zeros_like(u)


def global_norm(updates: Updates, order: float = 2) -> Tensor:
    """Norm over all leaves together, on the device: L2, or of another positive order up to ``math.inf``.

    Each leaf's norm is computed in its dtype (float32 or wider), and the norm of those norms in float64, so the result
    does not depend on the number of leaves; the last bits still differ from the norm of one flat vector.

    Returns:
      f64[] on the device of the first leaf; 0 for a tree without elements.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> optim.global_norm({"w": torch.tensor([3.0]), "b": torch.tensor(4.0)})
      tensor(5., dtype=torch.float64)
    """
    flat = [leaf for leaf in tree.leaves(updates) if leaf.numel()]  # of no elements, there is no largest one
    if not flat:
        return torch.zeros((), dtype=torch.float64, device=device_of(updates))

    scale: Tensor | None = None
    if order not in (
        1,
        2,
        float("inf"),
    ):  # powers of large numbers overflow, and those of small ones are zero
        largest = global_norm(flat, float("inf"))
        scale = largest.masked_fill(~((largest > 0) & largest.isfinite()), 1.0)
        wide = [leaf.to(torch.promote_types(leaf.dtype, torch.float32)) for leaf in flat]
        flat = [leaf / _fused.beside(scale, leaf).to(leaf.dtype) for leaf in wide]
    stacked = torch.stack([_fused.beside(norm, flat[0]) for norm in leaf_norms(flat, order)])
    norm: Tensor = torch.linalg.vector_norm(stacked, order, dtype=torch.float64)
    return norm if scale is None else norm * scale


@dataclass(frozen=True)
class clip_by_global_norm(Link):
    """Clip the global norm to ``max_norm``: scale all leaves by ``max_norm / max(norm, max_norm)``.

    Norm and factor stay on the device; see :func:`global_norm` for how the norm is accumulated. The factor is
    cast to the dtype of each leaf. A norm of NaN makes every leaf NaN. ``torch.nn.utils.clip_grad_norm_``
    divides by ``norm + 1e-6`` instead. Source: Pascanu et al. 2013; ``optax.clip_by_global_norm``.

    Attributes:
      max_norm: Positive number, or f32[].
      order: Of the norm, positive; ``math.inf`` for the largest element.
    Raises:
      ValueError: If a number is out of range.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> clip = optim.clip_by_global_norm(1.0)
      >>> clip.update({"w": torch.tensor([3.0, 4.0])}, clip.init(None))[0]
      {'w': tensor([0.6000, 0.8000])}
    """

    max_norm: Scalar
    order: float = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        are_numbers("clip_by_global_norm", order=self.order)
        require(
            not isinstance(self.order, bool), f"clip_by_global_norm: order must be a number, got {self.order}"
        )
        require(self.order > 0, f"clip_by_global_norm: order must be positive, got {self.order}")

    def update(
        self, updates: Updates, state: OptState, params: Params | None = None
    ) -> tuple[Updates, OptState]:
        flat, treedef = tree.flatten(updates)
        if not flat:
            return updates, state
        factor = self.max_norm / global_norm(flat, self.order).clamp(min=self.max_norm)

        def rescale(columns: Any, _: Any) -> tuple[Any]:
            leaf = columns[0][0]
            return (torch._foreach_mul(columns[0], _fused.beside(factor, leaf).to(leaf.dtype)),)

        return tree.unflatten(treedef, _fused.per_group(rescale, [flat])[0]), state
