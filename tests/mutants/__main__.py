"""``python -m tests.mutants [NAME ...]``: which tests kill which mutant, as a table."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from tests.mutants.catalogue import MUTANTS
from tests.mutants.runner import run


def main(names: list[str]) -> int:
    """Run the mutants whose names begin with one of ``names``, by default all; the number that survive."""

    def write(line: str) -> None:
        sys.stdout.write(f"{line}\n")

    chosen = [m for m in MUTANTS if not names or any(m.name.split()[0] == name for name in names)]
    survivors = 0
    for mutant in chosen:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            outcome = run(mutant.killers, Path(folder).resolve(), mutant)
        alive = outcome.surviving(mutant.killers)
        survivors += bool(alive)
        seconds = time.perf_counter() - start
        write(f"{mutant.name:<12} {'SURVIVED' if alive else 'killed':<9} {seconds:5.1f} s  {mutant.what}")
        for test in mutant.killers:
            write(f"{'':<12} {'passes' if test in alive else 'fails':<9} {'':8} {test}")
    write(f"{len(chosen) - survivors} of {len(chosen)} mutants killed")
    return survivors


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
