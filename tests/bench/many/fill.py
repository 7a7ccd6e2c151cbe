"""Compiles systems of several workloads side by side, so that those that are timed find their kernels in the cache.

Kernels that are tuned while others run on the same device are tuned to the noise. So what was tuned is forgotten:
variants of a kernel that inductor timed are timed again, and systems with ``max-autotune`` are compiled again, from
kernels that Triton has compiled.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from ..system import TUNED
from .first_call import child

__all__ = ["caches", "fill"]

_ALL_TUNED = (TUNED, "max-autotune")
_POLL_S = 0.05


def caches(folder: Path, *, tuned: bool = False) -> dict[str, str]:
    """Return the environment in which torch's caches lie in a folder; those of tuned systems lie apart."""
    inductor = folder / ("tuned" if tuned else "inductor")
    return {"TORCHINDUCTOR_CACHE_DIR": str(inductor), "TRITON_CACHE_DIR": str(folder / "triton")}


def fill(
    pairs: Sequence[tuple[str, str]], device: torch.device, jobs: int, folder: Path, deadline: float
) -> Iterator[tuple[str, str, str]]:
    """Make the first calls of systems, several processes at a time, and yield what became of each.

    Args:
      pairs: Names of the workload and the system.
      device: Where they run.
      jobs: Processes at a time.
      folder: Where the caches lie.
      deadline: Time, by ``time.monotonic``, at which those that still run are ended.
    Yields:
      (workload, system, what became of it).
    """
    left = list(pairs)[::-1]
    running: dict[tuple[str, str], tuple[subprocess.Popen[bytes], float]] = {}
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    try:
        while left or running:
            while left and len(running) < jobs:
                work, system = left.pop()
                where = caches(folder, tuned=system in _ALL_TUNED)
                running[work, system] = (
                    _started(work, system, device, folder, where, threads),
                    time.monotonic(),
                )
            for (work, system), (process, start) in list(running.items()):
                late = time.monotonic() > deadline
                if process.poll() is None and not late:
                    continue
                del running[work, system]
                seconds = f"{time.monotonic() - start:.0f} s"
                yield work, system, _end(process, late=late) or seconds
            time.sleep(_POLL_S)
    finally:
        for process, _ in running.values():
            process.kill()
        for timed in folder.rglob("*.best_config"):
            timed.unlink()


def _started(
    work: str, system: str, device: torch.device, folder: Path, where: Mapping[str, str], threads: str
) -> subprocess.Popen[bytes]:
    env = os.environ | where | {"TORCHINDUCTOR_COMPILE_THREADS": threads, "OMP_NUM_THREADS": threads}
    return subprocess.Popen(
        child(system, work, device, folder / f"{work}.{system}.json"),
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _end(process: subprocess.Popen[bytes], *, late: bool) -> str:
    """Return why a process was of no use; empty if it was."""
    if process.poll() is None and late:
        process.kill()
        process.wait()
        return "ended: the time limit was reached"
    return f"ended with {process.returncode}" if process.returncode else ""
