"""Runs a process of the bench for each workload, one after another, under one time limit for all."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ..measure import Row, environment
from ..modules import workload
from ..system import BUDGETS, COMPILED
from .fill import caches, fill
from .first_call import FIRST_CALL

__all__ = ["in_processes"]

_GRACE_S = 120  # grace for the system that is running when the time limit is reached
_MOST_FOR_FILLING = 0.5  # of the time limit


def in_processes(chosen: Sequence[str], options: argparse.Namespace, folder: Path) -> int:
    """Run the workloads and return the worst exit code.

    Args:
      chosen: Names of the workloads.
      options: What the command line says.
      folder: A folder for the rows of each, and for torch's caches if they are filled.
    """
    start, worst, env = time.monotonic(), 0, dict(os.environ)
    if options.fill:
        env |= caches(folder)
        _fill(chosen, options, folder, start + _MOST_FOR_FILLING * options.limit_s)
    for name in chosen:
        left = options.limit_s - (time.monotonic() - start)
        row = Row(name, "all", "skipped", "the time limit was reached")
        if left > 0:
            part = folder / f"{name}.jsonl" if options.out is not None else None
            command = _command(name, options, left, part)
            try:
                code = subprocess.run(command, check=False, timeout=left + _GRACE_S, env=env).returncode
            except subprocess.TimeoutExpired:
                code = -1
            if part is not None and part.exists():
                with options.out.open("a") as file:
                    file.write(part.read_text())
                part.unlink()
            if code in (0, 1):
                worst = max(worst, code)
                continue
            row = Row(name, "all", "failed", f"the process ended with {code}")
            worst = 1
        print(f"{row.workload}: {row.status}: {row.reason}", flush=True)
        if options.out is not None:
            with options.out.open("a") as file:
                file.write(row.as_json(environment(options.device)) + "\n")
    return worst


def _command(name: str, options: argparse.Namespace, left: float, part: Path | None) -> list[str]:
    command = [sys.executable, "-m", "functional_cg.bench", "--workload", name]
    command += ["--device", options.device.type]
    command += ["--against", ",".join(options.against)] if options.against else []
    command += ["--limit-s", str(max(1, round(left)))]
    if name != FIRST_CALL:  # it times no steps
        command += ["--ours", options.ours] if options.ours else []
        command += ["--nodes"] if options.nodes else []
        command += ["--steps", str(options.steps)] if options.steps else []
    command += ["--json"] if options.json else []
    command += ["--verbose"] if options.verbose else []
    return [*command, *(["--out", str(part)] if part is not None else [])]


def _fill(chosen: Sequence[str], options: argparse.Namespace, folder: Path, deadline: float) -> None:
    """Compile what will be timed."""
    pairs = []
    for name in chosen:
        if name != FIRST_CALL:
            work = workload(name)
            systems = dict.fromkeys([options.ours or work.anchor, *(options.against or work.systems)])
            known = [system for system in systems if system in COMPILED and system in work.systems]
            pairs += [(name, system) for system in known if options.against or system not in BUDGETS]
    start = time.monotonic()
    for name, system, end in fill(pairs, options.device, options.fill, folder, deadline):
        print(f"{name}: {system}: filled the cache: {end}", flush=True)
    print(f"filled the caches of {len(pairs)} systems in {time.monotonic() - start:.0f} s", flush=True)
