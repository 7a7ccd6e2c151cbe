"""Process groups and captures: which groups can be captured, and what ends first.

NCCL counts the graphs that hold kernels of a communicator, and ends it once there are none: the end of a process group
waits for ever for a capture that is alive. Nothing that torch calls at every such end can be registered, but it waits
without Python's lock: so a thread sees what waits there, and frees the captures.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Collection, Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..concurrency.driver import apart_from_captures
from ..concurrency.garbage import no_garbage_collection
from ..errors import CaptureError, RankError
from .coalescing import all_groups

__all__ = ["Captures", "Groups", "gone"]

_TICK = 0.1  # seconds
_CAPTURED = ("nccl",)  # backends whose collectives are kernels on a stream
_ENDINGS = ("destroy_process_group", "_abort_process_group")  # functions of torch


class _Closed(Protocol):
    def close(self) -> None: ...


class Captures:
    """The captures of a mesh: freed before the process groups whose collectives they hold.

    Attributes:
      ended: Names of groups that have ended while a capture held some of their kernels.
    """

    def __init__(self) -> None:
        self.ended: set[str] = set()
        self._held: weakref.WeakKeyDictionary[_Closed, Collection[str]] = weakref.WeakKeyDictionary()
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    def add(self, captured: _Closed, groups: Collection[str]) -> None:
        """Hold a capture, weakly.

        Args:
          captured: What to close.
          groups: Names of the groups that wait for it when they end; none on a CPU.
        """
        self._held[captured] = groups
        if groups and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ends of process groups", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Free all captures, and end the thread."""
        self._stopped.set()
        for captured in list(self._held):
            captured.close()

    def _run(self) -> None:
        apart_from_captures()
        while not self._stopped.wait(_TICK):
            for ending in _endings():
                # Another thread may capture meanwhile: then it is looked at again.
                with contextlib.suppress(RuntimeError):
                    self._end(ending)

    def _end(self, ending: Any) -> None:
        everyone = ending == dist.group.WORLD
        for captured, groups in list(self._held.items()):
            ended = groups if everyone else {ending.group_name}.intersection(groups)
            if ended:
                self.ended.update(ended)  # first, so that no call launches what is freed
                captured.close()


def _endings() -> Iterator[Any]:
    """Yield the process groups that a thread is about to end, or waits for."""
    with no_garbage_collection():  # Python 3.11.4 may otherwise wait for itself
        frames = sys._current_frames()
    for frame in frames.values():
        code = frame.f_code
        if code.co_name in _ENDINGS and code.co_filename == dist.distributed_c10d.__file__:
            group = frame.f_locals.get("pg")
            if group is not None:
                yield group


class Groups:
    """The process groups of a step, as something that a call compares.

    Args:
      names: Their names.
      captures: The captures of the mesh.

    Attributes:
      names: Their names.
    """

    def __init__(self, names: Collection[str], captures: Captures) -> None:
        self.names, self._captures = frozenset(names), captures
        self._ended = captures.ended

    def __len__(self) -> int:
        return len(self.names)

    def unchanged(self) -> bool:
        """Whether none has ended."""
        return self._ended.isdisjoint(self.names)

    def hold(self, captured: _Closed) -> None:
        """Let a capture be freed before they end."""
        self._captures.add(captured, self.names)

    def check(self, function: str) -> None:
        """Raise if one has ended.

        Raises:
          RankError: Then.
        """
        if not self.unchanged():
            raise gone(function, "destroyed while a captured step was alive, which was freed")

    def refuse_backend(self, function: str, device: torch.device) -> None:
        """Raise if a graph cannot hold the collectives of one; anything will do on a CPU.

        Args:
          function: Name of the user's function.
          device: Where it runs.
        Raises:
          CaptureError: Naming the backend.
          RankError: If a group is not there.
        """
        for name in sorted(self.names) if device.type != "cpu" else ():
            group = next((one for one in all_groups() if one.group_name == name), None)
            if group is None:
                raise gone(function, f"no group {name!r}")
            backends = dict(one.split(":") for one in dist.get_backend_config(group).split(","))
            backend = backends.get(device.type, "none")
            if backend in _CAPTURED:
                continue
            raise CaptureError.of(
                function,
                f"a collective of this step runs by {backend} on {device.type}, and cannot be captured; the state is "
                "unchanged.",
                rows=[f"process group {name!r}  expected {_CAPTURED[0]}   got {backend}"],
                why="A graph repeats kernels of a GPU; this backend sends by the host.",
                fix="leave out `init_process_group`, `sharding.mesh` starts what fits; or "
                f'`init_process_group("cpu:gloo,{device.type}:{_CAPTURED[0]}")`; or keep the states on the host, '
                '`sharding.mesh(axes, device="cpu")`.',
            )


def gone(function: str, how: str) -> RankError:
    """Return the error for process groups that are not there."""
    return RankError.of(
        function,
        "the process groups of the mesh are gone; the state is that of the last step.",
        rows=[how],
        why="Sharded leaves are computed with over all ranks.",
        fix="call it before `torch.distributed.destroy_process_group()`; a mesh ends what it has started itself.",
    )
