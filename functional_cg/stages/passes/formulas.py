"""Ops written as formulas for compilers: fused optimizers, which fuse with the gradients, and what compilers miss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from ctypes import c_float
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..fx_passes.old_values import KEPT
from ..fx_passes.rounding import HALF, ROUNDED
from ..fx_passes.updates import update
from .convolutions import convolution, convolution_backward
from .normalized import apply_statistics

__all__ = ["FORMULAS"]

_MEAN = 1  # torch's number for a loss that is a mean
_Kept = Callable[[Tensor], Tensor]


def _adam(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor],
    state_steps: Sequence[Tensor],
    *,
    lr: Any,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool,
    maximize: bool,
    decoupled: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> tuple[list[Tensor], ...]:
    """Adam and AdamW, in the operation order of ``torch.optim`` (Kingma & Ba 2015; Loshchilov & Hutter 2019).

    Its scalars, step size and square root of the second bias correction, are kept in memory: else the kernel of each
    leaf would compute their powers again. A kernel of a host computes them in float64. That of a GPU takes the betas,
    too, in float32, unless the parameters are of float64 (torch 2.11 and later): for 0.999, ``1 - beta2`` is less by
    1.3e-5 of it.
    """
    scalars: dict[int, tuple[Tensor, Tensor]] = {}
    out: tuple[list[Tensor], ...] = ([], [], [], [])
    grads = _unscaled(grads, grad_scale)
    shrink = 1 - lr * weight_decay if decoupled and weight_decay else 1.0
    kept, keeps = (shrink, 1.0) if isinstance(shrink, Tensor) else (None, float(shrink))
    if any(_is_single(p) for p in params):  # they share a dtype
        beta1, beta2 = c_float(beta1).value, c_float(beta2).value
    numbers = (beta1, beta2, eps, 0.0 if decoupled else weight_decay, keeps)
    maxima = [[top] for top in max_exp_avg_sqs] or [[]] * len(params)
    for p, g, m, v, top, step in zip(params, grads, exp_avgs, exp_avg_sqs, maxima, state_steps, strict=True):
        if id(step) not in scalars:  # once per step, outside of the update kernels
            # Right to the last bit: a power of 0.999 that is off by one is 6e-5 of its distance from 1.
            powers = [beta ** step.double() for beta in (beta1, beta2)]
            first, second = (1 - (one.float() if _is_single(p) else one) for one in powers)
            both = lr / first, second.sqrt()
            scalars[id(step)] = KEPT(both[0].to(_scalar_dtype(p))), KEPT(both[1].to(_scalar_dtype(p)))
        values = (-g if maximize else g, *scalars[id(step)], kept, found_inf)
        for column, result in zip(out, update("adam", (p, m, v, *top), values, numbers), strict=False):
            column.append(result)
    news, mus, nus, bounds = out
    return news, grads, mus, nus, bounds


def _is_single(param: Tensor) -> bool:
    """Whether a kernel computes its scalars in float32, too."""
    return _on_gpu(param) and param.dtype != torch.float64


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def _scalar_dtype(param: Tensor) -> torch.dtype:
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def _adam_coupled(*args: Any, **kwargs: Any) -> Any:
    return _adam(*args, decoupled=False, **kwargs)


def _adam_decoupled(*args: Any, **kwargs: Any) -> Any:
    return _adam(*args, decoupled=True, **kwargs)


def _sgd(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momenta: Sequence[Tensor],
    *,
    weight_decay: float,
    momentum: float,
    lr: Any,
    dampening: float,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> tuple[list[Tensor], ...]:
    """SGD with momentum and Nesterov momentum, as in ``torch.optim.SGD``."""
    rate, number = (lr, 0.0) if isinstance(lr, Tensor) else (None, lr)
    grads = _unscaled(grads, grad_scale)
    numbers = (weight_decay, momentum, dampening, nesterov, is_first_step, number)
    results = [
        update("sgd", (p, *moment), (-g if maximize else g, rate), numbers)
        for p, g, *moment in zip(params, grads, *([momenta] if momentum else []), strict=True)
    ]
    news, *buffers = map(list, zip(*results, strict=True))
    news, *buffers = (
        _unless(found_inf, *pair) for pair in zip((params, momenta), (news, *buffers), strict=False)
    )
    return news, grads, *(buffers or [[]])


def _adagrad(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    state_sums: Sequence[Tensor],
    state_steps: Sequence[Tensor],
    *,
    lr: Any,
    lr_decay: float,
    weight_decay: float,
    eps: float,
    maximize: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> tuple[list[Tensor], ...]:
    """Adagrad (Duchi et al. 2011), as in ``torch.optim.Adagrad``; the step is counted in float32."""
    grads = _unscaled(grads, grad_scale)
    results = [
        update(
            "adagrad",
            (p, total),
            (-g if maximize else g, (lr / (1 + (step.double() - 1) * lr_decay)).to(_scalar_dtype(p))),
            (weight_decay, eps),
        )
        for p, g, total, step in zip(params, grads, state_sums, state_steps, strict=True)
    ]
    news, sums = map(list, zip(*results, strict=True))
    return _unless(found_inf, params, news), grads, _unless(found_inf, state_sums, sums), list(state_steps)


def _unscaled(grads: Sequence[Tensor], scale: Tensor | None) -> list[Tensor]:
    return list(grads) if scale is None else [grad / scale.reshape(()) for grad in grads]


def _unless(found_inf: Tensor | None, olds: Sequence[Tensor], news: Sequence[Tensor]) -> list[Tensor]:
    """Return the new values, or the old ones if a gradient is not finite."""
    if found_inf is None:
        return list(news)
    return [torch.where(found_inf.bool().reshape(()), old, new) for old, new in zip(olds, news, strict=True)]


def _index_fill(x: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
    """As ``index_fill``; for some strides torch 2.11's own formula writes in place, which its compiler refuses."""
    if not x.dim():
        return _index_fill(x[None], 0, index, value)[0]
    chosen = torch.zeros(x.shape[dim], dtype=torch.bool, device=x.device).index_fill(0, index, True)
    return x.clone().masked_fill_(chosen.view(-1, *[1] * (x.dim() - 1 - dim % x.dim())), value)


