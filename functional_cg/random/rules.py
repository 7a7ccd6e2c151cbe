"""Draws torch's random ops from a key: the same distributions, as functions of key and stream."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..tensors.aten import full_name, named_arguments
from . import distributions, samplers
from .arguments import check_floating
from .masking import masked_scale

__all__ = ["draw", "fill_truncated", "is_drawn"]


@dataclass(frozen=True, slots=True)
class _Draw:
    """A call of a random op: where its numbers come from, and its arguments by name."""

    key: Tensor
    stream: int
    given: Mapping[str, Any]

    def __call__(self, sampler: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
        """Draw from a distribution of the library."""
        return sampler(self.key, *args, stream=self.stream, **options)

    @property
    def like(self) -> Any:
        """The tensor that it fills, takes the shape of, or finds its parameters in; None if there is none."""
        return self.given.get("self")

    @property
    def shape(self) -> Any:
        return self.given["size"] if "size" in self.given else self.like.shape

    def dtype(self, default: torch.dtype | None = None) -> torch.dtype:
        # The schema gives the default dtype of integer ops as a C++ enum value.
        given = self.given.get("dtype")
        if isinstance(given, torch.dtype):
            return given
        return self.like.dtype if self.like is not None else default or torch.get_default_dtype()


def is_drawn(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a key can replace the draw: the op is known, and the call passes no generator and no ``out``."""
    named = named_arguments(func, args, kwargs)
    return full_name(func) in _RULES and named.get("generator") is None and "out" not in named


def draw(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], key: Tensor, stream: int) -> Any:
    """Run the call with numbers from ``key`` and ``stream``, filling its argument in place if torch's op does."""
    name, named = full_name(func), named_arguments(func, args, kwargs)
    values = _RULES[name](_Draw(key, stream, named))
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


def _uniform(draw: _Draw) -> Tensor:
    low, high = draw.given.get("from", 0.0), draw.given.get("to", 1.0)
    return draw(samplers.uniform, draw.shape, low=low, high=high, dtype=draw.dtype())


def _normal(draw: _Draw) -> Tensor:
    mean, std = draw.given.get("mean", 0.0), draw.given.get("std", 1.0)
    tensors = [value for value in (mean, std) if isinstance(value, Tensor)]
    if not tensors:
        return draw(samplers.normal, draw.shape, mean=mean, std=std, dtype=draw.dtype())
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    values: Tensor = draw(samplers.normal, shape, dtype=tensors[0].dtype) * std + mean
    return values


def _coins(draw: _Draw, p: Tensor | float, shape: Sequence[int]) -> Tensor:
    """True with probability p, using 16 bits per element, as in dropout, where those are precise enough."""
    if isinstance(p, float) and 0.01 <= p <= 0.99:
        return draw(samplers.keep_mask, 1 - p, shape)
    return draw(samplers.bernoulli, p, shape)


def _exponential(draw: _Draw) -> Tensor:
    return draw(distributions.exponential, draw.like.shape, dtype=torch.float64)


def _geometric(draw: _Draw) -> Tensor:
    """The number of coins up to the first head."""
    p = draw.given["p"]
    return torch.ones_like(draw.like) if p == 1 else (_exponential(draw) / -math.log1p(-p)).ceil()


def _integers(draw: _Draw) -> Tensor:
    """Draw what ``random_`` does: unless told otherwise, all integers from 0 that the dtype holds without a gap."""
    dtype, low, high = draw.like.dtype, draw.given.get("from", 0), draw.given.get("to")
    if high is None and dtype.is_floating_point:
        high = round(2 / torch.finfo(dtype).eps) + 1
    elif high is None:
        high = 2 if dtype == torch.bool else torch.iinfo(dtype).max + 1
    return draw(samplers.randint, draw.like.shape, low, high)


def _leaky(draw: _Draw) -> Tensor:
    """RReLU: a negative number times a random slope. Like torch, hands the slopes to the backward in ``noise``."""
    x, lower, upper = (draw.given[name] for name in ("self", "lower", "upper"))
    slope = draw(samplers.uniform, x.shape, dtype=torch.float64) * (upper - lower) + lower
    result: Tensor = x * draw.given["noise"].copy_(torch.where(x <= 0, slope, 1.0))
    return result


def _multinomial(draw: _Draw) -> Tensor:
    weights, n = draw.like.to(torch.float64), draw.given["num_samples"]
    if draw.given["replacement"]:
        rows = weights.unsqueeze(-2).expand(*weights.shape[:-1], n, weights.shape[-1])
        return draw(samplers.categorical, rows.log())
    # An exponential race: each category arrives after an exponential time with its weight as rate; take the first n.
    first: Tensor = (_exponential(draw) / weights).topk(n, largest=False).indices
    return first


def _dropout(draw: _Draw) -> tuple[Tensor, Tensor]:
    x, p = draw.given["input"], draw.given["p"]
    mask = _coins(draw, 1 - p, x.shape)
    # The backward uses exactly this scale.
    return masked_scale(x, mask, 0.0 if p == 1 else 1 / (1 - p)), mask


def _bernoulli(draw: _Draw) -> Tensor:
    return _coins(draw, draw.given.get("p", draw.like), draw.like.shape).to(draw.like.dtype)


def _randint(draw: _Draw) -> Tensor:
    # Draw in 64 bits: the requested dtype may be floating.
    whole = draw(samplers.randint, draw.shape, draw.given.get("low", 0), draw.given["high"])
    return whole.to(draw.dtype(torch.int64))


# What an op draws, as a function of its call.
_RULES: Mapping[str, Callable[[_Draw], Any]] = MappingProxyType(
    {
        "aten::_sample_dirichlet": lambda draw: draw(
            distributions.dirichlet, draw.like, draw.shape, dtype=draw.like.dtype
        ),
        "aten::_standard_gamma": lambda draw: draw(
            distributions.gamma, draw.like, draw.shape, dtype=draw.like.dtype
        ),
        "aten::bernoulli": _bernoulli,
        "aten::bernoulli_": _bernoulli,
        "aten::cauchy_": lambda draw: (
            ((draw(samplers.uniform, draw.shape, dtype=torch.float64) - 0.5) * math.pi).tan()
            * draw.given.get("sigma", 1.0)
            + draw.given.get("median", 0.0)
        ),
        "aten::exponential_": lambda draw: _exponential(draw) / draw.given.get("lambd", 1.0),
        "aten::geometric_": _geometric,
        "aten::log_normal_": lambda draw: (
            draw(samplers.normal, draw.shape, dtype=torch.float64) * draw.given.get("std", 2.0)
            + draw.given.get("mean", 1.0)
        ).exp(),
        "aten::multinomial": _multinomial,
        "aten::native_dropout": _dropout,
        "aten::normal": _normal,
        "aten::normal_": _normal,
        "aten::normal_functional": _normal,
        "aten::poisson": lambda draw: draw(distributions.poisson, draw.like, draw.shape).to(draw.like.dtype),
        "aten::rand": _uniform,
        "aten::rand_like": _uniform,
        "aten::randint": _randint,
        "aten::randint_like": _randint,
        "aten::randn": _normal,
        "aten::randn_like": _normal,
        "aten::random_": _integers,
        "aten::randperm": lambda draw: draw(samplers.permutation, draw.given["n"]).to(
            draw.dtype(torch.int64)
        ),
        "aten::rrelu_with_noise": _leaky,
        "aten::rrelu_with_noise_": _leaky,
        "aten::uniform_": _uniform,
    }
)
