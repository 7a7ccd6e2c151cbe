"""Runs the host code of a stateful optimizer's step as a pure function of tensors.

Such a step counts with Python numbers, branches on them, reads ``.item()`` and writes ``p.data``. This module rebuilds
its functions with separate globals, in which ``math``, ``min`` or ``float`` accept tensors; a function mode keeps on
the device what would have been read; and where Python asks for the truth value of a tensor, both branches run and
``torch.where`` joins their results. Nothing outside this module is modified.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import itertools
import math
import types
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

MAX_RUNS = 64  # per step; a step that needs more is refused

_TO_HOST = frozenset({Tensor.cpu, Tensor.numpy, Tensor.tolist, Tensor.__index__, Tensor.__array__})
_FILLED = frozenset({torch.zeros_like, torch.ones_like, torch.full_like})
# Functions with a scalar factor for a tensor argument -> the name of that factor.
_SCALED = MappingProxyType({"add": "alpha", "sub": "alpha", "addcmul": "value", "addcdiv": "value"})


class RefusedError(Exception):
    """The step does something that no pure function of tensors can."""


def number(value: Any, device: torch.device) -> Tensor:
    """Convert a host number, or a tensor, to f64[]."""
    if isinstance(value, Tensor):
        return value.to(device=device, dtype=torch.float64).reshape(())
    return torch.full((), value, dtype=torch.float64, device=device)


# -- every path through a step ------------------------------------------------------------------------------------


def every_way(run: Callable[[Callable[[Tensor], bool]], list[Tensor]]) -> list[Tensor]:
    """Run every path through ``run`` and select the results that its conditions choose.

    Args:
      run: Takes a function that answers conditions; pure, and identical each time up to the first different answer.
    Raises:
      RefusedError: If there are more than ``MAX_RUNS`` paths.
    """
    runs = itertools.count(1)

    def join(given: list[bool]) -> list[Tensor]:
        """Answer as given first, then always True, and join what other answers would have given."""
        if next(runs) > MAX_RUNS:
            raise RefusedError(f"branches on tensors in more than {MAX_RUNS} ways")
        answers, asked = itertools.chain(given, itertools.repeat(True)), list[Tensor]()

        def answer(condition: Tensor) -> bool:
            asked.append(condition.reshape(()) != 0)
            return next(answers)

        out = run(answer)
        for i in reversed(range(len(given), len(asked))):
            other = join([*given, *[True] * (i - len(given)), False])
            out = [torch.where(asked[i], a, b) for a, b in zip(out, other, strict=True)]
        return out

    return join([])


# -- numbers on the device ----------------------------------------------------------------------------------------


class HostNumbers(TorchFunctionMode):
    """Keeps on the device what a step would read on the host.

    Numbers are f64[]: like a Python number, a 0-dim tensor does not promote a tensor that has dimensions.

    Args:
      device: Where numbers live.
      ask: Answers conditions.
    """

    def __init__(self, device: torch.device, ask: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.device = device
        self.ask = ask

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _INSTEAD:
            return _INSTEAD[func](self, *args)
        if func in _TO_HOST:
            raise RefusedError(f"reads a tensor on the host, by `{func.__name__}`")
        if func is torch.tensor and isinstance(args[0], (int, float)):
            dtype = kwargs.get("dtype") or torch.get_default_dtype()
            return torch.full((), args[0], dtype=dtype, device=self.device)
        if func is Tensor.__setitem__ and isinstance(args[1], Tensor) and args[1].dtype == torch.bool:
            return args[0].copy_(torch.where(args[1], args[2], args[0]))
        if func is torch.full_like and isinstance(args[1], Tensor):
            return torch.zeros_like(args[0]) + _beside(args[1], args[0])
        out = kwargs.pop("out", None)
        args, kwargs = _unscaled(func, list(args), kwargs)
        result = func(*args, **kwargs)
        if (
            func in _FILLED
        ):  # while states are initialized, one number may stand for all elements, which cannot be written
            result = result.contiguous()
        return result if out is None else out.copy_(result)


# A function that reads a number, or gets round autograd -> what runs in its place.
_INSTEAD: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        Tensor.item: lambda mode, value: number(value, mode.device),
        Tensor.__float__: lambda mode, value: number(value, mode.device),
        Tensor.__int__: lambda mode, value: number(value, mode.device),
        Tensor.__bool__: lambda mode, condition: mode.ask(condition),
        Tensor.data.__get__: lambda mode, value, *_: value.detach(),  # type: ignore[attr-defined]
        Tensor.data.__set__: lambda mode, value, new: value.copy_(new),  # type: ignore[attr-defined]
    }
)


def _unscaled(func: Any, args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Multiply a tensor passed as a scalar factor into the argument that it scales."""
    name = getattr(func, "__name__", "").removesuffix("_")
    scale = _SCALED.get(name)
    if scale is None:
        return args, kwargs
    tensors = 2 if scale == "alpha" else 3
    if len(args) > tensors:  # deprecated argument order: the factor first
        kwargs[scale] = args.pop(1)
    value = kwargs.get(scale)
    if isinstance(value, Tensor):
        del kwargs[scale]
        args[1] = args[1] * _beside(value, args[1])
    return args, kwargs


