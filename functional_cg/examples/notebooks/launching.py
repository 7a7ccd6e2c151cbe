"""Runs notebook functions on several ranks: writes them to a script and starts it as ``torchrun`` would."""

from __future__ import annotations

import dis
import inspect
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

__all__ = ["on_ranks", "script_of"]

_BEGIN = "from __future__ import annotations\n\n"  # annotations are not evaluated, so their names need not be defined
_END = """

if __name__ == "__main__":
    import os as _os, pathlib as _pathlib, pickle as _pickle, sys as _sys

    _given, _returned = map(_pathlib.Path, _sys.argv[1:])
    _value = {name}(*_pickle.loads(_given.read_bytes()))
    (_returned / _os.environ["RANK"]).write_bytes(_pickle.dumps(_value))
"""


def on_ranks(ranks: int, function: Callable[..., Any], *args: Any, timeout: float = 100.0) -> list[Any]:
    """Call a function on several ranks, each a separate process on the CPU.

    Args:
      ranks: Number of ranks.
      function: Defined in a notebook or a module; what it uses from the notebook is copied along.
      args: Its arguments, the same on all ranks; they are pickled.
      timeout: Seconds after which all are ended.
    Returns:
      The result of each rank, in rank order.
    Raises:
      RuntimeError: If a rank fails, with its output.
      TimeoutError: If they take too long.
    """
    with tempfile.TemporaryDirectory() as directory:
        script, given = Path(directory, "script.py"), Path(directory, "given")
        script.write_text(_BEGIN + script_of(function) + _END.format(name=function.__name__))
        given.write_bytes(pickle.dumps(args))
        command = [sys.executable, str(script), str(given), directory]
        logs = [Path(directory, f"{rank}.log") for rank in range(ranks)]
        # Binds the port at once: a port that was merely found free may be taken before it is used.
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        with ExitStack() as stack:
            processes = [
                stack.enter_context(_started(command, log, environment))
                for log, environment in zip(logs, _environments(ranks, store.port), strict=True)
            ]
            failed = _first_failed(processes, time.monotonic() + timeout)
        if failed is not None:
            raise RuntimeError(f"rank {failed} of `{function.__name__}` failed:\n{logs[failed].read_text()}")
        return [pickle.loads(Path(directory, str(rank)).read_bytes()) for rank in range(ranks)]


def _environments(ranks: int, port: int) -> Iterator[dict[str, str]]:
    """Make each rank's environment as ``torchrun`` sets it on one machine, with GPUs hidden."""
    meeting = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store already runs here: rank 0 must not open one
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    everyone = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), **meeting}
    for rank in range(ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        yield {**os.environ, **everyone, **own, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@contextmanager
def _started(command: list[str], log: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that is ended with the block."""
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def _first_failed(processes: list[subprocess.Popen[bytes]], deadline: float) -> int | None:
    """Wait until all have ended or one has failed, since the others would wait for it."""
    while True:
        codes = [process.poll() for process in processes]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed or None not in codes:
            return failed[0] if failed else None
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"ranks {[rank for rank, code in enumerate(codes) if code is None]} take too long"
            )
        time.sleep(0.05)


def script_of(function: Any) -> str:
    """Return source text that defines a function and the module-level names that it uses.

    Modules and names from them are imported, functions of the same module are written out, other values must be
    literals.

    Example:
      >>> from functional_cg.examples.notebooks.launching import script_of
      >>> import math
      >>> print(script_of(math.sqrt))
      from math import sqrt as sqrt
    """
    home = function.__module__
    written: dict[str, str] = {}

    def add(name: str, value: Any) -> None:
        if name in written:
            return
        if isinstance(value, ModuleType):
            written[name] = f"import {value.__name__} as {name}"
        elif isinstance(value, FunctionType) and (value.__module__ == home or value is function):
            written[name] = ""  # it may be recursive
            for used in _global_names(value.__code__):
                if used in value.__globals__:
                    add(used, value.__globals__[used])
            del written[name]  # after what it uses
            written[name] = f"\n\n{inspect.getsource(value).rstrip()}"
        elif hasattr(value, "__qualname__"):
            written[name] = f"from {value.__module__} import {value.__qualname__} as {name}"
        else:
            written[name] = f"{name} = {value!r}"

    add(function.__name__, function)
    return "\n".join(written.values())


def _global_names(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":  # `co_names` includes attribute names
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)
