"""Turns: mutual exclusion for what calls share, the buffers of a step and the memory of a state.

Another thread waits until a call is done. Code that runs on the same thread in the middle of a call (a signal
handler, a finalizer) would wait for itself: it may read what is consistent, and is refused anything else at
once. A fork waits for the calls of other threads, so that the child finds their states consistent, and for what they
import of torch, which would never end in the child.

A thread that needs several turns takes them in ascending order. Only code that interrupts a call can ask for
them in another order; it gives up if another thread waits for a turn that its own thread holds.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch

from ..errors import BusyError, FunctionalCGError
from .imports import imported_elsewhere

__all__ = ["Turn", "at_one_time", "lock_through_forks", "refuse_what_a_fork_cut_off"]

_PATIENCE = 0.5  # seconds that a fork waits for the calls of other threads
_IMPORT = 30.0  # seconds in which even a busy machine imports a part of torch
_DRAW = 5.0  # seconds in which even a busy machine draws no numbers
_POLL = 0.001


class Turn:
    """The turn to use one resource: a step's buffers, or a state's memory.

    Neither Ctrl-C nor any other exception of a handler can strike between taking a turn and the block that
    releases it: both happen in C, with no call in between.

    Attributes:
      kind: Steps rank before states.
      lock: Held by the thread whose turn it is.
      busy: Whether a call is using the resource; only reads are allowed meanwhile.
      whole: Whether the resource may be read in the middle of a call; the buffers of a step never.
      over: Makes the error for any use after the end; None until then.
    """

    __slots__ = ("__weakref__", "_on_gpu", "_waiting", "busy", "kind", "lock", "over", "whole")

    def __init__(self, kind: Literal["a step", "a state"], *, on_gpu: bool = False) -> None:
        self.kind = kind
        self.lock = threading.RLock()
        self.busy = False
        self.whole = kind == "a state"
        self.over: Callable[[], FunctionalCGError] | None = None
        self._waiting: list[None] = []
        self._on_gpu = on_gpu
        _turns.add(self)

    @property
    def rank(self) -> tuple[bool, int]:
        """Position in the order in which turns are taken."""
        return self.kind == "a state", id(self)

    def alone(self, call: Callable[[], Any], function: str = "") -> Any:
        """Run a call that may be interrupted only by reads."""
        return self._taken(call, function, reads=False)

    def read(self, call: Callable[[], Any]) -> Any:
        """Run a call that reads; nothing writes meanwhile."""
        return self._taken(call, "", reads=True)

    def _taken(self, call: Callable[[], Any], function: str, *, reads: bool) -> Any:
        if self.busy:
            self.wait()
        with self.lock:
            before = self.busy
            if before and not (reads and self.whole):
                raise self.refusal(function)
            self.busy = True
            try:
                result = call()  # a `return` here would leave the block with the lock held
            finally:
                self.busy = before
        return result

    @contextmanager
    def shut(self) -> Iterator[None]:
        """Refuse even reads during a block that puts other values in memory; it must not be interrupted."""
        if self.busy:
            self.wait()
        with self.lock:
            if self.busy:
                raise self.refusal()
            self.busy, self.whole = True, False
            try:
                yield
            finally:
                self.busy, self.whole = self.over is not None, self.over is None

    @contextmanager
    def torn(self) -> Iterator[None]:
        """Refuse even reads during a block of a call that has this turn, and puts other values in memory."""
        whole, self.whole = self.whole, False
        try:
            yield
        finally:
            self.whole = whole

    def shut_down(self, call: Callable[[], None], over: Callable[[], FunctionalCGError]) -> None:
        """Run a call that nothing may interrupt; if it returns, refuse all use from then on, until :meth:`reopen`."""
        with self.shut():
            call()
            self.over = over

    def reopen(self, call: Callable[[], None]) -> None:
        """Run a call after which the resource may be used again."""
        with self.lock:
            call()
            self.over, self.busy, self.whole = None, False, True

    def end(self, over: Callable[[], FunctionalCGError]) -> None:
        """Refuse all use from now on."""
        self.over, self.busy, self.whole = over, True, False

    def wait(self) -> None:
        """Wait while another thread is in a call; return at once in the middle of this thread's own call.

        Raises:
          BusyError: If that thread may be waiting for this one.
        """
        if self.over is not None or self.lock._is_owned():  # type: ignore[attr-defined] # private to threading
            return
        held = [turn for turn in _turns.living() if turn.lock._is_owned()]  # type: ignore[attr-defined]
        in_order = all(turn.rank < self.rank for turn in held)
        self._waiting.append(None)
        try:
            if in_order:
                with self.lock:
                    pass
            while self.busy and not in_order:
                if any(turn._waiting for turn in held):
                    raise self.refusal()
                time.sleep(_POLL)
        finally:
            self._waiting.pop()

    def refusal(self, function: str = "") -> FunctionalCGError:
        """Return the error for a use in the middle of a call, or after the end."""
        if self.over is not None:
            return self.over()
        return BusyError.of(
            function,
            f"{self.kind} was used in the middle of a call that is using it.",
            why="The handler of a signal, or a finalizer, runs between two lines of that call and cannot wait for its "
            "end.",
            fix="set a flag there, and do it in the loop; reading and raising are fine.",
        )

    def _forked(self) -> None:
        """Reset in a child, if another thread of the parent was in the middle of a call."""
        self.lock, self.busy = threading.RLock(), False
        if self.kind == "a state":
            self.end(_being_written)


def _being_written() -> FunctionalCGError:
    return BusyError.of(
        "",
        "a state is used that was in the middle of a call of another thread when this process was forked.",
        why="The copy that this process has of it may be half written.",
        fix="fork between calls; or load the state anew here, `fcg.load(path, fcg.place(...))`.",
    )


def _on_a_gpu() -> FunctionalCGError:
    return BusyError.of(
        "",
        "a state on a GPU is used in a process that was forked from the one that made it.",
        why="CUDA cannot be used in a forked process.",
        fix='start processes by spawn, `torch.multiprocessing.get_context("spawn")`, and make states there.',
    )


def at_one_time(turns: Iterable[Turn], call: Callable[[], Any]) -> Any:
    """Run a call that reads several states; none of them is written meanwhile."""
    for turn in sorted(set(turns), key=lambda turn: turn.rank, reverse=True):
        call = partial(turn.read, call)
    return call()


class _Turns:
    """All turns and locks of a process, to survive forks: those of other threads would stay locked in a child."""

    def __init__(self) -> None:
        self._turns: set[weakref.ref[Turn]] = set()
        self._adding = threading.RLock()
        self._locks = [self._adding]
        self._taken: dict[int, list[threading.RLock]] = {}  # by the forking thread
        self._used = False
        self.in_doubt = False  # whether the generators of a child are free
        self.cut_off: list[str] = []  # modules whose import will never end in this child

    def add(self, turn: Turn) -> None:
        with self._adding:
            self._used = True
            self._turns.add(weakref.ref(turn, self._turns.discard))

    def lock(self) -> threading.RLock:
        self._locks.append(threading.RLock())
        return self._locks[-1]

    def living(self) -> list[Turn]:
        found = [reference() for reference in list(self._turns)]
        return [turn for turn in found if turn is not None]

    def before_fork(self) -> None:
        """Take all turns that become free within ``_PATIENCE``, ample for the calls of a training loop; and all locks.

        Other threads may make steps and states meanwhile, whose turns are taken as well. Who holds a lock, or imports
        a part of torch, may wait for a turn, and gets it before.
        """
        latest, taken = time.monotonic() + _IMPORT, self._taken.setdefault(threading.get_ident(), [])
        end = time.monotonic() + _PATIENCE
        while True:
            known = set(self.living())
            for turn in sorted(known, key=lambda turn: turn.rank):
                if turn.lock.acquire(timeout=max(end - time.monotonic(), 0)):
                    taken.append(turn.lock)
            held = self._held_by_others(taken)
            importing = time.monotonic() < latest and bool(imported_elsewhere())
            if held is None and not importing and (known.issuperset(self.living()) or time.monotonic() > end):
                return
            _release(taken)
            if held is not None:
                with held:  # until it is free
                    pass
            elif importing:
                time.sleep(_POLL)
                end = time.monotonic() + _PATIENCE

    def _held_by_others(self, taken: list[threading.RLock]) -> threading.RLock | None:
        """Take the locks; return the first one that another thread holds."""
        for lock in self._locks:
            if not lock.acquire(blocking=False):
                return lock
            taken.append(lock)
        return None

    def after_fork(self) -> set[threading.RLock]:
        """Release what was taken and return it."""
        taken = self._taken.pop(threading.get_ident(), [])
        found = set(taken)
        _release(taken)
        return found

    def in_child(self) -> None:
        """Reset the turns in a child, where only the forking thread goes on."""
        taken, living = self.after_fork(), self.living()
        self._taken.clear()
        self.in_doubt, self.cut_off = True, self.cut_off + imported_elsewhere()
        for turn in living:
            turn._waiting.clear()
            if turn._on_gpu:
                turn.end(_on_a_gpu)
            elif turn.lock not in taken:
                turn._forked()
        if self._used and torch.get_num_threads() > 1:
            torch.set_num_threads(1)  # OpenMP's threads are gone, and it would wait for them forever


def _release(locks: list[threading.RLock]) -> None:
    while locks:
        locks.pop().release()


_turns = _Turns()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_turns.before_fork, after_in_parent=_turns.after_fork, after_in_child=_turns.in_child
    )


def lock_through_forks() -> threading.RLock:
    """Return a lock for the whole process that a fork waits for, so that the child finds whole what it guards.

    Whoever holds it releases it soon; meanwhile it may wait for its turn to use a step or a state, for nothing else.
    """
    return _turns.lock()


def refuse_what_a_fork_cut_off(function: str) -> None:
    """Raise in a child of a fork where a trace would wait forever for what another thread was doing.

    It was drawing random numbers, or importing a part of torch.

    Raises:
      BusyError: At once, or after some seconds.
    """
    if _turns.cut_off:
        module = _turns.cut_off[0]
        raise BusyError.of(
            function,
            f"is traced in a process that was forked while another thread was importing `{module}`.",
            why="That import never ends here, since the thread is gone.",
            fix=f"`import {module}` before any thread starts; or start processes by spawn.",
        )
    if not _turns.in_doubt:
        return
    asking = threading.Thread(target=_draw_nothing, daemon=True)
    asking.start()
    asking.join(_DRAW)
    if asking.is_alive():
        raise BusyError.of(
            function,
            "is traced in a process that was forked while another thread was drawing random numbers.",
            why="The generator that torch or numpy has for the whole process stays locked here.",
            fix="fork while no thread draws; or start processes by spawn.",
        )
    _turns.in_doubt = False


def _draw_nothing() -> None:
    torch.randperm(0)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.get_state()
