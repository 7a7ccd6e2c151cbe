"""Stand in for torch's compiler while a step runs, in a trace and in an eager run alike.

Libraries ask ``torch.compiler.is_compiling()`` to avoid what a graph cannot hold, such as a branch on a tensor's
values: the answer is True while a module runs as a pure function. And functions that were given to ``torch.compile``
run as they are: the step is compiled whole, and the eager run is what a replay is compared with.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import CodeType, FrameType
from typing import Any, ParamSpec, TypeVar

import torch

from ..concurrency.turns import lock_through_forks

__all__ = ["compiling", "inlining", "leave", "outside"]

P = ParamSpec("P")
R = TypeVar("R")

# Torch's flag and its stance are one for the process: a thread that restores them must know whether others still need
# them. Their stacks say so, and neither a dead thread nor an exception leaves anything there.
_SWITCH = lock_through_forks()


def compiling(fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function while torch says that it compiles, to all threads."""
    before = outside()
    try:
        return _compiling(fn, args, kwargs)
    finally:
        leave(before)


def _compiling(fn: Callable[..., R], args: Any, kwargs: Any) -> R:
    with _SWITCH:
        torch.compiler._is_compiling_flag = True  # private; test_is_compiling notices a change
    return fn(*args, **kwargs)


def inlining(fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function while what ``torch.compile`` made runs uncompiled, on all threads."""
    before = outside()
    try:
        return _inlining(fn, args, kwargs, before[1])
    finally:
        leave(before)


def _inlining(fn: Callable[..., R], args: Any, kwargs: Any, stance: Any) -> R:
    if stance is not None:
        with _SWITCH:
            _set(replace(stance, stance="force_eager", backend=None))
    return fn(*args, **kwargs)


def outside() -> tuple[bool, Any]:
    """Return torch's flag and its compiler's stance but for what runs in this module's functions.

    The stance is None as long as nobody can have compiled anything.
    """
    with _SWITCH:
        flag = torch.compiler.is_compiling() and _frame_of(_compiling) is None
        inside = _frame_of(_inlining)
        if inside is not None:
            return flag, inside.f_locals["stance"]
        return flag, getattr(_dynamo(), "_stance", None)


def leave(before: tuple[bool, Any]) -> None:
    """Restore what :func:`outside` returned, as far as no thread is inside."""
    flag, stance = before
    with _SWITCH:
        torch.compiler._is_compiling_flag = flag or _frame_of(_compiling) is not None
        if stance is not None and _frame_of(_inlining) is None:
            _set(stance)


def _dynamo() -> Any:
    # Not by an import: another thread may be importing it, which ends in no child of a fork.
    return sys.modules.get("torch._dynamo.eval_frame")  # private; test_is_compiling notices a change


def _set(stance: Any) -> None:
    _dynamo()._stance = stance


def _frame_of(function: Callable[..., Any]) -> FrameType | None:
    """Return a frame in which a function runs, on any thread; None if there is none."""
    # No name for this call's own frame: it would refer to itself.
    return next(filter(None, map(partial(_up_to, function.__code__), sys._current_frames().values())), None)


def _up_to(code: CodeType, frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame


def _forked() -> None:
    _, stance = outside()
    if stance is not None and stance.stance == "force_eager":  # of a thread that was inside, and is gone
        stance = type(stance)()
    leave((False, stance))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
