"""Draw from further distributions: exponential, truncated normal, gamma, beta, Dirichlet, Poisson.

Each element takes a fixed number of random bits, and no loop depends on their values, so a draw can be captured. The
arithmetic is in float64, whose functions agree on CPU and CUDA up to the last bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..messages.tracebacks import entry
from .arguments import check_broadcast, check_floating, check_key, check_operand, describe, numel
from .words import SMALLEST, exponential64, unit64

__all__ = ["beta", "dirichlet", "exponential", "gamma", "poisson", "truncated_normal"]

_ROUNDS = 10  # proposals of a gamma number; one is rejected with a probability of at most 0.05
_TINY = -600.0  # a logarithm from which on the distribution function of gamma is a power
# Quantiles of the Poisson distribution are this close to Cornish and Fisher's expansion, for uniforms of 53 bits.
_NEAR, _HALVINGS = 32, 7


@entry()
def exponential(
    key: Tensor,
    shape: Sequence[int],
    *,
    rate: float = 1.0,
    dtype: torch.dtype = torch.float32,
    stream: int = 0,
) -> Tensor:
    """Draw from the exponential distribution of mean ``1 / rate``; no result is zero.

    Raises:
      LayoutError: If ``key`` is not an i64[2].
      TypeError: If ``shape`` is not a tuple of Python ints, or ``dtype`` is not floating.
      ValueError: If ``rate`` is not a positive Python number.

    Example:
      >>> from functional_cg.random import exponential, key
      >>> bool((exponential(key(0), (1000,)) > 0).all())
      True
    """
    check_floating(dtype)
    _check_number("rate", rate)
    draws = exponential64(key, numel(shape), stream) / rate
    return draws.to(dtype).clamp(min=torch.finfo(dtype).tiny).view(shape)


@entry()
def truncated_normal(
    key: Tensor,
    shape: Sequence[int],
    low: float,
    high: float,
    *,
    dtype: torch.dtype = torch.float32,
    stream: int = 0,
) -> Tensor:
    """Draw from the standard normal distribution between ``low`` and ``high``, by its inverse distribution function.

    Raises:
      LayoutError: If ``key`` is not an i64[2].
      TypeError: If ``shape`` is not a tuple of Python ints, or ``dtype`` is not floating.
      ValueError: If ``low`` is not below ``high``, or both are over 37 standard deviations away on one side.

    Example:
      >>> from functional_cg.random import key, truncated_normal
      >>> draws = truncated_normal(key(0), (1000,), -2.0, 2.0)
      >>> bool((draws.abs() <= 2).all())
      True
    """
    check_floating(dtype)
    # In the lower tail probabilities are precise, in the upper one they are not.
    lower = (-high, -low) if low > 0 else (low, high)
    below, above = (math.erfc(-bound / math.sqrt(2)) / 2 for bound in lower)
    if not low < high or above - below < torch.finfo(torch.float64).tiny:
        raise ValueError(f"expected low < high, with numbers in between that are drawn, got [{low}, {high}].")
    unit = unit64(key, numel(shape), stream)
    draws = torch.special.ndtri((unit * (above - below) + below).clamp(min=torch.finfo(torch.float64).tiny))
    draws = -draws if low > 0 else draws
    result: Tensor = draws.clamp(low, high).to(dtype).clamp(low, high).view(shape)
    return result


@entry()
def gamma(
    key: Tensor,
    concentration: float | Tensor,
    shape: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    stream: int = 0,
) -> Tensor:
    """Draw from the gamma distribution of rate 1; divide by another rate. Differentiable in ``concentration``.

    Each element takes the first of ten proposals that is accepted; all are rejected with a probability of 1e-13. The
    gradient is that of implicit reparameterization.

    Args:
      key: i64[2].
      concentration: A positive Python number, or a floating tensor on the key's device that broadcasts to ``shape``;
        where its values are not positive, the result is NaN.
      shape: Shape of the result.
      dtype: Of the result, which is never zero.
      stream: Part of the counter.

    Raises:
      LayoutError: If ``key`` is not an i64[2], or ``concentration`` is on another device or does not broadcast.
      TypeError: If a tensor ``concentration`` or ``dtype`` is not floating, or ``shape`` not a tuple of Python ints.
      ValueError: If ``concentration`` is neither a tensor nor a positive Python number.

    Example:
      >>> from functional_cg.random import gamma, key
      >>> round(gamma(key(0), 3.0, (10_000,)).mean().item(), 1)
      3.0

    Source: Marsaglia, Tsang 2000, "A simple method for generating gamma variables"; Figurnov, Mohamed, Mnih 2018,
    "Implicit reparameterization gradients".
    """
    check_floating(dtype)
    alpha = _operand("concentration", concentration, key, shape)
    draws = _log_gamma(key, alpha, stream).exp().to(dtype).clamp(min=torch.finfo(dtype).tiny)
    return draws


@entry()
def beta(
    key: Tensor,
    a: float | Tensor,
    b: float | Tensor,
    shape: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    stream: int = 0,
) -> Tensor:
    """Draw from the beta distribution: ``x / (x + y)`` for gamma numbers x and y. Differentiable in ``a`` and ``b``.

    Args:
      key: i64[2].
      a: A positive Python number, or a floating tensor on the key's device that broadcasts to ``shape``.
      b: Likewise.
      shape: Shape of the result.
      dtype: Of the result.
      stream: Part of the counter.

    Raises:
      LayoutError: If ``key`` is not an i64[2], or a tensor is on another device or does not broadcast.
      TypeError: If a tensor or ``dtype`` is not floating, or ``shape`` is not a tuple of Python ints.
      ValueError: If a parameter is neither a tensor nor a positive Python number.

    Example:
      >>> from functional_cg.random import beta, key
      >>> round(beta(key(0), 1.0, 3.0, (10_000,)).mean().item(), 1)
      0.2
    """
    check_floating(dtype)
    both = torch.stack([_operand("a", a, key, shape), _operand("b", b, key, shape)])
    x, y = _log_gamma(key, both, stream)
    return torch.sigmoid(x - y).to(dtype)


@entry()
def dirichlet(
    key: Tensor,
    concentration: float | Tensor,
    shape: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    stream: int = 0,
) -> Tensor:
    """Draw from the Dirichlet distribution: shares along the last axis, which sum to 1. Differentiable.

    Args:
      key: i64[2].
      concentration: A positive Python number, or a floating tensor on the key's device that broadcasts to ``shape``.
      shape: Shape of the result; its last axis runs over the shares.
      dtype: Of the result.
      stream: Part of the counter.

    Raises:
      LayoutError: If ``key`` is not an i64[2], or ``concentration`` is on another device or does not broadcast.
      TypeError: If a tensor ``concentration`` or ``dtype`` is not floating, or ``shape`` not a tuple of Python ints.
      ValueError: If ``concentration`` is neither a tensor nor a positive Python number.

    Example:
      >>> import torch
      >>> from functional_cg.random import dirichlet, key
      >>> dirichlet(key(0), torch.ones(3), (2, 3)).sum(-1)
      tensor([1., 1.])
    """
    check_floating(dtype)
    shares = torch.softmax(_log_gamma(key, _operand("concentration", concentration, key, shape), stream), -1)
    return shares.to(dtype)


@entry()
def poisson(key: Tensor, rate: float | Tensor, shape: Sequence[int], *, stream: int = 0) -> Tensor:
    """Draw counts, i64, from the Poisson distribution, by bisection of its distribution function.

    Args:
      key: i64[2].
      rate: A positive Python number, or a floating tensor on the key's device that broadcasts to ``shape``; where its
        values are negative or NaN, the result is -1.
      shape: Shape of the result.
      stream: Part of the counter.

    Raises:
      LayoutError: If ``key`` is not an i64[2], or ``rate`` is on another device or does not broadcast.
      TypeError: If a tensor ``rate`` is not floating, or ``shape`` is not a tuple of Python ints.
      ValueError: If ``rate`` is neither a tensor nor a positive Python number.

    Example:
      >>> from functional_cg.random import key, poisson
      >>> round(poisson(key(0), 4.0, (10_000,)).double().mean().item(), 1)
      4.0
    """
    mean = _operand("rate", rate, key, shape).detach()
    unit = unit64(key, numel(shape), stream).view(shape)
    quantile = torch.special.ndtri(unit.clamp(min=SMALLEST))
    middle = (mean + mean.sqrt() * quantile + (quantile.square() - 1) / 6).floor()
    low, high = (middle - _NEAR).clamp(min=0), (middle + _NEAR).clamp(min=0)
    for _ in range(_HALVINGS):
        half = ((low + high) / 2).floor()
        enough = torch.special.gammaincc(half + 1, mean) > unit  # the probability of at most so many
        low, high = torch.where(enough, low, half + 1), torch.where(enough, half, high)
    return torch.where(mean >= 0, high, -1.0).to(torch.int64)


def _check_number(name: str, value: object) -> None:
    if not isinstance(value, float | int) or not 0 < value < math.inf:
        raise ValueError(
            f"`{name}`: expected a positive Python number, got {describe(value)}.\nTo fix: `{name}=1.0`."
        )


def _operand(name: str, value: float | Tensor, key: Tensor, shape: Sequence[int]) -> Tensor:
    """Check a parameter; return it in f64, expanded to ``shape``."""
    check_key(key)
    numel(shape)
    if not isinstance(value, Tensor):
        _check_number(name, value)
        return torch.full(tuple(shape), float(value), dtype=torch.float64, device=key.device)
    check_operand(name, value, key)
    check_broadcast(name, value, shape)
    return value.to(torch.float64).expand(shape)


def _log_gamma(key: Tensor, concentration: Tensor, stream: int) -> Tensor:
    """Return the logarithms of gamma numbers, which do not underflow where concentrations are small."""
    each = 2 * _ROUNDS + 1
    unit = unit64(key, each * concentration.numel(), stream).view(each, *concentration.shape)
    result: Tensor = _LogGamma.apply(unit, concentration)
    return result


class _LogGamma(torch.autograd.Function):
    """The logarithm of a gamma number, differentiable in its concentration.

    A number of concentration ``a < 1`` is one of ``a + 1``, times ``u ** (1 / a)`` for a uniform u.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(unit: Tensor, concentration: Tensor) -> Tensor:
        small = concentration < 1
        d = torch.where(small, concentration + 1, concentration) - 1 / 3
        normal = torch.erfinv(unit[:_ROUNDS] * 2 - (1 - SMALLEST)) * math.sqrt(2)
        threshold = torch.log1p(-unit[_ROUNDS:-1])
        cube = (1 + normal * (9 * d).rsqrt()) ** 3
        log = cube.clamp(min=torch.finfo(torch.float64).tiny).log()
        accepted = (cube > 0) & (threshold < normal.square() / 2 + d - d * cube + d * log)
        # The earlier, the larger: so the largest is the first that is accepted.
        order = torch.arange(_ROUNDS, 0, -1, device=log.device).view(-1, *[1] * concentration.dim())
        first = (accepted * order).argmax(0, keepdim=True)
        chosen = log.gather(0, first).squeeze(0)
        lowered = torch.where(small, torch.log1p(-unit[-1]) / concentration, 0.0)
        return torch.where(concentration > 0, d.log() + chosen + lowered, math.nan)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1], output)
        ctx.save_for_forward(inputs[1], output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, grad * _slope(*ctx.saved_tensors)

    @staticmethod
    def jvp(ctx: Any, unit: Any, tangent: Tensor) -> Any:
        return tangent * _slope(*ctx.saved_tensors)


def _slope(concentration: Tensor, log: Tensor) -> Tensor:
    """Return how the logarithm of a gamma number changes with its concentration, at a fixed probability."""
    value = log.clamp(min=_TINY).exp()
    near_zero = (torch.digamma(concentration + 1) - log) / concentration
    return torch.where(log > _TINY, torch._standard_gamma_grad(concentration, value) / value, near_zero)
