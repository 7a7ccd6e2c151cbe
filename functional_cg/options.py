"""The options of a step: their types, and the checks made before anything is traced."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from inspect import Parameter, signature
from types import MappingProxyType
from typing import Any, Literal, Self, TypeVar, get_args

from .stages.branches.choice import Branches
from .stages.plan import Backend

__all__ = [
    "BackendChoice",
    "Branches",
    "Certify",
    "CompileOnce",
    "Debug",
    "Lowering",
    "Options",
    "with_options",
]

Function = TypeVar("Function", bound=Callable[..., Any])

Lowering = Literal["auto", "aten", "inductor"] | Callable[..., Any]
BackendChoice = Literal["auto", "eager"] | Backend
Certify = Literal["auto", "first"] | bool | int
CompileOnce = Literal["auto"] | bool
Debug = Literal["verify", "poison", "verify+poison", "poison+verify"]

# Options of jax.jit and torch.compile -> what to do here.
_ELSEWHERE = MappingProxyType(
    {
        "donate_argnums": "leave it out: a step always takes over its first argument, the state",
        "donate_argnames": "leave it out: a step always takes over its first argument, the state",
        "static_argnums": 'name them, `static_argnames=("train",)`',
        "mode": 'leave it out: a step is one graph; `lowering="inductor"` compiles it, the default on a GPU',
        "fullgraph": "leave it out: a step is always one graph",
        "dynamic": "leave it out: shapes are fixed, `max_captures=2` allows another one",
        "options": "leave it out: what may be set stands in `help(fcg.graph_step)`",
        "pool": "leave it out: a step manages its memory",
        "warmup": "leave it out: a step warms up by itself",
        "num_warmup_iters": "leave it out: a step warms up by itself",
    }
)


@dataclass(frozen=True, slots=True, eq=False)
class Options:
    """The options of ``graph_step`` and ``graph_fn``; described there."""

    static_argnames: Sequence[str] = ()
    constants: Any = ()
    max_captures: int = 1
    steps_per_call: int = 1
    lowering: Lowering = "auto"
    backend: BackendChoice = "auto"
    debug: Debug | None = None
    verify_calls: int = 16
    certify: Certify = "auto"
    activation_memory_budget: float | None = None
    branches: Branches = "auto"
    branch_memory: int | None = None
    compile_once: CompileOnce = "auto"

    @classmethod
    def of(cls, transform: str, fn: Any, given: Mapping[str, Any]) -> Self:
        """Return the options of a transform of ``fn``.

        Raises:
          TypeError: If ``fn`` is not callable, or an option is unknown.
          ValueError: If the value of an option is invalid.
        """
        known = [field.name for field in fields(cls) if _has(transform, field.name)]
        for name in given:
            if name not in known:
                close = difflib.get_close_matches(name, known, 1)
                if name in _ELSEWHERE:
                    raise TypeError(
                        f"{transform}() got an unexpected keyword argument {name!r}.\nTo fix: {_ELSEWHERE[name]}."
                    )
                hint = f"did you mean `{close[0]}`?" if close else f"the options are {', '.join(known)}"
                raise TypeError(f"{transform}() got an unexpected keyword argument {name!r}; {hint}")
        if isinstance(fn, type):
            raise TypeError(
                f"{transform}: expected a function, got the class `{fn.__name__}`.\nTo fix: decorate its method, "
                f"`@fcg.{transform}` above `def`."
            )
        if not callable(fn):
            raise TypeError(
                f"{transform}: expected a function, got {type(fn).__name__}.\n"
                f"To fix: `fcg.{transform}(train_step)`, the function itself, and call what that returns."
            )
        options = cls(**given)
        options._refuse_values(transform)
        return options

    def _refuse_values(self, transform: str) -> None:
        for name, least in (("max_captures", 1), ("steps_per_call", 1), ("verify_calls", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{transform}: {name} must be an int of at least {least}, got {value!r}")
        if self.certify not in ("auto", "first") and not (
            isinstance(self.certify, bool) or (isinstance(self.certify, int) and self.certify > 0)
        ):
            raise ValueError(
                f"{transform}: certify must be 'auto', 'first', a number of calls, True or False, got {self.certify!r}"
            )
        lanes = self.branches
        if lanes != "auto" and (
            not isinstance(lanes, int) or isinstance(lanes, bool) or not 1 <= lanes <= 32
        ):
            raise ValueError(f"{transform}: branches must be 'auto' or an int from 1 to 32, got {lanes!r}")
        room = self.branch_memory
        if room is not None and (not isinstance(room, int) or isinstance(room, bool) or room < 0):
            raise ValueError(f"{transform}: branch_memory must be None or a number of bytes, got {room!r}")
        if not (self.compile_once == "auto" or isinstance(self.compile_once, bool)):
            raise ValueError(
                f"{transform}: compile_once must be 'auto', True or False, got {self.compile_once!r}"
            )
        if self.compile_once is True and lanes not in ("auto", 1):
            raise ValueError(
                f"{transform}: parts that are compiled once run in one line: compile_once=True does not go with "
                f"branches={lanes!r}.\nTo fix: leave one of them out."
            )
        budget = self.activation_memory_budget
        number = isinstance(budget, (int, float)) and not isinstance(budget, bool)
        if budget is not None and not (number and 0 <= budget <= 1):
            raise ValueError(
                f"{transform}: activation_memory_budget must be None or a number from 0 to 1, got {budget!r}"
            )
        lowering, backend, debug = self.lowering, self.backend, self.debug
        if lowering not in ("auto", "aten", "inductor") and not callable(lowering):
            raise ValueError(
                f"{transform}: lowering must be 'auto', 'aten', 'inductor' or a compiler, got {lowering!r}.\n"
                "To fix: leave it out, or `lowering='aten'` for calls as they are; both are CUDA graphs on a GPU."
            )
        if backend not in ("auto", "eager") and not callable(getattr(backend, "capture", None)):
            raise ValueError(
                f"{transform}: backend must be 'auto', 'eager' or a Backend object, got {backend!r}"
            )
        if debug not in (None, *get_args(Debug)):
            raise ValueError(
                f"{transform}: debug must be 'verify', 'poison' or 'verify+poison', got {debug!r}"
            )


def with_options(function: Function) -> Function:
    """Show the options of a transform, with their defaults, in the signature of ``f(fn, **options)``."""
    shown = signature(function)
    options = [
        Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
        for field in fields(Options)
        if _has(function.__name__, field.name)
    ]
    positional = list(shown.parameters.values())[:-1]
    function.__signature__ = shown.replace(parameters=[*positional, *options])  # type: ignore[attr-defined]
    return function


def _has(transform: str, option: str) -> bool:
    return transform == "graph_step" or option not in ("steps_per_call", "activation_memory_budget")
