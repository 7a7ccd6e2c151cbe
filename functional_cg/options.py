"""The options of a step: their types, and what is refused before anything is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from .stages.capture import Backend

__all__ = ["BackendChoice", "Debug", "Lowering", "refuse_options"]

Lowering = Literal["auto", "aten", "inductor"] | Callable[..., Any]
BackendChoice = Literal["auto", "eager"] | Backend
Debug = Literal["verify", "poison", "verify+poison"]


def refuse_options(
    fn: Any, max_captures: Any, lowering: Any, backend: Any, debug: Any, verify_calls: Any
) -> None:
    """Raise for options that mean nothing.

    Raises:
      TypeError: If ``fn`` is no function.
      ValueError: If an option has none of its values.
    """
    if not callable(fn):
        raise TypeError(f"graph_step: expected a function, got {type(fn).__name__}")
    for name, value, least in (("max_captures", max_captures, 1), ("verify_calls", verify_calls, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"graph_step: {name} must be an int of at least {least}, got {value!r}")
    if lowering not in ("auto", "aten", "inductor") and not callable(lowering):
        raise ValueError(
            f"graph_step: lowering must be 'auto', 'aten', 'inductor' or a compiler, got {lowering!r}"
        )
    if backend not in ("auto", "eager") and not callable(getattr(backend, "capture", None)):
        raise ValueError(f"graph_step: backend must be 'auto', 'eager' or a Backend object, got {backend!r}")
    if debug not in (None, "verify", "poison", "verify+poison"):
        raise ValueError(f"graph_step: debug must be 'verify', 'poison' or 'verify+poison', got {debug!r}")
