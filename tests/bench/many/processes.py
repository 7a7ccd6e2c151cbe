"""Runs a process of the bench for each workload, one after another, under one time limit for all."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..measure import Row, environment
from ..modules import workload
from ..system import BUDGETS, COMPILED, ONCE
from .fill import caches, fill
from .first_call import FIRST_CALL

__all__ = ["in_processes"]

_GRACE_S = 120  # grace for the system that is running when the time limit is reached
_MOST_FOR_FILLING = 0.5  # of the time limit


def in_processes(chosen: Sequence[str], options: argparse.Namespace, folder: Path) -> int:
    """Run the workloads and return the worst exit code.

    While one is timed, the process of the next imports its libraries, and then waits for a line with the seconds left.

    Args:
      chosen: Names of the workloads.
      options: What the command line says.
      folder: A folder for the rows of each, and for torch's caches if they are filled.
    """
    start, worst, env = time.monotonic(), 0, dict(os.environ)
    if options.fill:
        env |= caches(folder)
        _fill(chosen, options, folder, start + _MOST_FOR_FILLING * options.limit_s)
    waiting: deque[subprocess.Popen[str]] = deque()
    try:
        for number, name in enumerate(chosen):
            left = options.limit_s - (time.monotonic() - start)
            part = folder / f"{name}.jsonl"
            row = Row(name, "all", "skipped", "the time limit was reached")
            if left > 0:
                for other in chosen[number + len(waiting) : number + 2]:
                    waiting.append(_started(other, options, folder / f"{other}.jsonl", env))
                code = _ended(waiting.popleft(), left)
                if options.out is not None and part.exists():
                    with options.out.open("a") as file:
                        file.write(part.read_text())
                if code in (0, 1):
                    worst = max(worst, code)
                    continue
                row = Row(name, "all", "failed", f"the process ended with {code}")
                worst = 1
            print(f"{row.workload}: {row.status}: {row.reason}", flush=True)
            if options.out is not None:
                with options.out.open("a") as file:
                    file.write(row.as_json(environment(options.device)) + "\n")
    finally:
        for process in waiting:
            process.kill()
            process.wait()
    return worst


def _started(
    name: str, options: argparse.Namespace, part: Path, env: Mapping[str, str]
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.bench", "--workload", name, "--told", "--out", str(part)]
    command += ["--device", options.device.type]
    command += ["--against", ",".join(options.against)] if options.against else []
    if name != FIRST_CALL:  # it times no steps
        command += ["--ours", options.ours] if options.ours else []
        command += ["--nodes"] if options.nodes else []
        command += ["--steps", str(options.steps)] if options.steps else []
    command += ["--json"] if options.json else []
    command += ["--verbose"] if options.verbose else []
    return subprocess.Popen(command, stdin=subprocess.PIPE, text=True, env=env)


def _ended(process: subprocess.Popen[str], left: float) -> int:
    """Tell a process to begin, and return its exit code."""
    try:
        process.communicate(f"{max(1, round(left))}\n", timeout=left + _GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return -1
    return process.returncode


def _fill(chosen: Sequence[str], options: argparse.Namespace, folder: Path, deadline: float) -> None:
    """Compile what will be timed."""
    pairs = []
    for name in chosen:
        if name != FIRST_CALL:
            work = workload(name)
            systems = dict.fromkeys([options.ours or work.anchor, *(options.against or work.systems)])
            known = [system for system in systems if system in COMPILED and system in work.systems]
            pairs += [(name, system) for system in known if options.against or system not in (*BUDGETS, ONCE)]
    start = time.monotonic()
    for name, system, end in fill(pairs, options.device, options.fill, folder, deadline):
        print(f"{name}: {system}: filled the cache: {end}", flush=True)
    print(f"filled the caches of {len(pairs)} systems in {time.monotonic() - start:.0f} s", flush=True)
