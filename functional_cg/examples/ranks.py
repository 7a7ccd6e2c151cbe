"""Coordinates the ranks of a GPT run: layout, output from rank 0, and agreement on errors and Ctrl-C.

Each rank runs the whole program. Whatever only one of them notices (a missing file, Ctrl-C, a replay that differs) must
reach the others before the next collective, or they would wait in it.
"""

from __future__ import annotations

import os
import signal
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import functional_cg as fcg

__all__ = ["Ranks", "ranks_of", "stop_request"]

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This rank and the number of ranks; without ``--mesh`` there is one.

    Attributes:
      rank: Number of this rank.
      size: Number of ranks.
      sharding: Argument for ``TrainState.create``; None without ``--mesh``.
    """

    rank: int = 0
    size: int = 1
    sharding: Any = None

    @property
    def first(self) -> bool:
        """Whether this rank prints and writes."""
        return self.rank == 0

    def say(self, text: str) -> None:
        """Print on rank 0 only."""
        if self.first:
            print(text, flush=True)

    def exchange(self, value: T) -> list[T]:
        """Gather a small picklable value from each rank on all of them. All ranks must call it."""
        said: list[Any] = [value]
        if self.size > 1:
            said *= self.size
            dist.all_gather_object(said, value)
        return said

    def together(self, action: Callable[[], T]) -> T:
        """Run something that may fail on some ranks only, and fail on all if it does. It must not call a collective.

        Raises:
          ValueError: On the ranks where it succeeded, with the message of the first rank where it failed.
        """
        try:
            result = action()
        except (ImportError, OSError, ValueError) as error:
            self.exchange(str(error))
            raise
        for rank, problem in enumerate(self.exchange(None)):
            if problem is not None:
                raise ValueError(f"rank {rank}: {problem}")
        return result


def ranks_of(options: Namespace) -> Ranks:
    """Lay out the ranks as the options say. A refusal is the same on all ranks, before anything has started.

    Raises:
      ValueError: If ``--mesh`` does not fit the number of processes, or is missing although there are several.
    """
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if options.mesh is None:
        if started > 1:
            raise ValueError(
                f"{started} processes were started, and each would train alone; add --mesh data=-1"
            )
        return Ranks()
    here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", started)), torch.cuda.device_count()
    if options.device.type == "cuda" and here > gpus:
        raise ValueError(f"{here} processes on this machine need a GPU each, torch sees {gpus}")
    mesh = fcg.sharding.mesh(options.mesh, device=options.device.type)
    return Ranks(mesh.rank, mesh.size, fcg.sharding.zero(mesh, stage=options.zero))


@contextmanager
def stop_request(ranks: Ranks) -> Iterator[Callable[[], bool]]:
    """Yield a function that tells, alike on all ranks, whether Ctrl-C has reached any of them.

    All ranks must call it at the same step. A rank that stopped alone would leave the others in a collective, or save
    its shards from another step than theirs. With one rank the answer is always no, and Ctrl-C raises as usual. A
    second Ctrl-C raises as usual, too.
    """
    if ranks.size == 1:
        yield lambda: False
        return
    struck = []

    def note(number: int, frame: FrameType | None) -> None:
        struck.append(number)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: any(ranks.exchange(bool(struck)))
    finally:
        signal.signal(signal.SIGINT, before)
