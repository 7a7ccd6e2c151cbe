"""Validates factory arguments, with hints for users coming from ``torch.optim``."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

# Name in torch.optim -> what to write here.
_HERE = MappingProxyType(
    {
        "lr": "`learning_rate=...`",
        "betas": "`b1=..., b2=...`",
        "params": "`fcg.TrainState.create(params=params, optimizer=optimizer)`",
    }
)


def refuse_unknown(factory: type, options: Mapping[str, Any]) -> None:
    """Raise for a keyword the factory does not take.

    Raises:
      TypeError: Lists the arguments it takes, and the equivalent of a ``torch.optim`` name.
    """
    known = inspect.signature(factory).parameters
    unknown = next((name for name in options if name not in known), None)
    if unknown is None or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values()):
        return
    name, taken = factory.__name__, ", ".join(f"`{name}`" for name in known)
    fix = f" To fix: {_HERE[unknown]} in place of `{unknown}`." if unknown in _HERE else ""
    raise TypeError(f"{name}: has no argument `{unknown}`; it takes {taken or 'none'}.{fix}")


def seed_of(factory: str, key: Tensor | int) -> int:
    """Convert a key to a Python int, so that the transformation can be compared, hashed and pickled.

    Raises:
      TypeError: If ``key`` is neither a key nor a Python int.
    """
    if isinstance(key, int) and not isinstance(key, bool):
        return key
    if isinstance(key, Tensor) and key.dtype == torch.int64 and key.shape == (2,):
        low, high = key.tolist()
        return int(low + (high << 32))
    raise TypeError(
        f"{factory}: key must be a key, i64[2], or a Python int, got {type(key).__name__}: {key!r}. "
        "To fix: `key=fcg.random.key(0)`."
    )


def refuse_without_rate(name: str, tx: Any) -> None:
    """Refuse an optimizer whose updates lead uphill: without a learning rate, or with several in a row.

    Raises:
      ValueError: Names the missing link.
    """
    twice = tx.turns_twice
    if twice:
        raise ValueError(
            f"{name}: the optimizer has {len(twice)} learning rates in a row: {', then '.join(map(repr, twice))}. Each "
            "turns the sign, and scales what the one before has made.\nTo fix: keep one of them; "
            "`optim.scale(0.5)` scales steps without turning them.",
        )
    part = tx.lacks_rate
    if part is None:
        return
    raise ValueError(
        f"{name}: the optimizer has no learning rate: {part!r} makes a direction, and added to the parameters it would "
        "lead uphill.\nTo fix: put one behind it, `optim.chain(..., optim.scale_by_learning_rate(1e-3))`; or use an "
        "optimizer that has one, such as `optim.adam(1e-3)`.",
    )


def require(condition: object, message: str) -> None:
    """Raise ``ValueError(message)`` unless ``condition``."""
    if not condition:
        raise ValueError(message)


def are_numbers(factory: str, **values: object) -> None:
    """Raise ``TypeError`` for the first value, by its name, that is neither a number nor a tensor."""
    for name, value in values.items():
        if not isinstance(value, (numbers.Real, Tensor)):
            raise TypeError(f"{factory}: {name} must be a number, got {type(value).__name__}")


def rate_in_range(name: str, value: object) -> None:
    """Raise for a learning rate below 0; a schedule of it goes unchecked.

    Raises:
      TypeError: If the value is not a number, tensor or schedule.
      ValueError: If it is a number out of range.
    """
    if callable(value):
        return
    if not isinstance(value, (numbers.Real, Tensor)):
        raise TypeError(f"{name} must be a number, a tensor or a schedule, got {type(value).__name__}")
    in_range(name, value)


def in_range(name: str, value: object, *, low: float = 0.0, below: float = float("inf")) -> None:
    """Raise for a Python number outside [low, below); tensors go unchecked, since reading one is a host sync.

    Raises:
      TypeError: If the value is not a number or tensor; says how to schedule it.
      ValueError: If it is a number out of range.
    """
    if not isinstance(value, (numbers.Real, Tensor)):
        raise TypeError(
            f"{name} must be a number or a tensor, got "
            + (
                f"{value!r}.\nTo fix: a schedule of `optim` may stand for it in "
                "`optim.inject_hyperparams(factory)(...)`, with the optimizer as the factory and its numbers by name."
                if callable(value)
                else type(value).__name__
            )
        )
    if isinstance(value, (int, float)) and not low <= value < below:
        bound = f"in [{low:g}, {below:g})" if below != float("inf") else f"at least {low:g} and finite"
        raise ValueError(f"{name} must be {bound}, got {value!r}")


def positive(name: str, value: object, *, below: float = float("inf")) -> None:
    """Raise for whatever :func:`in_range` rejects, and for 0."""
    in_range(name, value, below=below)
    require(not isinstance(value, (int, float)) or value, f"{name} is 0")
