"""Ctrl-C while a step is built.

torch's fake tensors call Python from C++ that must not throw: a KeyboardInterrupt that strikes there ends the process,
or is swallowed half-way and leaves a wrong program. So Ctrl-C waits for the next safe place, which while tracing is the
next ATen call of the user's function. A second Ctrl-C does not wait.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["held_back"]


def _nothing() -> None:
    pass


@contextmanager
def held_back() -> Iterator[Callable[[], None]]:
    """Hold the first Ctrl-C back; it is raised by the function that is yielded, at the latest at the end.

    Signals reach the main thread only, and only Python's own handlers can wait: elsewhere nothing happens here.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield _nothing
        return
    waiting: list[tuple[int, Any]] = []

    def hold(number: int, frame: Any) -> None:
        waiting.append((number, frame))
        if len(waiting) > 1:
            deliver()

    def deliver() -> None:
        if waiting:
            number, frame = waiting[0]
            waiting.clear()
            handler(number, frame)

    signal.signal(signal.SIGINT, hold)
    try:
        yield deliver
    finally:
        signal.signal(signal.SIGINT, handler)
        deliver()
