"""The ranks of a run of the GPT example: laid out by its options, led by the first, and of one mind.

Each rank runs the whole program, so what one of them alone comes to know (a file that is missing, Ctrl-C, a replay
that differs) has to reach the others before the next collective: they would wait in it.
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
    """This rank among all; without ``--mesh`` it is the only one.

    Attributes:
      rank: Its number.
      size: How many there are.
      sharding: What ``TrainState.create`` takes; None without ``--mesh``.
    """

    rank: int = 0
    size: int = 1
    sharding: Any = None

    @property
    def first(self) -> bool:
        """Whether this is the rank that prints and writes."""
        return self.rank == 0

    def say(self, text: str) -> None:
        """Print once, not once per rank."""
        if self.first:
            print(text, flush=True)

    def exchange(self, value: T) -> list[T]:
        """What each rank has to say, on all of them; a small value that pickles. All ranks call it."""
        said: list[Any] = [value]
        if self.size > 1:
            said *= self.size
            dist.all_gather_object(said, value)
        return said

    def together(self, action: Callable[[], T]) -> T:
        """Do something that may fail on some ranks only; then it fails on all. It calls no collective.

        Raises:
          ValueError: On the ranks on which it went well, with what the first of the others said.
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
    """Lay out the ranks as the options say. All ranks get the same answer: nothing has been started yet.

    Raises:
      ValueError: If ``--mesh`` is no layout of the processes that were started, or is missing though there are many.
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
    """Whether Ctrl-C has struck a rank: a question that all ranks ask at the same step, and answer alike.

    A rank that stopped by itself would leave the others in a collective, or have its state saved as a mixture of two
    steps. With one rank Ctrl-C is what it is elsewhere, and the answer is no. So is a second Ctrl-C.
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
