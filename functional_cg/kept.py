"""Kept: what a step lets go of what it has lowered and captured, and how it calls what it keeps."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from .errors import ClosedError
from .lowered import Captured, Lowered
from .stages.replay import MISS
from .turns import Inner, Turn, in_turn

__all__ = ["Captures", "Plans", "called_in_turn", "closed_error", "drop_spares", "forget"]

Plans = dict[tuple[Any, ...], list[Lowered]]  # by their static arguments
Captures = dict[tuple[int, Any], Captured]  # by plan and arenas


def forget(plans: Plans, captures: Captures, gone: Collection[Lowered]) -> None:
    """Drop plans with their captures."""
    numbers = set(map(id, gone))
    for capture in [key for key in captures if key[0] in numbers]:
        captures.pop(capture).close()
    for key, group in list(plans.items()):
        group[:] = [plan for plan in group if id(plan) not in numbers]
        if not group:
            del plans[key]


def drop_spares(captures: Captures) -> bool:
    """Keep at most one capture whose handles are all gone, for the next plain tree; says whether any went."""
    spare = [key for key, captured in captures.items() if captured.spare]
    for key in spare[:-1]:
        captures.pop(key).close()
    return len(spare) > 1


def called_in_turn(turn: Turn, name: str, captured: Captured) -> Inner:
    """The calls of a step from the second one on: ``call(args, kwargs)`` gives the result, or MISS.

    The result is put together when the next call may begin: what the user's classes do then may be to call the step.
    """
    run: Inner = in_turn(turn, captured.run, name)
    finish: Callable[[Any], Any] = captured.finish

    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        done = run(args, kwargs)
        return done if done is MISS else finish(done)

    return call


def closed_error(name: str, kind: str) -> ClosedError:
    """The error for a step that is used after its end."""
    return ClosedError.of(
        name,
        "called after `close()`.",
        why="Its captures and their memory are gone; states are still valid.",
        fix=f"make a new step, `{kind}(fn)`.",
    )
