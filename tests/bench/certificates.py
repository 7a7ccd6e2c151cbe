"""Times comparisons of later calls: ``python -m tests.bench.certificates --device cuda``.

Two steps of one workload run as many calls as asked for: one is compared with its traced calls in its first call alone,
the other at calls 2, 4, 8 and so on, too. Printed are what each of these calls took beyond an ordinary one, with the
device idle before and after it, their share of all calls, and both runs as a whole.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from .measure import BATCHES, environment
from .system import System
from .systems.opponents import ours
from .workloads import Workload, names, workload

__all__ = ["main", "row"]

_STEPS = 10_000


def row(work: Workload, device: torch.device, steps: int) -> dict[str, Any]:
    """Run both steps, and return the times.

    Args:
      work: The workload.
      device: Device to run on.
      steps: Calls of each step.
    """
    batches = [{key: value.to(device) for key, value in batch.items()} for batch in work.batches(BATCHES)]
    first, going_on = (ours("inductor", work, device, batches, certify=one) for one in ("first", "auto"))
    for system in (first, going_on):
        system.step(batches[0])
    without, _ = _run(first, steps)
    total, compared = _run(going_on, steps)
    usual = without / (steps - 1)
    extra = [seconds - usual for seconds in compared]
    for system in (first, going_on):
        system.close()
    return {
        "workload": work.name,
        "steps": steps,
        "ms": round(usual * 1e3, 4),
        "compared": len(extra),
        "extra_ms": [round(seconds * 1e3, 2) for seconds in extra],
        "share": round(sum(extra) / without, 5),
        "whole": round(total / without, 4),
    }


def _run(system: System, steps: int) -> tuple[float, list[float]]:
    """Make calls 2 to ``steps``; return the seconds of all, and of each that is compared."""
    compared, start, due = [], time.perf_counter(), 2
    for call in range(2, steps + 1):
        batch = system.batches[call % BATCHES]
        if call == due:
            system.wait()
            before = time.perf_counter()
            system.step(batch)
            system.wait()
            compared.append(time.perf_counter() - before)
            due *= 2
        else:
            system.step(batch)
    system.wait()
    return time.perf_counter() - start, compared


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program, and print a line of JSON per workload, with the median share of a few runs."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser("python -m tests.bench.certificates", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if on_gpu else "cpu")
    parser.add_argument("--workload", choices=names(), nargs="+", default=["mlp-tiny", "gpt-nano"])
    parser.add_argument("--steps", type=int, default=_STEPS, help="calls of each step")
    parser.add_argument("--runs", type=int, default=3, help="runs of both")
    options = parser.parse_args(argv)
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    print(json.dumps(environment(device)), flush=True)
    for name in options.workload:
        rows = [row(workload(name), device, options.steps) for _ in range(options.runs)]
        for one in rows:
            print(json.dumps(one), flush=True)
        print(json.dumps({"workload": name, "share": statistics.median(one["share"] for one in rows)}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
