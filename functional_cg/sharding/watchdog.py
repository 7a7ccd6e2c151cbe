"""End a process whose replay waits for ranks that do not come, so that the launcher starts all of them again.

Nothing else does. NCCL's watchdog, of ``TORCH_NCCL_ASYNC_ERROR_HANDLING``, ends a process for a collective that was
launched by itself, as in the first call of a step; one that was captured it never gets to see. Gloo's collectives raise
after the timeout of their group, which comes first; here is the end of a process in which even that does not happen.

The thread costs a call nothing on a GPU: it reads the step's counter, and records an event behind the last launch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

from ..concurrency.driver import apart_from_captures
from ..errors import RankError
from .agreement import Ranks

__all__ = ["EXIT_CODE", "OnDevice", "OnHost", "Watchdog"]

EXIT_CODE = 75  # "try again later" among the codes of sysexits.h
_LONGEST_TICK = 5.0  # seconds
_BEATS_WAITED = 4  # after which a rank that lives has shown it
_PATIENCE = 3.0  # seconds that the store has to answer


_W = TypeVar("_W", "OnHost", "OnDevice")


class _Counted(Protocol):
    replays: int


@dataclass(eq=False, slots=True)
class OnHost:
    """Calls that return when they are done, as on a CPU.

    Attributes:
      name: Of the user's function.
      begun, done: Numbers of calls, counted by the caller.
    """

    name: str
    begun: int = 0
    done: int = 0
    _seen: int = 0
    _since: float = 0.0

    @property
    def upto(self) -> int:
        """The call that it may be in."""
        return self.begun

    def look(self) -> None:
        """See how far the calls are."""
        begun = self.begun
        if begun != self._seen:
            self._seen, self._since = begun, time.monotonic()

    def overdue(self, limit: float) -> bool:
        """Whether the call that was seen last has taken longer than a number of seconds."""
        return self._seen > self.done and time.monotonic() - self._since > limit


@dataclass(eq=False, slots=True)
class OnDevice:
    """Calls that are launched and done later.

    An event stands behind all calls launched so far. It may be late by as many calls as were queued before it, at the
    pace of those before them.

    Attributes:
      name: Of the user's function.
      begun, done: Numbers of calls launched, and known to be done.
      upto: The last call that the event stands behind.
    """

    name: str
    _stats: _Counted
    _arena: weakref.ref[Any]
    _event_of: Callable[[], Any]
    begun: int = 0
    done: int = 0
    upto: int = 0
    _event: Any = None
    _since: float = 0.0
    _pace: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def look(self) -> None:
        """See how far the device is, and record another event. The caller looks once, right after the first call."""
        with self._lock:
            now, self.begun = time.monotonic(), self._stats.replays
            if self._event is not None and self._event.query():
                self._pace = (now - self._since) / (self.upto - self.done)
                self.done, self._event = self.upto, None
            arena = self._arena()
            if self._event is None and self.begun > self.done and arena is not None:
                self._event, self.upto, self._since = self._event_of(), self.begun, now
                self._event.record(arena.stream)

    def overdue(self, limit: float) -> bool:
        """Whether the event is late."""
        queued = self.upto - self.done - 1
        return self._event is not None and time.monotonic() - self._since > limit + self._pace * queued


class Watchdog:
    """Watches the steps of a mesh, in the order in which they were captured: the same on all ranks.

    Args:
      ranks: The ranks of the mesh.
      limit: Seconds that a call may take; infinity for no watch.
    """

    def __init__(self, ranks: Ranks, limit: float) -> None:
        self._ranks, self._limit = ranks, limit
        self._tick = min(limit / 20, _LONGEST_TICK)
        self._watched: list[OnHost | OnDevice] = []
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self._beat = 0

    def host(self, name: str) -> OnHost:
        """Watch calls that return when they are done; the caller counts them."""
        return self._add(OnHost(name))

    def device(self, name: str, stats: _Counted, arena: Any) -> OnDevice:
        """Watch calls that are launched on the stream of an arena."""
        return self._add(
            OnDevice(name, stats, weakref.ref(arena), torch.cuda.Event, stats.replays, stats.replays)
        )

    def _add(self, watched: _W) -> _W:
        self._watched.append(watched)
        if self._thread is None and self._limit < float("inf"):
            self._store = self._ranks.own_store()
            self._thread = threading.Thread(target=self._run, name="watchdog of ranks", daemon=True)
            self._thread.start()
        return watched

    def stop(self) -> None:
        """End the watch: this rank leaves."""
        if self._thread is not None and not self._thread.is_alive():
            return  # in a child of a fork, where the thread may have held a lock of the event
        self._stopped.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        apart_from_captures()
        while not self._stopped.wait(self._tick):
            self._say("")
            for watched in list(self._watched):
                try:
                    watched.look()
                except RuntimeError:  # the device has failed, as the next call will say
                    continue
                if watched.overdue(self._limit):
                    self._end(watched)
        self._say("has ended")

    def _say(self, how: str) -> None:
        """Tell the other ranks that this one lives, and what it has called."""
        self._beat += 1
        calls = [(one.begun, one.done) for one in self._watched]
        said = {"beat": self._beat, "calls": calls, "how": how}
        with contextlib.suppress(RuntimeError):  # the store is gone with who held it: a rank, or the launcher
            self._store.set(f"watch/{self._ranks.rank}", json.dumps(said))

    def _heard(self) -> list[dict[str, Any] | None]:
        """Return what each rank said last."""
        heard: list[dict[str, Any] | None] = [None] * self._ranks.size
        with contextlib.suppress(RuntimeError):
            for rank in range(self._ranks.size):
                if self._store.check([f"watch/{rank}"]):
                    heard[rank] = json.loads(self._store.get(f"watch/{rank}"))
        return heard

    def _end(self, watched: OnHost | OnDevice) -> None:
        rows = ["the store where ranks meet does not answer: rank 0 holds it, or the launcher"]

        def ask() -> None:
            rows[:] = self._missing(self._watched.index(watched))

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(_BEATS_WAITED * self._tick + _PATIENCE)
        calls = sorted({watched.done + 1, watched.upto})
        which = " to ".join(map(str, calls))
        error = RankError.of(
            watched.name,
            f"{'call' if len(calls) == 1 else 'one of calls'} {which} is not done after {self._limit:g} s, on rank "
            f"{self._ranks.rank} of {self._ranks.size}; this process ends with exit code {EXIT_CODE}.",
            rows=rows or ["all ranks live, and wait in a call"],
            why="The collectives of a call wait for all ranks.",
            fix="see what the missing ranks said last; `torchrun --max-restarts=3` starts all ranks again, and "
            "`fcg.checkpoints(folder).load(state)` goes on. For slow steps, `sharding.mesh(..., step_timeout=...)`.",
        )
        print(f"RankError: {error}", file=sys.__stderr__, flush=True)
        faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
        os._exit(EXIT_CODE)  # the main thread waits in a call of C that no exception reaches

    def _missing(self, place: int) -> list[str]:
        before = self._heard()
        for _ in range(_BEATS_WAITED):  # the others may be about to end, too: they hear that this one lives
            time.sleep(self._tick)
            self._say("")
        self._say("waits")
        return missing(before, self._heard(), place)


def missing(before: list[dict[str, Any] | None], after: list[dict[str, Any] | None], place: int) -> list[str]:
    """Return a line for each rank that does not answer, or is in no call of a step.

    Args:
      before: What each rank said.
      after: What it said a few beats later.
      place: Which of the watched steps it is.
    """
    rows = []
    for rank, (old, new) in enumerate(zip(before, after, strict=True)):
        if new is None or (old is not None and new["beat"] == old["beat"] and not new["how"]):
            rows.append(f"rank {rank}  does not answer")
            continue
        begun, done = new["calls"][place] if place < len(new["calls"]) else (0, 0)
        if begun == done:
            how = new["how"] or "lives"
            rows.append(f"rank {rank}  {how}, and has called it {begun} time{'s' * (begun != 1)}")
    return rows
