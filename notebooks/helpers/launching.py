"""Runs notebook functions on several ranks: writes them to a script and starts it as ``torchrun`` would."""

from __future__ import annotations

import atexit
import dis
import inspect
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, Never

from torch.distributed import TCPStore  # type: ignore[attr-defined]

__all__ = ["on_ranks", "run_on_ranks", "script_of"]

_ROOT = Path(__file__).resolve().parents[__name__.count(".")]  # from where ranks import this module

_BEGIN = "from __future__ import annotations\n\n"  # annotations are not evaluated, so their names need not be defined
_END = """

if __name__ == "__main__":
    from {here} import run_on_ranks as _run_on_ranks

    _run_on_ranks({name})
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
        folder = Path(directory)
        script = folder / "script.py"
        script.write_text(_BEGIN + script_of(function) + _END.format(here=__name__, name=function.__name__))
        (folder / "given").write_bytes(pickle.dumps(args))
        # Binds the port at once: a port that was merely found free may be taken before it is used.
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        command = [sys.executable, str(script), directory, str(ranks)]
        with _started(command, folder / "0.log", _environment(ranks, store.port)) as process:
            try:
                code = process.wait(timeout)
            except subprocess.TimeoutExpired:
                late = [rank for rank in range(ranks) if not (folder / str(rank)).exists()]
                raise TimeoutError(f"ranks {late} take too long") from None
        if code:
            rank = max(code - 1, 0)
            said = (folder / f"{rank}.log").read_text()
            raise RuntimeError(f"rank {rank} of `{function.__name__}` failed:\n{said}")
        return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(ranks)]


def run_on_ranks(function: Callable[..., Any]) -> Never:
    """Fork this process into ranks, which import torch once for all, and end it as the first of them that fails.

    Its exit code is 0, or one more than the number of that rank.
    """
    import torch._dynamo
    import torch.distributed.tensor  # a first trace imports both  # noqa: F401

    folder, ranks = Path(sys.argv[1]), int(sys.argv[2])
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=_run_as_rank, args=(rank, function, folder)) for rank in range(ranks)]
    for process in processes:
        process.start()
    running: dict[Any, int] = {process.sentinel: rank for rank, process in enumerate(processes)}
    while running:
        for ended in wait(list(running)):
            rank = running.pop(ended)
            processes[rank].join()
            if processes[rank].exitcode:
                os._exit(rank + 1)  # the others would wait for it
    os._exit(0)


def _run_as_rank(rank: int, function: Callable[..., Any], folder: Path) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        value = function(*pickle.loads((folder / "given").read_bytes()))
        (folder / str(rank)).write_bytes(pickle.dumps(value))
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves them out


def _environment(ranks: int, port: int) -> dict[str, str]:
    """What ``torchrun`` tells all ranks on one machine, with GPUs hidden."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store already runs here: rank 0 must not open one
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


@contextmanager
def _started(command: list[str], log: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that is ended with the block, with all that it has forked."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):  # all have ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def script_of(function: Any) -> str:
    """Return source text that defines a function and the module-level names that it uses.

    Modules and names from them are imported, functions of the same module are written out, other values must be
    literals.

    Example:
      >>> from notebooks.helpers.launching import script_of
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