def _embedding_dense_backward(grads: Tensor, index: Tensor, rows: int, padding: int, *rest: Any) -> Any:
    """As a host's kernel, which in half precision rounds after each addition; the compiler's formula rounds once."""
    if grads.dtype not in HALF or _on_gpu(grads) or rest != (False,):
        return torch.ops.aten.embedding_dense_backward(grads, index, rows, padding, *rest)
    counted = grads.masked_fill((index == padding)[..., None], 0.0)
    return grads.new_zeros(rows, grads.shape[-1]).index_put((index,), counted, accumulate=True)


def _zero_tangent(size: Sequence[int], **options: Any) -> Tensor:
    """Zeros with memory, which compiled kernels need; torch's own product of such a tensor and infinity is 0."""
    return torch.zeros(size, **options)


def _ldexp(x: Tensor, exponent: Tensor) -> Tensor:
    """As torch's kernels; its compiler's formula gives other dtypes, and computes in that of ``x`` alone."""
    if not x.is_floating_point() or exponent.is_floating_point():
        is_wide = x.is_floating_point() or x.is_complex()
        return (x if is_wide else _rounded(x.to(exponent.dtype))) * _rounded(torch.pow(2.0, exponent))
    # By integers, kernels scale without a power, which may overflow where the result does not.
    by = exponent.clamp(-2044, 2044).double()
    first = (by / 2).floor()
    return (x.double() * torch.exp2(first) * torch.exp2(by - first)).to(x.dtype)


def _rounded(value: Tensor) -> Tensor:
    """Return a value that a formula computes in between, rounded to its dtype if that is of half precision."""
    return ROUNDED(value, value.dtype) if value.dtype in HALF else value


def _round(x: Tensor, *, decimals: int = 0) -> Tensor:
    """As torch's kernels: they divide where the compiler multiplies, and that of a GPU rounds in between."""
    if not decimals:
        return x.round()
    power = _held(10.0 ** abs(decimals), x.dtype)
    scaled = x * power if decimals > 0 else x / power
    scaled = _rounded(scaled) if _on_gpu(x) else scaled
    return scaled.round() / power if decimals > 0 else scaled.round() * power


def _huber_loss(x: Tensor, target: Tensor, reduction: int = _MEAN, delta: float = 1.0) -> Tensor:
    def each(z: Tensor, kept: _Kept, delta: float) -> Tensor:
        return torch.where(z < delta, kept(0.5 * z) * z, delta * kept(z - 0.5 * delta))

    x, target = _as_predicted(x, (x, target))
    return _of_differences(
        torch.ops.aten.huber_loss.default, each, torch.float16, x, target, reduction, delta
    )


def _mse_loss(x: Tensor, target: Tensor, reduction: int = _MEAN) -> Tensor:
    def each(z: Tensor, kept: _Kept) -> Tensor:
        return z * z

    return _of_differences(torch.ops.aten.mse_loss.default, each, None, x, target, reduction)


def _smooth_l1_loss(x: Tensor, target: Tensor, reduction: int = _MEAN, beta: float = 1.0) -> Tensor:
    def each(z: Tensor, kept: _Kept, beta: float) -> Tensor:
        return torch.where(z < beta, kept(kept(0.5 * z) * z) / beta, z - 0.5 * beta)

    loss = torch.ops.aten.smooth_l1_loss.default
    return _of_differences(loss, each, torch.bfloat16, x, target, reduction, beta)


