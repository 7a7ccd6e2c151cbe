"""Run a branched plan on one lane, and see whether values lie in the memory that the plan says.

What shares memory is known from a trace on fake tensors. Kernels that return an argument where the trace saw a new
tensor, or copy where it saw a view, do no harm in a line. Between lanes they would: the order follows memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import Tensor

from ...tensors.overlap import storage_key
from .units import Memory, Unit

__all__ = ["Lanes", "Rehearsal"]


class Lanes:
    """Where the calls of a branched plan run: by default, one lane. On a GPU, streams and the events between them.

    Entering begins on lane 0, and leaving ends there, after all lanes.
    """

    def __enter__(self) -> object: ...

    def __exit__(self, *error: object) -> None: ...

    def on(self, lane: int) -> None:
        """Run what follows on a lane."""

    def wait(self, unit: int) -> None:
        """Let the lane wait for a unit that was recorded."""

    def record(self, unit: int) -> None:
        """Let other lanes wait for all that the lane has run so far, under the number of its last unit."""

    def kernel(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        """Return what to call for a kernel that does not pass by torch's dispatcher."""
        return launch


class Rehearsal(Lanes):
    """One lane, which is told of each value that a unit defines.

    Args:
      static: Tensors that are there before the run.
      known: Their memory, and that of all views of them.
    Attributes:
      surprise: The first unit whose results lie elsewhere; empty if there is none.
    """

    def __init__(self, static: Iterable[Tensor], known: Collection[Memory]) -> None:
        self._static, self._known = {storage_key(tensor) for tensor in static}, frozenset(known)
        self._where: dict[int, Memory] = {}
        self.surprise = ""

    def defined(self, unit: Unit, values: Iterable[tuple[Memory, object]]) -> None:
        """Take note of what a unit defines.

        Args:
          unit: The unit, which just ran.
          values: Its results and views of them, each with the memory in which it should lie.
        """
        for memory, value in values:
            if not isinstance(value, Tensor) or not value.untyped_storage().nbytes():
                continue
            key = storage_key(value)
            if memory in self._known or key in self._static:
                as_said = memory in self._known and key in self._static
            elif key in self._where:
                as_said = self._where[key] == memory
            else:
                as_said = memory in unit.made
            self._where[key] = memory
            self.surprise = self.surprise or ("" if as_said else unit.name)

    def freed(self, memory: Collection[Memory]) -> None:
        """Forget memory that is free."""
        self._where = {key: one for key, one in self._where.items() if one not in memory}
