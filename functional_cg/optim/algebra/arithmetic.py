"""What links compute of trees and leaves: running averages, norms, and a function of the leaves that a mask selects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_cg import tree
from functional_cg.optim.algebra.base import Params, Scalar, Updates, resolve_flags, shared
from functional_cg.optim.rules import fused as _fused


def averaged(decay: Scalar, old: Updates, new: Updates) -> Updates:
    """The running average ``decay * old + (1 - decay) * new`` of every leaf."""
    keep, rest = shared(decay), shared(1 - decay)
    return tree.map(lambda a, b: keep(a) * a + rest(a) * b, old, new)


def squared(updates: Updates) -> Updates:
    """The square of every element."""
    return tree.map(torch.square, updates)


def norm(leaf: Tensor) -> Tensor:
    """The L2 norm of a leaf, f32[] or f64[]."""
    out: Tensor = torch.linalg.vector_norm(leaf, dtype=torch.promote_types(leaf.dtype, torch.float32))
    return out


def leaf_norms(leaves: Sequence[Tensor]) -> list[Tensor]:
    """The L2 norm of each leaf, f32[] or f64[]; one op for all leaves of a device and a dtype."""
    if not leaves:
        return []

    def norms(columns: Any, _: Any) -> tuple[Any]:
        dtype = torch.promote_types(columns[0][0].dtype, torch.float32)
        return (torch._foreach_norm(columns[0], 2, dtype=dtype),)

    return _fused.per_group(norms, [leaves])[0]


def where_selected(
    mask: Any, function: Callable[[Tensor, Tensor], Tensor], updates: Updates, params: Params
) -> Updates:
    """``function(u, p)`` in place of the updates that a mask selects; the others as they are.

    Args:
      mask: None for all leaves, a prefix tree of bools, or a function from the parameters to one.
      function: Of an update and its parameter.
      updates: Like ``params``.
      params: The parameters.
    """
    flat, treedef = tree.flatten(updates)
    rows = zip(flat, tree.leaves(params), resolve_flags(mask, params), strict=True)
    return tree.unflatten(treedef, [function(u, p) if on else u for u, p, on in rows])
