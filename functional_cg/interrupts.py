"""Ctrl-C while a step is built, and while one runs on the host.

torch's fake tensors call Python from C++ that must not throw: a KeyboardInterrupt that strikes there ends the process,
or is swallowed half-way and leaves a wrong program. So Ctrl-C waits for the next safe place, which while tracing is the
next ATen call of the user's function. A second Ctrl-C does not wait.
"""

from __future__ import annotations

# `signal` makes enums of handlers, which cost more than the rest of a call.
import _signal  # type: ignore[import-not-found]
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

__all__ = ["Deferred", "held_back"]


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


class Deferred:
    """Hold Ctrl-C back inside of the block, and deliver it once at its end; for short blocks, at each call.

    The second one waits, too. Where the block raises, its error comes in place of Ctrl-C.
    """

    __slots__ = ("_handler", "_waiting")

    def __enter__(self) -> None:
        self._waiting: list[tuple[int, Any]] = []
        self._handler: Any = None
        if threading.current_thread() is threading.main_thread():  # no other is interrupted
            handler = _signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                _signal.signal(signal.SIGINT, self._hold)

    def _hold(self, number: int, frame: Any) -> None:
        self._waiting.append((number, frame))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._handler is None:
            return
        _signal.signal(signal.SIGINT, self._handler)
        if self._waiting and kind is None:
            self._handler(*self._waiting[0])
