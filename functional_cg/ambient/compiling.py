"""Answer ``torch.compiler.is_compiling()`` with True while a module runs as a pure function.

Libraries ask it to avoid what a graph cannot hold, such as a branch on a tensor's values. The answer is the same in a
trace and in an eager run: the eager run is what a replay is compared with.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import torch

__all__ = ["compiling", "leave", "torch_compiles"]

P = ParamSpec("P")
R = TypeVar("R")

# Torch's flag is one for the process: a thread that restores it must know whether others still need it. Their stacks
# say so, and neither a dead thread nor an exception leaves anything there.
_SWITCH = threading.RLock()


def compiling(fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function while torch says that it compiles, to all threads."""
    outside = torch_compiles()
    try:
        return _compiling(fn, args, kwargs)
    finally:
        leave(outside=outside)


def _compiling(fn: Callable[..., R], args: Any, kwargs: Any) -> R:
    with _SWITCH:
        torch.compiler._is_compiling_flag = True  # private; test_is_compiling notices a change
    return fn(*args, **kwargs)


def torch_compiles() -> bool:
    """Whether torch itself says that it compiles."""
    with _SWITCH:
        return torch.compiler.is_compiling() and not _runs_anywhere()


def leave(*, outside: bool) -> None:
    """Let torch say ``outside`` again, unless some thread is inside of :func:`compiling`."""
    with _SWITCH:
        torch.compiler._is_compiling_flag = outside or _runs_anywhere()


def _runs_anywhere() -> bool:
    return any(map(_runs_in, sys._current_frames().values()))


def _runs_in(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code is _compiling.__code__:
            return True
        frame = frame.f_back
    return False


def _forked() -> None:
    _SWITCH.release()
    leave(outside=False)  # threads that were inside are gone


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_SWITCH.acquire, after_in_parent=_SWITCH.release, after_in_child=_forked)
