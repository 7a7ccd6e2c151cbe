"""Draws torch's random ops from a key: the same distributions, as functions of key and stream."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..tensors.aten import full_name, named_arguments
from . import distributions, samplers
from .arguments import check_floating
from .masking import masked_scale

__all__ = ["draw", "fill_truncated", "is_drawn"]

Arguments = Mapping[str, Any]


def is_drawn(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a key can replace the draw: the op is known, and the call passes no generator and no ``out``."""
    named = named_arguments(func, args, kwargs)
    return full_name(func) in _RULES and named.get("generator") is None and "out" not in named


def draw(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], key: Tensor, stream: int) -> Any:
    """Run the call with numbers from ``key`` and ``stream``, filling its argument in place if torch's op does."""
    name, named = full_name(func), named_arguments(func, args, kwargs)
    values = _RULES[name](key, stream, named)
    if name.endswith("_"):
        return named["self"].copy_(values)
    if "device" not in named:
        return values
    like = named.get("self")
    return values.to(named["device"] or (torch.get_default_device() if like is None else like.device))


def fill_truncated(
    tensor: Tensor, mean: float, std: float, low: float, high: float, key: Tensor, stream: int
) -> None:
    """Fill a tensor in place from the normal distribution between two bounds; both may be drawn."""
    check_floating(tensor.dtype)
    draws = distributions.truncated_normal(
        key, tensor.shape, (low - mean) / std, (high - mean) / std, dtype=torch.float64, stream=stream
    )
    with torch.no_grad():
        tensor.copy_((draws * std + mean).clamp(low, high))


def _shape(a: Arguments) -> Sequence[int]:
    size: Sequence[int] = a["size"] if "size" in a else a["self"].shape
    return size


def _dtype(a: Arguments, default: torch.dtype | None = None) -> torch.dtype:
    # The schema gives the default dtype of integer ops as a C++ enum value.
    given = a.get("dtype")
    if isinstance(given, torch.dtype):
        return given
    like: Tensor | None = a.get("self")
    return like.dtype if like is not None else default or torch.get_default_dtype()


def _uniform(key: Tensor, stream: int, a: Arguments) -> Tensor:
    low, high = a.get("from", 0.0), a.get("to", 1.0)
    return samplers.uniform(key, _shape(a), low=low, high=high, dtype=_dtype(a), stream=stream)


def _normal(key: Tensor, stream: int, a: Arguments) -> Tensor:
    mean, std = a.get("mean", 0.0), a.get("std", 1.0)
    tensors = [value for value in (mean, std) if isinstance(value, Tensor)]
    if not tensors:
        return samplers.normal(key, _shape(a), mean=mean, std=std, dtype=_dtype(a), stream=stream)
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    values: Tensor = samplers.normal(key, shape, dtype=tensors[0].dtype, stream=stream) * std + mean
    return values


def _coins(key: Tensor, stream: int, p: Tensor | float, shape: Sequence[int]) -> Tensor:
    """True with probability p, using 16 bits per element, as in dropout, where those are precise enough."""
    if isinstance(p, float) and 0.01 <= p <= 0.99:
        return samplers.keep_mask(key, 1 - p, shape, stream=stream)
    return samplers.bernoulli(key, p, shape, stream=stream)


def _bernoulli(key: Tensor, stream: int, a: Arguments) -> Tensor:
    return _coins(key, stream, a.get("p", a["self"]), a["self"].shape).to(a["self"].dtype)


def _exponential(key: Tensor, stream: int, a: Arguments) -> Tensor:
    times = distributions.exponential(key, a["self"].shape, dtype=torch.float64, stream=stream)
    result: Tensor = times / a.get("lambd", 1.0)
    return result


def _cauchy(key: Tensor, stream: int, a: Arguments) -> Tensor:
    angle = (samplers.uniform(key, a["self"].shape, dtype=torch.float64, stream=stream) - 0.5) * math.pi
    result: Tensor = angle.tan() * a.get("sigma", 1.0) + a.get("median", 0.0)
    return result


def _log_normal(key: Tensor, stream: int, a: Arguments) -> Tensor:
    draws = samplers.normal(key, a["self"].shape, dtype=torch.float64, stream=stream)
    result: Tensor = (draws * a.get("std", 2.0) + a.get("mean", 1.0)).exp()
    return result


