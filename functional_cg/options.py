"""The options of a step: their types, and what is refused before anything is traced."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args

from .stages.capture import Backend

__all__ = ["BackendChoice", "Debug", "Lowering", "refuse_options"]

Lowering = Literal["auto", "aten", "inductor"] | Callable[..., Any]
BackendChoice = Literal["auto", "eager"] | Backend
Debug = Literal["verify", "poison", "verify+poison", "poison+verify"]

_OPTIONS = ("static_argnames", "constants", "max_captures", "lowering", "backend", "debug", "verify_calls")


def refuse_options(
    transform: str,
    unknown: Iterable[str],
    fn: Any,
    max_captures: Any,
    lowering: Any,
    backend: Any,
    debug: Any,
    verify_calls: Any,
) -> None:
    """Raise for options that mean nothing to ``transform``, and for `unknown` ones.

    Raises:
      TypeError: If ``fn`` is no function, or an option is unknown.
      ValueError: If an option has none of its values.
    """
    for name in unknown:
        close = difflib.get_close_matches(name, _OPTIONS, 1)
        hint = f"did you mean `{close[0]}`?" if close else f"the options are {', '.join(_OPTIONS)}"
        raise TypeError(f"{transform}() got an unexpected keyword argument {name!r}; {hint}")
    if not callable(fn):
        raise TypeError(f"{transform}: expected a function, got {type(fn).__name__}")
    for name, value, least in (("max_captures", max_captures, 1), ("verify_calls", verify_calls, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{transform}: {name} must be an int of at least {least}, got {value!r}")
    if lowering not in ("auto", "aten", "inductor") and not callable(lowering):
        raise ValueError(
            f"{transform}: lowering must be 'auto', 'aten', 'inductor' or a compiler, got {lowering!r}"
        )
    if backend not in ("auto", "eager") and not callable(getattr(backend, "capture", None)):
        raise ValueError(f"{transform}: backend must be 'auto', 'eager' or a Backend object, got {backend!r}")
    if debug not in (None, *get_args(Debug)):
        raise ValueError(f"{transform}: debug must be 'verify', 'poison' or 'verify+poison', got {debug!r}")
