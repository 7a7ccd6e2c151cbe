"""Negate as torch does: of zero, too, whose sign ``1 / x``, ``atan2`` and ``copysign`` tell."""

from __future__ import annotations

import torch
from torch import fx

__all__ = ["keep_signs"]

_aten = torch.ops.aten


def keep_signs(graph: fx.Graph) -> None:
    """Write the negative of floating-point numbers as a product: Triton computes ``-x`` as ``0 - x``, which has no -0.

    A product with -1 is exact, and compiled to one instruction that flips the sign.
    """
    for node in graph.find_nodes(op="call_function", target=_aten.neg.default):
        if node.meta["val"].is_floating_point():
            node.target, node.args = _aten.mul.Tensor, (node.args[0], -1)