def _geometric(key: Tensor, stream: int, a: Arguments) -> Tensor:
    """The number of coins up to the first head."""
    if a["p"] == 1:
        return torch.ones_like(a["self"])
    return (_exponential(key, stream, {"self": a["self"]}) / -math.log1p(-a["p"])).ceil()


def _integers(key: Tensor, stream: int, a: Arguments) -> Tensor:
    """Draw what ``random_`` does: unless told otherwise, all integers from 0 that the dtype holds without a gap."""
    dtype, low, high = a["self"].dtype, a.get("from", 0), a.get("to")
    if high is None and dtype.is_floating_point:
        high = round(2 / torch.finfo(dtype).eps) + 1
    elif high is None:
        high = 2 if dtype == torch.bool else torch.iinfo(dtype).max + 1
    return samplers.randint(key, a["self"].shape, low, high, stream=stream)


def _gamma(key: Tensor, stream: int, a: Arguments) -> Tensor:
    alpha = a["self"]
    return distributions.gamma(key, alpha, alpha.shape, dtype=alpha.dtype, stream=stream)


def _dirichlet(key: Tensor, stream: int, a: Arguments) -> Tensor:
    alpha = a["self"]
    return distributions.dirichlet(key, alpha, alpha.shape, dtype=alpha.dtype, stream=stream)


def _poisson(key: Tensor, stream: int, a: Arguments) -> Tensor:
    return distributions.poisson(key, a["self"], a["self"].shape, stream=stream).to(a["self"].dtype)


def _leaky(key: Tensor, stream: int, a: Arguments) -> Tensor:
    """RReLU: a negative number times a random slope. Like torch, hands the slopes to the backward in ``noise``."""
    x, noise = a["self"], a["noise"]
    slope = samplers.uniform(key, x.shape, dtype=torch.float64, stream=stream)
    slope = slope * (a["upper"] - a["lower"]) + a["lower"]
    noise.copy_(torch.where(x <= 0, slope, 1.0))
    result: Tensor = x * noise
    return result


def _randint(key: Tensor, stream: int, a: Arguments) -> Tensor:
    # Draw in 64 bits: the requested dtype may be floating.
    whole = samplers.randint(key, _shape(a), a.get("low", 0), a["high"], stream=stream)
    return whole.to(_dtype(a, torch.int64))


def _permutation(key: Tensor, stream: int, a: Arguments) -> Tensor:
    return samplers.permutation(key, a["n"], stream=stream).to(_dtype(a, torch.int64))


def _multinomial(key: Tensor, stream: int, a: Arguments) -> Tensor:
    weights, n = a["self"].to(torch.float64), a["num_samples"]
    if a["replacement"]:
        rows = weights.unsqueeze(-2).expand(*weights.shape[:-1], n, weights.shape[-1])
        return samplers.categorical(key, rows.log(), stream=stream)
    # An exponential race: each category arrives after an exponential time with its weight as rate; take the first n.
    times = _exponential(key, stream, {"self": weights}) / weights
    first: Tensor = times.topk(n, largest=False).indices
    return first


def _dropout(key: Tensor, stream: int, a: Arguments) -> tuple[Tensor, Tensor]:
    x, p = a["input"], a["p"]
    mask = _coins(key, stream, 1 - p, x.shape)
    # The backward uses exactly this scale.
    return masked_scale(x, mask, 0.0 if p == 1 else 1 / (1 - p)), mask


_RULES: Mapping[str, Callable[[Tensor, int, Arguments], Any]] = MappingProxyType(
    {
        "aten::_sample_dirichlet": _dirichlet,
        "aten::_standard_gamma": _gamma,
        "aten::bernoulli": _bernoulli,
        "aten::bernoulli_": _bernoulli,
        "aten::cauchy_": _cauchy,
        "aten::exponential_": _exponential,
        "aten::geometric_": _geometric,
        "aten::log_normal_": _log_normal,
        "aten::multinomial": _multinomial,
        "aten::native_dropout": _dropout,
        "aten::normal": _normal,
        "aten::normal_": _normal,
        "aten::normal_functional": _normal,
        "aten::poisson": _poisson,
        "aten::rand": _uniform,
        "aten::rand_like": _uniform,
        "aten::randint": _randint,
        "aten::randint_like": _randint,
        "aten::randn": _normal,
        "aten::randn_like": _normal,
        "aten::random_": _integers,
        "aten::randperm": _permutation,
        "aten::rrelu_with_noise": _leaky,
        "aten::rrelu_with_noise_": _leaky,
        "aten::uniform_": _uniform,
    }
)
