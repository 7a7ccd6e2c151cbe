"""Signals: run blocks that they cannot interrupt, and hold them back while a step is built.

torch's fake tensors call Python from C++ that must not throw: an exception from a handler there ends the
process, or is swallowed halfway and leaves a wrong program, or a mode that stays on. And a handler that calls
the library would end up in the trace. So signals wait until a step is built. A trace gives way to them at its
next ATen call and starts over when they are done. If Ctrl-C has waited for a second, another one is delivered
at once.
"""

from __future__ import annotations

import operator
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from types import FrameType
from typing import Any, TypeVar

from .garbage import no_garbage_collection

__all__ = ["Held", "Interrupted", "held_back", "undisturbed", "uninterrupted"]

T = TypeVar("T")
_IMPATIENCE = 1.0  # seconds
_RESTARTS = 3  # of a build that signals interrupt; after that they wait for its end


def uninterrupted(calls: Sequence[Callable[[], Any]]) -> None:
    """Run calls one after another in C, with no bytecode in between where Ctrl-C could strike.

    Each call must itself be implemented in C (a ``partial`` over a builtin); then either all or none have run
    when a KeyboardInterrupt is raised.
    """
    deque(map(operator.call, calls), maxlen=0)


class Interrupted(BaseException):
    """Ends a trace that gives way to a signal; not an Exception, which user code may catch."""


class Held:
    """Signals held back, each once: of a signal that comes again while it waits, Python itself keeps one.

    Args:
      handlers: The Python handlers to hold back, by signal.
    """

    def __init__(self, handlers: dict[int, Callable[[int, FrameType | None], Any]]) -> None:
        self.handlers = handlers
        self._waiting: list[int] = []  # without frames, which would keep tensors of the trace
        self._asked = 0.0  # when the first Ctrl-C came
        self._process = os.getpid()
        self.over = False

    def hold(self, number: int, frame: FrameType | None) -> None:
        """Handle any of these signals: hold it back, or deliver all if Ctrl-C is repeated."""
        if self.over or os.getpid() != self._process:  # a child forked meanwhile is not tracing
            self.handlers[number](number, frame)
            return
        if number not in self._waiting:
            self._waiting.append(number)
            if number == signal.SIGINT:
                self._asked = time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._asked >= _IMPATIENCE:
            self.deliver()

    def give_way(self) -> None:
        """Raise if signals are waiting; called where an exception does no harm."""
        if self._waiting:
            raise Interrupted

    def deliver(self) -> None:
        """Call the handlers of all waiting signals in order, even if one raises."""
        if self._waiting:
            number = self._waiting.pop(0)
            try:
                self.handlers[number](number, sys._getframe())
            finally:
                self.deliver()

    def release(self) -> None:
        """Restore the handlers, except those replaced meanwhile."""
        left = [number for number in self.handlers if signal.getsignal(number) == self.hold]
        self.over = True
        _insisted([partial(signal.signal, number, self.handlers[number]) for number in left])


def _insisted(calls: Sequence[Callable[[], Any]], attempts: int = 4) -> None:
    """Run calls; run them again from the start if a restored handler raises in between."""
    try:
        uninterrupted(calls)
    except BaseException:
        if attempts:
            _insisted(calls, attempts - 1)
        raise


@contextmanager
def held_back() -> Iterator[Held]:
    """Hold signals back; their handlers run at the end of the block.

    Signals reach only the main thread, and only Python handlers can wait; on other threads this does nothing.
    """
    held = Held(_handlers() if threading.current_thread() is threading.main_thread() else {})
    try:
        for number in held.handlers:
            signal.signal(number, held.hold)
        yield held
    finally:
        try:
            held.release()
        finally:
            held.deliver()


@no_garbage_collection()
def undisturbed(build: Callable[[Callable[[], None]], T]) -> T:
    """Build something; if signals arrive meanwhile, run their handlers outside of it and start over.

    Nor is garbage collected: what is built are many objects that stay, and the collector would look at them again and
    again.

    Args:
      build: ``build(give_way)``; it calls ``give_way()`` where an exception does no harm.
    """
    for _ in range(_RESTARTS):
        with held_back() as held:
            try:
                return build(held.give_way)
            except Interrupted:
                continue
    with held_back():
        return build(_go_on)


def _go_on() -> None:
    pass


@cache
def _numbers() -> tuple[int, ...]:
    """Return all signals; to ask for them, and for the handler of one by its name, is slow."""
    return tuple(map(int, signal.valid_signals()))


def _handlers() -> dict[int, Callable[[int, FrameType | None], Any]]:
    known = {number: signal.getsignal(number) for number in _numbers()}
    return {number: handler for number, handler in known.items() if callable(handler)}
