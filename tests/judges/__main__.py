"""``python -m tests.judges``: run suites that others wrote, and write their rows.

A run appends a row to ``--out`` as each case ends, and skips the cases that are there: it can be cut off and resumed.
``--page`` writes the page, ``tests/judges/README.md``, of the rows of some files, and runs nothing. optax, jax and
tensordict come with ``pip install -e ".[judges]"``; a judge that is not installed is one case, not run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from tests.judges import pool
from tests.judges.document import PAGE, page
from tests.judges.judges import JUDGES


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.judges", description=__doc__)
    parser.add_argument("--of", nargs="+", choices=sorted(JUDGES), default=sorted(JUDGES), help="the judges")
    parser.add_argument("--only", nargs="+", help="names of cases")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--lowering", choices=("aten", "inductor"), help="both if left out")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side")
    parser.add_argument("--shard", default="0/1", help="i/n: every n-th case, from the i-th on")
    parser.add_argument(
        "--limit-s", type=float, default=float("inf"), help="start no case after these seconds"
    )
    parser.add_argument("--case-s", type=float, default=600.0, help="the most seconds for a case")
    parser.add_argument("--out", type=Path, default=Path("build/judges.jsonl"), help="the file of rows")
    parser.add_argument(
        "--page", nargs="+", type=Path, help="files of rows to write the page of; run nothing"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        pool.work(options.device)
    elif options.page:
        _write(options.page)
    else:
        lowerings = [options.lowering] if options.lowering else ["aten", "inductor"]
        pool.run(options, lowerings)
        sys.stdout.write(f"rows: {options.out}; --page writes {PAGE.name} of them\n")


def _write(files: list[Path]) -> None:
    """Write the page of the rows of some files."""
    totals = {(judge.JUDGE, torch.__version__): len(judge.cases("cpu")) for judge in JUDGES.values()}
    PAGE.write_text(page(pool.read(files), totals), encoding="utf-8")
    sys.stdout.write(f"{PAGE}\n")


if __name__ == "__main__":
    main()
