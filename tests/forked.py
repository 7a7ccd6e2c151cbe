"""Processes that need not import torch: half of a short run is that import."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkContext, ForkServerContext
from pathlib import Path
from types import ModuleType

import torch

__all__ = ["Program", "context"]

# Nothing of the package, and nothing that starts a thread.
PRELOADED = [
    "hypothesis.stateful",
    "hypothesis.extra.numpy",
    "pytest",
    "torch",
    "torch._subclasses.fake_tensor",
    "torch.distributed.tensor",
    "torch.utils.checkpoint",
    "torch._dynamo",
    "tests.known_files",
]
# On a machine with a GPU these two ask it how many it is: then no fork can use it, and threads are running.
PRELOADED_WITHOUT_A_GPU = ["torch._inductor.compile_fx", "torch._inductor.lowering"]


def context() -> ForkContext | ForkServerContext:
    """Forks of one server of this process', which has imported; those that it forked fork themselves."""
    if multiprocessing.parent_process() is not None:
        return multiprocessing.get_context("fork")
    server = multiprocessing.get_context("forkserver")
    also = [] if torch.cuda.is_available() else PRELOADED_WITHOUT_A_GPU
    server.set_forkserver_preload([*PRELOADED, *also])
    return server


class Program:
    """``python -m MODULE ...`` or ``python -c CODE ...``, on one thread; killed at the end of the block.

    Args:
      command: What follows ``python``.
    """

    def __init__(self, *command: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._written = Path(self._folder.name, "out"), Path(self._folder.name, "err")
        for path in self._written:
            path.touch()
        self._process = context().Process(target=_run, args=(command, self._written, dict(os.environ)))
        self._process.start()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *caught: object) -> None:
        self.kill()
        self._process.join()
        self._folder.cleanup()

    @property
    def out(self) -> str:
        """What it has printed so far."""
        return self._written[0].read_text(errors="replace")

    @property
    def err(self) -> str:
        """What it has said so far on its standard error."""
        return self._written[1].read_text(errors="replace")

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.exitcode

    def end(self, timeout: float) -> int:
        """Wait for its end, and return the exit code."""
        self._process.join(timeout)
        assert self.code is not None, f"still running after {timeout:g} s: {self.err}"
        return self.code

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """Send a signal, Ctrl-C by default, unless it has ended."""
        assert self._process.pid is not None
        if self.code is None:
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        """End it without a chance to say anything."""
        self._process.kill()


def _run(command: Sequence[str], written: Sequence[Path], environment: Mapping[str, str]) -> None:
    kind, program, *arguments = command
    for number, path in enumerate(written, start=1):
        os.dup2(os.open(path, os.O_WRONLY), number)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)  # so that a busy machine does not slow it down
    sys.argv[:] = [kind, *arguments]
    try:
        if kind == "-m":
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            main = sys.modules["__main__"] = ModuleType("__main__")
            exec(compile(program, "<string>", "exec"), main.__dict__)
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves them out
