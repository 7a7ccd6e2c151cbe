"""Runs a function on several ranks, one process each, and collects what each returned or raised.

Importing torch takes seconds, and so does a first trace, so one process does it once: a server that is started with
the first call and forks the ranks of every call. It never runs CUDA and starts no thread, so that a fork of it is as
good as a new process: ranks start from a fresh interpreter state, end as any script does, and a rank that dies or
hangs takes no other test with it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import gc
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Never

import torch

from tests.forked import context
from tests.interpreted import compiles, interpreted
from tests.room import with_room

__all__ = ["Outcome", "a_port", "on_ranks", "outcomes", "outcomes_of_each"]

_ROOT = Path(__file__).resolve().parents[2]
_TIMEOUT = 90.0
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux
_STACKS_BEFORE = 2.0  # seconds before a rank is killed, it says where it hangs

_HEAD_START = 0.05  # seconds: rank 0 listens before others call, who would try again much later

# A sum over ranks in one order, whatever its size: what is grouped then has the bits of what is not.
_NCCL = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}


@dataclass(frozen=True)
class Outcome:
    """What became of one rank.

    Attributes:
      value: What the function returned.
      error: Its traceback as text, or why there is none; empty if it returned.
      code: The process' exit code; negative for a signal.
      log: What it printed.
      seconds: From its start until its end.
    """

    value: Any
    error: str
    code: int
    log: str
    seconds: float


def outcomes(
    ranks: int,
    function: Callable[..., Any],
    *args: Any,
    device: str = "cpu",
    timeout: float = _TIMEOUT,
    launched: bool = True,
) -> list[Outcome]:
    """Run a function on ranks, and wait until all processes have ended.

    Args:
      ranks: How many.
      function: At the top level of a module.
      args: What it gets; copied by pickle.
      device: ``cuda`` sets NCCL up to sum in one order; the function asks for its mesh there.
      timeout: Seconds until all ranks are killed.
      launched: Whether there is the environment that a launcher makes.
    """
    (found,) = outcomes_of_each(ranks, function, [args], device=device, timeout=timeout, launched=launched)
    return found


def outcomes_of_each(
    ranks: int,
    function: Callable[..., Any],
    calls: Sequence[tuple[Any, ...]],
    *,
    device: str = "cpu",
    timeout: float = _TIMEOUT,
    launched: bool = True,
) -> list[list[Outcome]]:
    """The same for several calls, each on ranks of its own: at one time, as most of their time they wait."""
    with contextlib.ExitStack() as stack:
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in calls]
        for folder, args in zip(folders, calls, strict=True):
            (folder / "call").write_bytes(pickle.dumps((function, args)))
        requests = [
            {
                "folder": str(folder),
                "compiles": compiles(),
                "environment": _environment(ranks, stack.enter_context(a_port()), device) if launched else {},
            }
            for folder in folders
        ]
        ends = iter(_server(device).ask({"ranks": ranks, "timeout": timeout, "calls": requests}))
        return [[_outcome(folder, rank, *next(ends)) for rank in range(ranks)] for folder in folders]


def on_ranks(ranks: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """What a function returned on each rank.

    Raises:
      AssertionError: If it raised on a rank, a rank hung, or ended with another exit code than 0.
    """
    found = outcomes(ranks, function, *args, **options)
    failed = [rank for rank, outcome in enumerate(found) if outcome.error or outcome.code]
    if failed:
        parts = [
            f"rank {rank} of {ranks}, exit code {found[rank].code}: {found[rank].error}\n{found[rank].log}"
            for rank in failed
        ]
        raise AssertionError("\n\n".join(parts))
    return [outcome.value for outcome in found]


@contextlib.contextmanager
def a_port() -> Iterator[int]:
    """A port that rank 0 may listen on. Until the ranks have ended, the system gives it to no other socket.

    At any address, as the store listens at all of them: NCCL's sockets are bound to that of a network interface.
    """
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # with the store's, which sets it, too
        kept.bind(("", 0))
        yield kept.getsockname()[1]


def _environment(ranks: int, port: int, device: str) -> dict[str, str]:
    common = {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return common | (_NCCL if device == "cuda" else {})


def _outcome(folder: Path, rank: int, code: int, seconds: float) -> Outcome:
    log = (folder / f"log{rank}").read_text(errors="replace")
    try:
        value, error = pickle.loads((folder / f"result{rank}").read_bytes())
    except (OSError, EOFError, pickle.UnpicklingError):
        value, error = (
            None,
            f"killed after {seconds:.0f} s" if code == -signal.SIGKILL else "ended without a result",
        )
    return Outcome(value, error, code, log, seconds)


class _Server:
    """The process that forks ranks."""

    def __init__(self, device: str) -> None:
        processes = context()
        self._pipe, its = processes.Pipe()
        self._process = processes.Process(target=_serve, args=(its, self._pipe, device))
        self._process.start()
        its.close()
        atexit.register(self._process.kill)

    def ask(self, request: Mapping[str, Any]) -> list[tuple[int, float]]:
        """Exit code and seconds of each rank."""
        try:
            self._pipe.send(request)
            return self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            raise AssertionError(f"the server of ranks ended with {self._process.exitcode}") from None
        except (
            BaseException
        ):  # Ctrl-C, or a test's own time limit: the answer would come to the next one who asks
            self._process.kill()
            _server.cache_clear()
            raise


@functools.cache
def _server(device: str) -> _Server:
    return _Server(device)


# -- in the server ------------------------------------------------------------------------------------------------


def _serve(pipe: Connection, other_end: Connection, device: str) -> None:
    """Fork ranks for each request; a rank returns from here, and its interpreter ends."""
    other_end.close()  # or there would be no end of requests when their process is gone
    os.chdir(_ROOT)
    if device != "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    # What pytest has changed where it runs in the process that this one is a fork of.
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    warnings.resetwarnings()
    _import_all()
    _ops_stay()
    gc.freeze()  # collections in the ranks leave alone what all of them share
    with contextlib.suppress(EOFError):  # nobody is there to ask
        while True:
            pipe.send(_ends_of(**pipe.recv()))


def _import_all() -> None:
    """Pay for all imports once, those of a first trace too; builds of torch with CUDA may not fork after a backward."""
    import torch._dynamo

    import functional_cg  # noqa: F401

    torch.set_num_threads(1)
    if torch.version.cuda is None:
        from torch._inductor.cpu_vec_isa import pick_vec_isa

        from functional_cg import sharding
        from functional_cg.shards.mesh import Axis, Mesh
        from tests.sharding.programs import warm_up

        warm_up()
        with _fake_group():
            warm_up(sharding.zero(Mesh((Axis("data", 2, 0, "0"),))))
        pick_vec_isa()  # a compiler asks other processes what this processor can do


@contextlib.contextmanager
def _fake_group() -> Iterator[None]:
    """One of two ranks, as far as a trace can see: a process group that neither sends nor starts a thread."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def _ops_stay() -> None:
    """Ranks end without unregistering op by op what ends with them: that would take as long as many of them run."""
    for finalizer in [
        one for one in weakref.finalize._registry if one.peek()[1] is torch.library._del_library
    ]:
        finalizer.atexit = False