def _beside(value: Tensor, tensor: Any) -> Tensor:
    return value.to(tensor.dtype) if isinstance(tensor, Tensor) and tensor.is_floating_point() else value


# -- functions with separate globals -----------------------------------------------------------------------------


def _either(plain: Callable[..., Any], of_tensors: Callable[..., Any] | None) -> Callable[..., Any]:
    """A function of Python numbers that computes something else where an argument is a tensor."""

    def either(*args: Any) -> Any:
        if not any(isinstance(arg, Tensor) for arg in args):
            return plain(*args)
        if of_tensors is None:
            raise RefusedError(f"asks `math.{plain.__name__}` of a tensor")
        return of_tensors(*args)

    return either


def _extreme(plain: Callable[..., Any], of_tensors: Callable[..., Tensor]) -> Callable[..., Any]:
    def of_values(*values: Any) -> Tensor:
        like = next(value for value in values if isinstance(value, Tensor))
        tensors = (value if isinstance(value, Tensor) else torch.full_like(like, value) for value in values)
        return functools.reduce(of_tensors, tensors)

    either = _either(lambda *values: plain(values), of_values)
    return lambda *args: either(*(args[0] if len(args) == 1 else args))


def _stand_ins() -> dict[str, Any]:
    """A global of a module, or a builtin -> what stands in for it, for Python numbers and tensors."""
    return {
        "math": types.SimpleNamespace(
            **{
                name: _either(one, getattr(torch, name, None)) if callable(one) else one
                for name, one in vars(math).items()
            }
        ),
        "copy": types.SimpleNamespace(deepcopy=_either(lambda value: value, Tensor.clone)),
        "min": _extreme(min, torch.minimum),
        "max": _extreme(max, torch.maximum),
        "float": _either(float, Tensor.double),
        "int": _either(int, lambda value: value.double().trunc()),
    }


def _own_globals(names: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a module's globals, rebuilding its functions to use the copy."""
    own = {**names, **{name: new for name, new in _stand_ins().items() if name in {*names, *vars(builtins)}}}
    for name, value in names.items():
        if inspect.isfunction(value) and inspect.unwrap(value).__globals__ is names:
            own[name] = _rebuilt(value, own)
    return own


def _rebuilt(function: Any, own: dict[str, Any]) -> Any:
    """Rebuild a function with other globals and without its decorators."""
    bare = inspect.unwrap(function)
    new = types.FunctionType(bare.__code__, own, bare.__name__, bare.__defaults__, bare.__closure__)
    new.__kwdefaults__ = bare.__kwdefaults__
    return new


class Shelf(list[Any]):
    """A list that a step may index with a tensor if all entries are equal; the lookup returns the first."""

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, Tensor):
            if any(entry != self[0] for entry in self):
                raise RefusedError("looks a number up in a list")
            return super().__getitem__(0)
        return super().__getitem__(place)


def hosted(cls: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Make a subclass whose methods, except dunder methods such as ``__init__``, accept numbers on the device."""
    modules: dict[str, dict[str, Any]] = {}

    def rebuilt(function: Any) -> Any:
        names = inspect.unwrap(function).__globals__
        home = names["__name__"]
        if home not in modules:
            modules[home] = _own_globals(names)
        return _rebuilt(function, modules[home])

    methods: dict[str, Any] = {}
    for base in reversed(cls.__mro__[: cls.__mro__.index(torch.optim.Optimizer)]):
        for name, value in vars(base).items():
            if isinstance(value, (staticmethod, classmethod)):
                methods[name] = type(value)(rebuilt(value.__func__))
            elif isinstance(value, types.FunctionType) and not name.startswith("__"):
                methods[name] = rebuilt(value)
    return type(cls.__name__, (cls,), methods)
