"""Computes the global norm and clips by it, without a host sync."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from functional_cg import tree
from functional_cg.optim.algebra.arithmetic import leaf_norms
from functional_cg.optim.algebra.base import Link, OptState, Params, Scalar, Updates
from functional_cg.optim.rules import fused as _fused


def global_norm(updates: Updates) -> Tensor:
    """L2 norm over all leaves together, on the device.

    Each leaf's norm is computed in its dtype (float32 or wider), and the norm of those norms in float64, so the result
    does not depend on the number of leaves; the last bits still differ from the norm of one flat vector.

    Returns:
      f64[] on the device of the first leaf; 0 for a tree without leaves.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> optim.global_norm({"w": torch.tensor([3.0]), "b": torch.tensor(4.0)})
      tensor(5., dtype=torch.float64)
    """
    flat = tree.leaves(updates)
    if not flat:
        return torch.zeros((), dtype=torch.float64)

    stacked = torch.stack([_fused.beside(norm, flat[0]) for norm in leaf_norms(flat)])
    norm: Tensor = torch.linalg.vector_norm(stacked, dtype=torch.float64)
    return norm


@dataclass(frozen=True)
class clip_by_global_norm(Link):
    """Clip the global norm to ``max_norm``: scale all leaves by ``max_norm / max(norm, max_norm)``.

    Norm and factor stay on the device; see :func:`global_norm` for how the norm is accumulated. The factor is
    cast to the dtype of each leaf. A norm of NaN makes every leaf NaN. ``torch.nn.utils.clip_grad_norm_``
    divides by ``norm + 1e-6`` instead. Source: Pascanu et al. 2013; ``optax.clip_by_global_norm``.

    Attributes:
      max_norm: Positive number, or f32[].

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> clip = optim.clip_by_global_norm(1.0)
      >>> clip.update({"w": torch.tensor([3.0, 4.0])}, clip.init(None))[0]
      {'w': tensor([0.6000, 0.8000])}
    """

    max_norm: Scalar

    def update(
        self, updates: Updates, state: OptState, params: Params | None = None
    ) -> tuple[Updates, OptState]:
        flat, treedef = tree.flatten(updates)
        if not flat:
            return updates, state
        factor = self.max_norm / global_norm(flat).clamp(min=self.max_norm)

        def rescale(columns: Any, _: Any) -> tuple[Any]:
            leaf = columns[0][0]
            return (torch._foreach_mul(columns[0], _fused.beside(factor, leaf).to(leaf.dtype)),)

        return tree.unflatten(treedef, _fused.per_group(rescale, [flat])[0]), state
