"""Signals: what they cannot strike into, and how they wait while a step is built.

torch's fake tensors call Python from C++ that must not throw: what a handler raises there ends the process, or is
swallowed half-way and leaves a wrong program, or a mode that stays on. And a handler that calls the library would find
itself in the trace. So signals wait until a step is built. A trace gives way to them at its next ATen call: it is
begun anew when they are done. A Ctrl-C that comes a second after one that still waits does not wait.
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
from functools import partial
from types import FrameType
from typing import Any, TypeVar

__all__ = ["Held", "Interrupted", "held_back", "undisturbed", "uninterrupted"]

T = TypeVar("T")
_IMPATIENCE = 1.0  # seconds
_RESTARTS = 3  # of a build that signals come into; then they wait for its end


def uninterrupted(calls: Sequence[Callable[[], Any]]) -> None:
    """Run calls one after the other in C, without a bytecode in between where Ctrl-C could strike.

    Each call has to be implemented in C itself (a ``partial`` over a builtin); then either all or none have run
    when a KeyboardInterrupt is raised.
    """
    deque(map(operator.call, calls), maxlen=0)


class Interrupted(BaseException):
    """Ends a trace that gives way to a signal; no exception of the user's, whose code may catch those."""


class Held:
    """The signals that wait.

    Args:
      handlers: Python's own handlers, by signal.
    """

    def __init__(self, handlers: dict[int, Callable[[int, FrameType | None], Any]]) -> None:
        self.handlers = handlers
        self._waiting: list[int] = []  # without their frames, which would keep tensors of the trace
        self._asked = 0.0  # when the first Ctrl-C came
        self._process = os.getpid()
        self.over = False

    def hold(self, number: int, frame: FrameType | None) -> None:
        """The handler of all of them."""
        if self.over or os.getpid() != self._process:  # a child that was forked meanwhile traces nothing
            self.handlers[number](number, frame)
            return
        again = number == signal.SIGINT and number in self._waiting
        if number == signal.SIGINT and not again:
            self._asked = time.monotonic()
        self._waiting.append(number)
        if again and time.monotonic() - self._asked >= _IMPATIENCE:
            self.deliver()

    def give_way(self) -> None:
        """Raise where signals wait; called where an exception does no harm."""
        if self._waiting:
            raise Interrupted

    def deliver(self) -> None:
        """Call the handlers of all that wait, in order, also where one of them raises."""
        if self._waiting:
            number = self._waiting.pop(0)
            try:
                self.handlers[number](number, sys._getframe())
            finally:
                self.deliver()

    def release(self) -> None:
        """Put the handlers back, but for those that were exchanged meanwhile."""
        left = [number for number in self.handlers if signal.getsignal(number) == self.hold]
        self.over = True
        _insisted([partial(signal.signal, number, self.handlers[number]) for number in left])


def _insisted(calls: Sequence[Callable[[], Any]], attempts: int = 4) -> None:
    """Run calls, again from the start where a handler that is back already raises in one."""
    try:
        uninterrupted(calls)
    except BaseException:
        if attempts:
            _insisted(calls, attempts - 1)
        raise


@contextmanager
def held_back() -> Iterator[Held]:
    """Hold signals back; their handlers run at the end of the block.

    Signals reach the main thread only, and only Python's own handlers can wait: elsewhere nothing happens here.
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


def undisturbed(build: Callable[[Callable[[], None]], T]) -> T:
    """Build something, from the start where a signal has come in between: its handler runs outside of it.

    Args:
      build: What to run; it is given what to call where an exception does no harm.
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


def _handlers() -> dict[int, Callable[[int, FrameType | None], Any]]:
    known = {number: signal.getsignal(number) for number in signal.valid_signals()}
    return {number: handler for number, handler in known.items() if callable(handler)}
