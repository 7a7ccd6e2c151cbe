"""``python -m tests.stress``: all of it; or one of its programs, for as long as is said."""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from typing import Any

from tests.stress import forks, kills, mutations, runs, signals, threads

RUNS: dict[str, tuple[Callable[[Any], Any], float, str]] = {
    "threads": (threads.run, 600.0, "seconds for which 8 threads read, save, step and replace one state"),
    "signals": (lambda n: signals.run(int(n)), 10_000, "signals of three kinds"),
    "forks": (lambda n: forks.run(int(n)), 200, "forks beside three threads"),
    "kills": (lambda n: kills.run(int(n)), 300, "ranks killed while they train and save"),
    "ranks": (
        lambda n: kills.run_between(int(n)),
        4,
        "checkpoints between all numbers of ranks and stages up to that",
    ),
    "runs": (lambda n: runs.run(int(n)), 40, "signals to a program that is started again until it is done"),
    "mutations": (
        lambda n: mutations.run(int(n)),
        500,
        "damaged, mixed and malicious folders of checkpoints",
    ),
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.stress", description=__doc__)
    parser.add_argument("only", nargs="*", choices=[[], *RUNS], help="which; all of them by default")
    for name, (_, much, what) in RUNS.items():
        parser.add_argument(f"--{name}", type=float, default=much, help=f"{what}; {much:g} by default")
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*fork")
    for name in chosen.only or RUNS:
        start = time.monotonic()
        counts = RUNS[name][0](getattr(chosen, name))
        print(f"{name}, {time.monotonic() - start:.0f} s: {json.dumps(counts, indent=2, sort_keys=True)}")  # noqa: T201
