"""Backwards that know no second derivative: an error where one is taken, and only there."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

__all__ = ["knows_one_derivative"]


class _Refuses(torch.autograd.Function):
    """The identity in its first argument; its backward raises."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, message: str, *sources: Tensor) -> Tensor:
        ctx.message = message
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(ctx.message)


def knows_one_derivative(message: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate the backward of an autograd function that saves all inputs that it differentiates.

    A graph of the backward is made where a loss depends on more leaves than those of its gradient, and may then not be
    differentiated. ``once_differentiable`` of torch would lose terms through saved inputs in silence.

    Args:
      message: Of the error if it is differentiated.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(backward)
        def wrapped(ctx: Any, *grads: Tensor) -> Any:
            recording = torch.is_grad_enabled()
            with torch.no_grad():
                results = backward(ctx, *grads)
            if not recording:
                return results
            sources = [one for one in (*grads, *ctx.saved_tensors) if one is not None and one.requires_grad]
            return tuple(one if one is None else _Refuses.apply(one, message, *sources) for one in results)

        return wrapped

    return decorate
