"""Products of the first entries, whose gradient is a dozen calls however many entries there are.

Torch before 2.13 asks the host whether an entry is zero. Where it must not ask, as in a trace, it computes the product
without an entry for each entry in turn: hundreds of calls for the transmittance along a ray.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = ["CUMULATIVE", "cumprod"]

_cumprod = torch.ops.aten.cumprod.default


def cumprod(
    tensor: Tensor, dim: int, *, dtype: torch.dtype | None = None, out: Tensor | None = None
) -> Tensor:
    """Return what ``torch.cumprod`` does. Where no entry is zero, its gradient has the bits of torch's, too.

    Args:
      tensor: Of any shape.
      dim: Along which to multiply.
      dtype: To convert to first.
      out: Where to write the result.
    """
    plain = (
        out is not None
        or not (torch.is_grad_enabled() and tensor.requires_grad and tensor.dim())
        or torch.is_autocast_enabled(tensor.device.type)
        or torch._C._functorch.peek_interpreter_stack() is not None  # private; test_cumulative notices
        or forward_ad._current_level >= 0
    )
    if plain:
        return torch.cumprod(tensor, dim, dtype=dtype, out=out)
    return _Cumprod.apply(tensor, dim, dtype)  # type: ignore[no-any-return]


class _Cumprod(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, dim: int, dtype: torch.dtype | None) -> Tensor:
        products: Tensor = _cumprod(values, dim, dtype=dtype)
        ctx.save_for_backward(values, products)
        ctx.dim = dim
        return products

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        values, products = ctx.saved_tensors
        grad = grad.to(values.dtype)
        if values.shape[ctx.dim] <= 1:  # of no entries, none is the first zero
            return grad, None, None
        if torch.is_grad_enabled():  # the formula below is not the one to differentiate again
            again = _cumprod(values, ctx.dim)
            return torch.autograd.grad(again, values, grad, create_graph=True)[0], None, None
        return _gradient(grad, values.conj(), products.conj(), ctx.dim).to(values.dtype), None, None


def _gradient(grad: Tensor, values: Tensor, products: Tensor, dim: int) -> Tensor:
    """Return the gradient. Behind the first zero it is zero, and there it is that of what comes before the second."""
    zero = values == 0
    zeros = zero.cumsum(dim)
    before, between = zeros == 0, zeros == 1
    sums = (products * grad).masked_fill(~before, 0).flip(dim).cumsum(dim).flip(dim)
    place = before.sum(dim, keepdim=True)
    ahead = products.gather(dim, (place - 1).clamp(min=0)).masked_fill(place == 0, 1)
    after = _cumprod(values.masked_fill(zero | ~between, 1), dim)
    at_first = ahead * (grad.masked_fill(~between, 0) * after).sum(dim, keepdim=True)
    return torch.where(before, sums / values, torch.where(between & zero, at_first, torch.zeros_like(sums)))


_LOOPS = torch.__version__ < "2.13"
CUMULATIVE: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {one: cumprod for one in (torch.cumprod, Tensor.cumprod) if _LOOPS}
)
