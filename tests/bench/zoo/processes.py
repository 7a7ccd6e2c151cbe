"""Judge models in processes of their own, several at a time: one that crashes or hangs ends nothing but itself."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from .case import Case, Size
from .judge import Outcome, judge

__all__ = ["Run", "outcomes"]


@dataclass(frozen=True, slots=True)
class Run:
    """How models are judged.

    Attributes:
      device: Where they run.
      lowering: As for ``graph_step``.
      calls: Steps of each.
      jobs: Processes at a time.
      timeout: For each model, in seconds.
    """

    device: str
    lowering: str
    calls: int
    jobs: int
    timeout: float


def outcomes(cases: Iterable[Case], run: Run) -> Iterator[tuple[Case, Outcome, float]]:
    """Yield each model, what became of it and how many seconds it took, in the order in which they end."""
    # A process that is forked cannot use a GPU.
    context: Any = multiprocessing.get_context("fork" if run.device == "cpu" else "spawn")
    left = list(cases)[::-1]
    running: dict[Any, tuple[Case, Any, float]] = {}
    while left or running:
        while left and len(running) < run.jobs:
            case = left.pop()
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(case, run, there))
            process.start()
            there.close()
            running[here] = case, process, time.monotonic()
        for connection in wait(list(running), timeout=1):
            assert isinstance(connection, Connection)
            case, process, start = running.pop(connection)
            outcome = None
            with contextlib.suppress(EOFError):
                outcome = connection.recv()
            process.join()
            if outcome is None:
                outcome = Outcome("crashed", f"its process ended with {process.exitcode}")
            yield case, outcome, time.monotonic() - start
        for connection, (case, process, start) in list(running.items()):
            if time.monotonic() - start > run.timeout:
                del running[connection]
                process.kill()
                process.join()
                yield case, Outcome("unusable", f"takes more than {run.timeout:.0f} s"), run.timeout


def _child(case: Case, run: Run, pipe: Connection) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # differences are to be those of float32
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    pipe.send(judge(case, run.device, run.lowering, run.calls, Size.of(run.device).most))
