"""Times the cost of ``debug=``: ``python -m tests.bench.debug --device cuda``.

The same training step runs without it, with ``"poison"``, with ``"verify"`` and with both; every call is verified. The
variants take turns, so that clocks and temperature are the same for all. Algorithms are deterministic: ``"verify"``
refuses a compiled embedding gradient, which sums in a different order each time.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Literal

import torch

from .measure import BATCHES, WARM_UPS, environment, in_turns
from .systems.opponents import ours
from .workloads import Workload, names, workload

__all__ = ["main", "rows"]

_SETTINGS = (None, "poison", "verify", "verify+poison")
_STEPS = 200


def rows(
    work: Workload, lowering: Literal["aten", "inductor"], device: torch.device, steps: int
) -> Iterator[dict[str, Any]]:
    """Yield one row for each setting.

    Args:
      work: The workload.
      lowering: Lowering of the step.
      device: Device to run on.
      steps: Timed steps for each setting.
    """
    batches = [{key: value.to(device) for key, value in batch.items()} for batch in work.batches(BATCHES)]
    systems = [
        ours(lowering, work, device, batches, debug=debug, verify_calls=sys.maxsize) for debug in _SETTINGS
    ]
    for system in systems:
        for i in range(WARM_UPS):
            system.step(batches[i % BATCHES])
        system.wait()
    samples = in_turns(systems, steps)
    for debug, system, ms in zip(_SETTINGS, systems, samples, strict=True):
        system.close()
        yield {
            "workload": work.name,
            "lowering": lowering,
            "debug": debug or "off",
            **asdict(ms),
            "ratio": round(ms.median / samples[0].median, 2),
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program, and print a line of JSON per row, with times in ms per call."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser("python -m tests.bench.debug", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if on_gpu else "cpu")
    parser.add_argument("--workload", choices=names(), nargs="+", default=["mlp-tiny", "gpt-nano"])
    parser.add_argument("--lowering", choices=("aten", "inductor"), nargs="+", default=["aten", "inductor"])
    parser.add_argument("--steps", type=int, default=_STEPS, help="timed steps for each setting")
    options = parser.parse_args(argv)
    if options.steps < 1:
        parser.error(f"--steps: expected a positive integer, got {options.steps}")
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    print(json.dumps(environment(device)), flush=True)
    with _deterministic():
        for name in options.workload:
            for lowering in options.lowering:
                for row in rows(workload(name), lowering, device, options.steps):
                    print(json.dumps(row), flush=True)
    return 0


@contextmanager
def _deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by cuBLAS
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


if __name__ == "__main__":
    raise SystemExit(main())
