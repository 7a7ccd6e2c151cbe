"""Validates factory arguments, with hints for users coming from ``torch.optim``."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor

from ...manual import Documented

# Name in torch.optim -> what to write here.
_HERE = MappingProxyType(
    {
        "lr": "`learning_rate=...`",
        "betas": "`b1=..., b2=...`",
        "params": "`fcg.TrainState.create(params=params, optimizer=optimizer)`",
        "rho": "`decay=...`",
        "alpha": "`decay=...`",
        "amsgrad": "`fcg.optim.amsgrad(...)`",
        "weight_decay": "`fcg.optim.chain(fcg.optim.add_decayed_weights(...), fcg.optim.{factory}(...))`",
        "foreach": "",
        "fused": "",
        "capturable": "",
        "differentiable": "",
    }
)


_EXAMPLES = MappingProxyType(
    {
        "learning_rate": "1e-3",
        "weight_decay": "0.01",
        "max_norm": "1.0",
        "init_value": "1e-3",
        "peak_value": "1e-3",
        "end_value": "0.0",
        "warmup_steps": "100",
        "decay_steps": "1000",
        "transition_steps": "1000",
        "decay_rate": "0.9",
        "boundaries_and_scales": "{1000: 0.1}",
    }
)
# What an optimizer of torch has -> what to do here.
_OF_TORCH = MappingProxyType(
    {
        "zero_grad": "leave it out: gradients are values, and nothing adds to them",
        "param_groups": "`state = fcg.optim.set_hyperparams(state, learning_rate=1e-4)`, of an optimizer made by "
        "`fcg.optim.inject_hyperparams(fcg.optim.sgd)(learning_rate=0.1)`",
        "add_param_group": "`fcg.optim.partition(transformations, labels)`",
        "state": "`state.opt_state`",
        "state_dict": "`fcg.state_dict(state)`, or `fcg.save(path, state)`",
        "load_state_dict": "`state = fcg.load_state_dict(state, values)`, or `state = fcg.load(path, state)`",
        "minimize": "`state = state.apply_gradients(grads)`",
        "apply_gradients": "`state = state.apply_gradients(grads)`",
    }
)


def no_such_attribute(tx: Any, name: str) -> AttributeError:
    """Return the error for an attribute that an optimizer here does not have."""
    fix = f".\nTo fix: {_OF_TORCH[name]}." if name in _OF_TORCH else ""
    return AttributeError(f"{type(tx).__name__!r} object has no attribute {name!r}{fix}", name=name, obj=tx)


class Called(metaclass=Documented):
    """An immutable value made by a call whose arguments are checked by name."""

    def __new__(cls, *args: Any, **options: Any) -> Self:
        _refuse(cls, args, options)
        return super().__new__(cls)


def _refuse(factory: type, given: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    """Raise for a keyword the factory does not take, and if some, but not all arguments that it requires are given.

    Unpickling gives none.

    Raises:
      TypeError: Lists the arguments it takes, and the equivalent of a ``torch.optim`` name; or the ones that are
        missing, with an example.
    """
    known = inspect.signature(factory).parameters
    name = factory.__name__
    unknown = next((one for one in options if one not in known), None)
    if unknown is not None and not any(one.kind is one.VAR_KEYWORD for one in known.values()):
        taken = ", ".join(f"`{one}`" for one in known)
        if unknown in _HERE and not _HERE[unknown]:
            fix = f" To fix: leave `{unknown}` out."
        else:
            here = _HERE.get(unknown, "").format(factory=name) or _by_torch(name, unknown)
            fix = f" To fix: {here} in place of `{unknown}`." if here else ""
        raise TypeError(f"{name}: has no argument `{unknown}`; it takes {taken or 'none'}.{fix}")
    required = [
        one.name for one in known.values() if one.default is one.empty and one.kind is not one.VAR_KEYWORD
    ]
    missing = [one for one in required if one in list(known)[len(given) :] and one not in options]
    if (given or options) and missing and all(one in _EXAMPLES for one in required):
        example = ", ".join(f"{one}={_EXAMPLES[one]}" for one in required)
        raise TypeError(
            f"{name}: needs {' and '.join(f'`{one}`' for one in missing)}.\n"
            f"To fix: `fcg.optim.{name}({example})`."
        )


def _by_torch(name: str, argument: str) -> str:
    """Return how the class of torch of the same name is adapted, if it takes the argument; else ""."""
    for cls in vars(torch.optim).values():
        if (
            inspect.isclass(cls)
            and cls.__name__.lower() == name
            and argument in inspect.signature(cls).parameters
        ):
            return f"`fcg.optim.from_torch(torch.optim.{cls.__name__}, {argument}=..., ...)`"
    return ""


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
    """Refuse an optimizer whose updates lead uphill: without a learning rate, with several, or with one too early.

    Raises:
      ValueError: Names the missing link.
    """
    for path in tx.paths:
        rates = [link for link in path if link.role == "rate"]
        late = [link for link in (path[path.index(rates[0]) :] if rates else ()) if link.role == "direction"]
        require(
            len(rates) < 2,
            f"{name}: the optimizer has {len(rates)} learning rates in a row: {', then '.join(map(repr, rates))}. Each "
            "turns the sign, and scales what the one before has made.\nTo fix: keep one of them; "
            "`optim.scale(0.5)` scales steps without turning them.",
        )
        if late:
            rate, link = rates[0], late[0]
            raise ValueError(
                f"{name}: the optimizer has {link!r} behind a learning rate, that of {rate!r}. It takes gradients, and "
                "gets steps: nothing is left of the rate, or weights decay the wrong way.\nTo fix: put it before the "
                f"learning rate, `optim.chain(optim.{type(link).__name__}(...), optim.{type(rate).__name__}(...))`.",
            )
        require(
            any(link.role in ("rate", "step", "trusted") for link in path),
            f"{name}: the optimizer has no learning rate: {(path or (tx,))[-1]!r} makes a direction, and added to the "
            "parameters it would lead uphill.\nTo fix: put one behind it, "
            "`optim.chain(..., optim.scale_by_learning_rate(1e-3))`; or use an optimizer that has one, such as "
            "`optim.adam(1e-3)`.",
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
        if name.endswith("_steps") and isinstance(value, float) and 0 < value < 1:
            raise ValueError(
                f"{factory}: {name} counts updates, got {value}.\nTo fix: look at the order of the arguments, "
                f"`{', '.join(values)}`, or pass them by name."
            )


_SCHEDULED = ("constant", "end", "init", "peak")  # values of a schedule


def in_range(
    name: str,
    value: object,
    *,
    low: float = 0.0,
    below: float = math.inf,
    zero: bool = True,
    rate: bool = False,
    count: bool = False,
) -> None:
    """Raise for a number outside [low, below), and for 0 unless ``zero``; a ``rate`` may be a schedule.

    A ``count`` is an int.

    Tensors go unchecked, since reading one is a host sync.

    Raises:
      TypeError: If the value is not a number or tensor; says how to schedule it.
      ValueError: If it is a number out of range.
    """
    if rate and callable(value):
        return
    if not isinstance(value, (numbers.Real, Tensor)):
        got = type(value).__name__
        if rate:
            raise TypeError(
                f"{name} must be a number, a tensor or a schedule, got {got}.\nTo fix: {_in_place_of(value)}."
            )
        if callable(value):
            got = (
                f"{value!r}.\nTo fix: a schedule of `optim` may stand for it in "
                "`optim.inject_hyperparams(factory)(...)`, with the optimizer as the factory and its numbers by name."
            )
        raise TypeError(f"{name} must be a number or a tensor, got {got}")
    if not isinstance(value, Tensor) and not (low <= float(value) < below and (zero or value)):
        if below != math.inf:
            bound = f"in {'[' if zero else '('}{low:g}, {below:g})"
        else:
            bound = f"at least {low:g} and finite" if zero else "positive and finite"
        turned = value < 0 and name.endswith(("learning_rate", *(f": {one}_value" for one in _SCHEDULED)))
        fix = (
            f".\nTo fix: `{-value!r}`; updates lead downhill already, `optim.scale(-1.0)` turns them."
            if turned
            else ""
        )
        raise ValueError(f"{name} must be {bound}, got {value!r}{fix}")
    if count and not isinstance(value, int):
        raise ValueError(f"{name} is a count, got {value!r}")


def _in_place_of(value: object) -> str:
    """What to pass as a learning rate, given what torch takes first: groups, or parameters."""
    if isinstance(value, list):
        return "groups are `fcg.optim.partition(transformations, fcg.optim.by_name(patterns, default=label))`"
    if isinstance(value, Iterator):
        return "the rate comes first; parameters go to `fcg.TrainState.create(params=params, optimizer=optimizer)`"
    return "`1e-3`, or `fcg.optim.warmup_cosine(1e-3, 100, 1000)`"


# The range of the numbers of an argument of some name, wherever it occurs; for the others there is none.
_RANGES: Sequence[tuple[str, Mapping[str, Any]]] = (
    ("b1 b2 decay momentum", MappingProxyType({"below": 1.0})),
    ("max_norm max_delta threshold clipping", MappingProxyType({"zero": False})),
    ("eps weight_decay initial_accumulator_value eta gamma momentum_decay decay_rate", MappingProxyType({})),
    ("trust_coefficient min_scale clipping_threshold slow_step_size weight_lr_power", MappingProxyType({})),
    ("learning_rate adamw_learning_rate", MappingProxyType({"rate": True})),
    ("ns_steps", MappingProxyType({"count": True})),
    ("step_size", MappingProxyType({"low": -math.inf})),
)


def check_numbers(of: Any) -> None:
    """Raise for a field of a dataclass that holds a number out of the range that its name has.

    Raises:
      TypeError: If it holds neither a number nor a tensor.
      ValueError: If the number is out of range.
    """
    for one in fields(of):
        name, value = f"{type(of).__name__}: {one.name}", getattr(of, one.name)
        if isinstance(one.default, tuple) or (value is None and one.default is None):
            continue  # the class checks what it takes beside numbers
        for names, limits in _RANGES:
            if one.name in names.split():
                in_range(name, value, **limits)