def _ends_of(ranks: int, timeout: float, calls: Sequence[Mapping[str, Any]]) -> Sequence[tuple[int, float]]:
    """Start the ranks of each call, and wait until all have ended."""
    started: dict[int, int] = {}
    for call in calls:
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                with contextlib.nullcontext() if call["compiles"] else interpreted():
                    _be_rank(rank, Path(call["folder"]), call["environment"], timeout)
            started[child] = len(started)
            if rank == 0:
                time.sleep(_HEAD_START)
    return _ends(started, timeout)


def _ends(started: Mapping[int, int], timeout: float) -> Sequence[tuple[int, float]]:
    """Wait for processes; what is left after ``timeout`` seconds is killed."""
    start, left, killed = time.monotonic(), dict(started), False
    ends: dict[int, tuple[int, float]] = {}
    while left:
        child, status = os.waitpid(-1, os.WNOHANG)
        passed = time.monotonic() - start
        if child in left:
            ends[left.pop(child)] = (os.waitstatus_to_exitcode(status), passed)
        elif passed > timeout and not killed:
            killed = True
            for other in left:
                os.kill(other, signal.SIGKILL)
        else:
            time.sleep(0.005)
    return [ends[rank] for rank in sorted(ends)]


def _be_rank(rank: int, folder: Path, environment: Mapping[str, str], timeout: float) -> Never:
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    log = os.open(folder / f"log{rank}", os.O_WRONLY | os.O_CREAT, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(timeout - _STACKS_BEFORE, 0.1))
    # Makes torch's pool of threads anew. Otherwise the first backward does, from a thread for each GPU at one time:
    # the pool of a fork is replaced without a lock, and one of them finds none, or half of one.
    torch.set_num_threads(1)
    os.environ.update(environment)
    if environment:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    code = 1
    try:
        function, args = pickle.loads((folder / "call").read_bytes())
        result = (with_room(function, *args), "")
        code = 0
    except BaseException:
        result = (None, traceback.format_exc())
    with contextlib.suppress(OSError):  # the folder is gone: the caller has given up
        _write(folder / f"result{rank}", result)
    # What an interpreter does at its end, but for tearing down torch module by module, which takes a second.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


def _write(path: Path, result: Any) -> None:
    try:
        content = pickle.dumps(result)
    except Exception:  # whatever a value of a test raises
        content = pickle.dumps((None, traceback.format_exc()))
    path.write_bytes(content)