def _of_differences(
    loss: Callable[..., Tensor],
    each: Callable[..., Tensor],
    wide: torch.dtype | None,
    x: Tensor,
    target: Tensor,
    reduction: int,
    *scale: float,
) -> Tensor:
    """Return a loss of differences as torch's kernels compute it: in half precision, they round each difference.

    The compiler computes in float32 throughout, where a difference of 70,000 does not overflow. CPU kernels round
    what they compute from the difference, too, after each operation.

    Args:
      loss: The op.
      each: Its formula, of absolute differences, what rounds in between, and ``scale``.
      wide: The dtype for which the CPU kernel does compute in float32 throughout.
      x: The prediction.
      target: The target.
      reduction: Torch's number for none, mean or sum.
      scale: The number that the op takes, if any: ``delta`` or ``beta``.
    """
    if x.dtype is not target.dtype or x.dtype not in HALF:
        return loss(x, target, reduction, *scale)
    if x.dtype is wide and not _on_gpu(x):
        losses = loss(x, target, 0, *scale)
    else:
        kept: _Kept = (lambda value: value) if _on_gpu(x) else _rounded
        losses = each(_rounded(x - target).abs(), kept, *(_held(one, x.dtype) for one in scale))
    losses = _rounded(losses)
    return losses if not reduction else losses.mean() if reduction == _MEAN else losses.sum()


def _held(number: float, dtype: torch.dtype) -> float:
    """Return a number as a kernel of this dtype holds it."""
    return torch.tensor(number, dtype=dtype).item()


def _mse_loss_backward(*args: Any, **kwargs: Any) -> Any:
    return torch.ops.aten.mse_loss_backward.default(*_as_predicted(args[1], args), **kwargs)


def _smooth_l1_loss_backward(*args: Any, **kwargs: Any) -> Any:
    return torch.ops.aten.smooth_l1_loss_backward.default(*_as_predicted(args[1], args), **kwargs)


def _as_predicted(prediction: Tensor, args: Sequence[Any]) -> Sequence[Any]:
    """Return the arguments of a loss as torch's kernel of a GPU reads them: all in the dtype of the prediction."""
    if not _on_gpu(prediction):
        return args
    return [arg.to(prediction.dtype) if isinstance(arg, Tensor) else arg for arg in args]


def _soft_margin_loss_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int) -> Tensor:
    """As torch's kernels; its compiler subtracts 1 from a sigmoid, which loses a small gradient."""
    power = _rounded(_rounded(-target * x).exp())
    scaled = _rounded(_rounded(target * power) * (-1.0 / x.numel() if reduction == _MEAN else -1.0))
    return _rounded(scaled / _rounded(power + 1)) * grad


def _nextafter(x: Tensor, other: Tensor) -> Tensor:
    """As torch's kernels; its compiler takes the next number of single precision, which rounds back to ``x``.

    Without their signs, the bits of numbers are whole numbers in the same order.
    """
    x, other = torch.broadcast_tensors(x, other)
    if x.dtype not in HALF:
        return torch.ops.aten.nextafter.default(x, other)  # type: ignore[no-any-return]
    bits = x.clone().view(torch.int16)
    away = torch.where((x > 0) == (other > x), bits + 1, bits - 1)
    least = torch.where(other > 0, 1, -(2**15) + 1).to(torch.int16)
    found = torch.where(x == 0, least, away).to(torch.int16).view(x.dtype)
    return torch.where(x == other, other, torch.where((x != x) | (other != other), x + other, found))


FORMULAS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "aten::_efficientzerotensor": _zero_tangent,
        "aten::_fused_adam": _adam_coupled,
        "aten::_fused_adamw": _adam_decoupled,
        "aten::_fused_sgd": _sgd,
        "aten::_fused_adagrad": _adagrad,
        "aten::convolution": convolution,
        "aten::convolution_backward": convolution_backward,
        "aten::embedding_dense_backward": _embedding_dense_backward,
        "aten::huber_loss": _huber_loss,
        "aten::index_fill": _index_fill,
        "aten::ldexp": _ldexp,
        "aten::mse_loss": _mse_loss,
        "aten::mse_loss_backward": _mse_loss_backward,
        "aten::nextafter": _nextafter,
        "aten::round": _round,
        "aten::smooth_l1_loss": _smooth_l1_loss,
        "aten::smooth_l1_loss_backward": _smooth_l1_loss_backward,
        "aten::soft_margin_loss_backward": _soft_margin_loss_backward,
        "fcg::normalized": apply_statistics,
    }
)
