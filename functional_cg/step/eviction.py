"""Evict plans and captures from the caches of a step."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any

from ..errors import ClosedError
from .lowered import Captured, Lowered

__all__ = ["Captures", "Plans", "closed_error", "drop_spares", "forget", "reap"]

Plans = dict[tuple[Any, ...], list[Lowered]]  # by static arguments
Captures = dict[tuple[int, Any], Captured]  # by plan and arenas


def forget(plans: Plans, captures: Captures, gone: Collection[Lowered]) -> None:
    """Drop plans and their captures."""
    numbers = set(map(id, gone))
    for capture in [key for key in captures if key[0] in numbers]:
        captures.pop(capture).close()
    for key, group in list(plans.items()):
        group[:] = [plan for plan in group if id(plan) not in numbers]
        if not group:
            del plans[key]


def drop_spares(captures: Captures) -> bool:
    """Drop captures whose handles are all gone, but one for the next plain tree; return whether any went."""
    spare = [key for key, captured in captures.items() if captured.spare]
    for key in spare[:-1]:
        captures.pop(key).close()
    return len(spare) > 1


def reap(this: weakref.ref[Any]) -> None:
    """Drop a step's captures whose handles are gone: now, or at the next capture if it is in a call."""
    step = this()
    if step is not None and not step._closed and not step._turn.busy:
        step._turn.alone(step._drop_spares)


def closed_error(name: str, kind: str) -> ClosedError:
    """Return the error for a step that is used after ``close()``."""
    return ClosedError.of(
        name,
        "called after `close()`.",
        why="Its captures and their memory are gone; states are still valid.",
        fix=f"make a new step, `{kind}(fn)`.",
    )
