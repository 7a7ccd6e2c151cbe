"""Dropout's arithmetic: mask and scale, with one kernel forward and one backward on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["masked_scale"]


class _MaskedScale(torch.autograd.Function):
    """torch's own dropout kernel, which is its own derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, mask: Tensor, scale: float) -> Tensor:
        return torch.ops.aten.native_dropout_backward(x, mask, scale)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, mask, ctx.scale = inputs
        ctx.save_for_backward(mask)
        ctx.save_for_forward(mask)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (mask,) = ctx.saved_tensors
        return masked_scale(grad, mask, ctx.scale), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *others: Any) -> Any:
        (mask,) = ctx.saved_tensors
        return masked_scale(tangent, mask, ctx.scale)


def masked_scale(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return ``x * mask * scale``, with the same bits everywhere; a masked NaN stays NaN, as in torch.

    Args:
      x: Floating.
      mask: bool, of the same shape.
      scale: Factor for the kept values.

    Example:
      >>> import torch
      >>> from functional_cg.random.masking import masked_scale
      >>> masked_scale(torch.tensor([1.0, 2.0]), torch.tensor([True, False]), 4.0)
      tensor([4., 0.])
    """
    # On a CPU the fused op converts the mask first, and `masked_fill` takes four times as long as two
    # products. A compiler fuses the products by itself.
    fused = x.is_cuda and not torch.compiler.is_compiling()
    return _MaskedScale.apply(x, mask, scale) if fused else x * mask * scale
