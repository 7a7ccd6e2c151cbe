"""Measures time and memory of the first call, in one process per system, with cold and warm caches.

``python -m tests.bench --workload first-call`` runs it. Seconds count from the start of the build to the first
loss, without imports.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from ..measure import BATCHES, Row, start
from ..modules import names, workload
from ..system import OPPONENTS, OURS, VARIANTS, Unavailable
from ..workloads import Workload

__all__ = ["FIRST_CALL", "SYSTEMS", "child", "main", "rows"]

FIRST_CALL = "first-call"  # the workload, on the command line
SYSTEMS = (OURS[0], "eager", "compile", "reduce-overhead", "hand-graph-compiled", "jax", OURS[1])
_GRACE_S = 240


def rows(work: Workload, systems: Sequence[str], device: torch.device, deadline: float) -> Iterator[Row]:
    """Yield two rows for each system: cold and warm.

    Args:
      work: The workload.
      systems: Names of the systems.
      device: Device to run on.
      deadline: Time, by ``time.monotonic``, after which no process is started.
    """
    for name in systems:
        with tempfile.TemporaryDirectory() as folder:
            for caches in ("cold", "warm"):
                row = Row(work.name, f"{name}, {caches}", "skipped", "the time limit was reached")
                if time.monotonic() < deadline:
                    row = _in_process(work, name, row.system, device, Path(folder))
                yield row


def _in_process(work: Workload, name: str, label: str, device: torch.device, folder: Path) -> Row:
    out = folder / "row.json"
    out.unlink(missing_ok=True)
    caches = {
        "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "JAX_COMPILATION_CACHE_DIR": "jax"
    }  # fmt: skip
    command = child(name, work.name, device, out)
    try:
        code = subprocess.run(
            command,
            check=False,
            timeout=_GRACE_S,
            env=os.environ | {key: str(folder / value) for key, value in caches.items()},
        ).returncode
    except subprocess.TimeoutExpired:
        return Row(work.name, label, "failed", f"took longer than {_GRACE_S} s")
    if code != 0 or not out.exists():
        return Row(work.name, label, "failed", f"the process ended with {code}")
    row = Row(**json.loads(out.read_text()))
    row.system = label
    if row.start_bytes and row.steady_bytes:
        row.notes.append(
            f"memory through the first call: {row.start_bytes / row.steady_bytes:.3f} of the steady peak"
        )
    return row


def child(system: str, work: str, device: torch.device, out: Path) -> list[str]:
    """Return the command line of a process that makes the first calls of a system and writes a row of JSON."""
    command = [sys.executable, "-m", "tests.bench.many.first_call", system, "--workload", work]
    return [*command, "--device", device.type, "--out", str(out)]


def main(argv: Sequence[str] | None = None) -> int:
    """Make the first calls of one system, and write the row as JSON."""
    parser = argparse.ArgumentParser("python -m tests.bench.many.first_call", description=__doc__)
    parser.add_argument("system", choices=(*OURS, *VARIANTS, *OPPONENTS))
    parser.add_argument("--workload", choices=names(), required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    work = workload(options.workload)
    row = Row(work.name, options.system)
    try:
        start(options.system, work, device, work.batches(BATCHES), row).close()
    except Unavailable as error:
        row.status, row.reason = "skipped", str(error)
    options.out.write_text(row.as_json({}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
