"""Draws torch's random ops from a key: the same distributions, as functions of key and stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .. import random
from ..random.masking import masked_scale
from ..tensors.aten import named_arguments

__all__ = ["draw", "is_drawn"]

Arguments = Mapping[str, Any]


def is_drawn(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a key can replace the draw: the op is known, and the call passes no generator."""
    name = func._schema.name
    known = name in _FILLS or (name in _VALUES and not func._schema.is_mutable)
    return known and named_arguments(func, args, kwargs).get("generator") is None


def draw(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], key: Tensor, stream: int) -> Any:
    """Run the call with numbers from ``key`` and ``stream``, filling its argument in place if torch's op does."""
    name, named = func._schema.name, named_arguments(func, args, kwargs)
    if name in _FILLS:
        return named["self"].copy_(_FILLS[name](key, stream, named))
    values = _VALUES[name](key, stream, named)
    if "device" not in named:
        return values
    like = named.get("self")
    return values.to(named["device"] or (torch.get_default_device() if like is None else like.device))


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
    return random.uniform(key, _shape(a), low=low, high=high, dtype=_dtype(a), stream=stream)


def _normal(key: Tensor, stream: int, a: Arguments) -> Tensor:
    mean, std = a.get("mean", 0.0), a.get("std", 1.0)
    tensors = [value for value in (mean, std) if isinstance(value, Tensor)]
    if not tensors:
        return random.normal(key, _shape(a), mean=mean, std=std, dtype=_dtype(a), stream=stream)
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    values: Tensor = random.normal(key, shape, dtype=tensors[0].dtype, stream=stream) * std + mean
    return values


def _coins(key: Tensor, stream: int, p: Tensor | float, shape: Sequence[int]) -> Tensor:
    """True with probability p, using 16 bits per element, as in dropout, where those are precise enough."""
    if isinstance(p, float) and 0.01 <= p <= 0.99:
        return random.keep_mask(key, 1 - p, shape, stream=stream)
    return random.bernoulli(key, p, shape, stream=stream)


def _bernoulli(key: Tensor, stream: int, a: Arguments) -> Tensor:
    return _coins(key, stream, a.get("p", a["self"]), a["self"].shape).to(a["self"].dtype)


def _exponential(key: Tensor, stream: int, a: Arguments) -> Tensor:
    unit = random.uniform(key, a["self"].shape, dtype=torch.float64, stream=stream)
    # Never zero: `gumbel_softmax` takes the logarithm.
    times: Tensor = (-torch.log1p(-unit)).clamp(min=2.0**-54) / a.get("lambd", 1.0)
    return times


def _randint(key: Tensor, stream: int, a: Arguments) -> Tensor:
    # Draw in 64 bits: the requested dtype may be floating.
    whole = random.randint(key, _shape(a), a.get("low", 0), a["high"], stream=stream)
    return whole.to(_dtype(a, torch.int64))


def _permutation(key: Tensor, stream: int, a: Arguments) -> Tensor:
    return random.permutation(key, a["n"], stream=stream).to(_dtype(a, torch.int64))


def _multinomial(key: Tensor, stream: int, a: Arguments) -> Tensor:
    weights, n = a["self"].to(torch.float64), a["num_samples"]
    if a["replacement"]:
        rows = weights.unsqueeze(-2).expand(*weights.shape[:-1], n, weights.shape[-1])
        return random.categorical(key, rows.log(), stream=stream)
    # An exponential race: each category arrives after an exponential time with its weight as rate; take the first n.
    times = _exponential(key, stream, {"self": weights}) / weights
    first: Tensor = times.topk(n, largest=False).indices
    return first


def _dropout(key: Tensor, stream: int, a: Arguments) -> tuple[Tensor, Tensor]:
    x, p = a["input"], a["p"]
    mask = _coins(key, stream, 1 - p, x.shape)
    # The backward uses exactly this scale.
    return masked_scale(x, mask, 0.0 if p == 1 else 1 / (1 - p)), mask


_VALUES: Mapping[str, Callable[[Tensor, int, Arguments], Any]] = MappingProxyType(
    {
        "aten::bernoulli": _bernoulli,
        "aten::multinomial": _multinomial,
        "aten::native_dropout": _dropout,
        "aten::normal": _normal,
        "aten::normal_functional": _normal,
        "aten::rand": _uniform,
        "aten::rand_like": _uniform,
        "aten::randint": _randint,
        "aten::randint_like": _randint,
        "aten::randn": _normal,
        "aten::randn_like": _normal,
        "aten::randperm": _permutation,
    }
)
_FILLS: Mapping[str, Callable[[Tensor, int, Arguments], Tensor]] = MappingProxyType(
    {
        "aten::bernoulli_": _bernoulli,
        "aten::exponential_": _exponential,
        "aten::normal_": _normal,
        "aten::uniform_": _uniform,
    }
)
