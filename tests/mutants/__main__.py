"""``python -m tests.mutants [--general] [NAME ...]``: which tests kill which mutant, as a table.

With ``--general`` the tests are those that draw what they do, and what they notice is compared with the record; this
takes one to two minutes for each mutant.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.mutants.catalogue import MUTANTS
from tests.mutants.mutant import Mutant
from tests.mutants.runner import general_killers, run


def write(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def row(mutant: Mutant, verdict: str, general: Sequence[str], seconds: float) -> str:
    drawn = ", ".join(general) or "-"
    return f"{mutant.name:<16} {verdict:<9} {drawn:<38} {seconds:5.1f} s  {mutant.what}"


def by_its_tests(mutant: Mutant, folder: Path) -> bool:
    """Run the tests of a mutant; whether all of them kill it."""
    start = time.perf_counter()
    alive = run(mutant.killers, folder, mutant).surviving(mutant.killers)
    write(row(mutant, "SURVIVED" if alive else "killed", mutant.general, time.perf_counter() - start))
    for test in mutant.killers:
        write(f"{'':<16} {'passes' if test in alive else 'fails':<9} {test}")
    for test in mutant.gpu:
        write(f"{'':<16} {'on a GPU':<9} {test}")
    return not alive


def by_what_is_drawn(mutant: Mutant, folder: Path) -> bool:
    """Run the general tests on a mutant; whether those of the record kill it, and no others."""
    start = time.perf_counter()
    found = general_killers(folder, mutant)
    verdict = "as known" if found == mutant.general else "NEW"
    write(row(mutant, verdict, found, time.perf_counter() - start))
    return found == mutant.general


def main(arguments: Sequence[str]) -> int:
    """Run the mutants that are named, by default all; returns how many are not as they should be.

    A mutant of which no test is known that draws what it does is killed only by tests written for its kind.
    """
    names = [argument for argument in arguments if argument != "--general"]
    judge, said = (by_what_is_drawn, "as recorded") if "--general" in arguments else (by_its_tests, "killed")
    write(
        row(Mutant("mutant", "the mistake", (), ()), "", ("by what is drawn",), 0.0).replace(
            "  0.0 s", "   time"
        )
    )
    chosen = [m for m in MUTANTS if not names or any(m.name.split()[0] == name for name in names)]
    good = 0
    for mutant in chosen:
        with tempfile.TemporaryDirectory() as folder:
            good += judge(mutant, Path(folder).resolve())
    numbers = {m.number for m in chosen}
    general = {m.number for m in chosen if m.general}
    write(f"{len(general)} of {len(numbers)} designs are noticed by tests that draw what they do")
    write(f"{good} of {len(chosen)} mutants {said}")
    return len(chosen) - good


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
