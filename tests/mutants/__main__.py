"""``python -m tests.mutants [--changed | --general | --gpu [--jobs N]] [NAME ...]``: which tests kill which mutant.

Without a name all of them run, and those that die are recorded: the tests of this project run the others, and some of
these. With ``--changed`` only those run that are not recorded with the sources and tests as they are.
With ``--general`` the tests are those that draw what they do, and what they notice is compared with the record; this
takes one to two minutes for each mutant. With ``--gpu`` they are those that need a GPU.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.mutants.catalogue import MUTANTS
from tests.mutants.gpu import calibrate
from tests.mutants.mutant import Mutant
from tests.mutants.record import digests, known_dead, read
from tests.mutants.record import write as write_record
from tests.mutants.runner import ROOT, general_killers, run


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


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return int(text)


def main(arguments: Sequence[str]) -> int:
    """Run the mutants that are named, by default all; returns how many are not as they should be.

    A mutant of which no test is known that draws what it does is killed only by tests written for its kind.
    """
    parser = argparse.ArgumentParser("python -m tests.mutants")
    names = list(dict.fromkeys(mutant.name.split()[0] for mutant in MUTANTS))
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--changed", action="store_true", help="those not recorded as killed as they are")
    kind.add_argument("--general", action="store_true", help="by tests that draw what they do")
    kind.add_argument("--gpu", action="store_true", help="by tests that need a GPU; 0 if all is well, else 1")
    parser.add_argument("--jobs", type=_positive, help="with --gpu: how many mutants at once (default 1)")
    parser.add_argument("names", nargs="*", metavar="NAME", help="N1 and so on (default: all)")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in names]:
        parser.error(f"unknown {', '.join(unknown)}; choose from {', '.join(names)}")
    if options.jobs and not options.gpu:
        parser.error("--jobs goes with --gpu")
    if options.changed and options.names:
        parser.error("--changed chooses by itself")
    chosen = [m for m in MUTANTS if not options.names or m.name.split()[0] in options.names]
    if options.gpu:
        if not torch.cuda.is_available():
            write("--gpu: torch sees no GPU here")
            return 2
        return int(calibrate(chosen, options.jobs or 1, write) > 0)
    if options.changed:
        dead = known_dead(MUTANTS, ROOT, read())
        chosen = [m for m in MUTANTS if m not in dead]
    return on_a_cpu(chosen, general=options.general, record=not (options.names or options.general))


def on_a_cpu(chosen: Sequence[Mutant], *, general: bool, record: bool) -> int:
    """Run the tests that need no GPU; ``record`` writes down, one by one, which mutants they kill."""
    judge, said = (by_what_is_drawn, "as recorded") if general else (by_its_tests, "killed")
    head = row(Mutant("mutant", "the mistake", (), ()), "", ("by what is drawn",), 0.0)
    write(head.replace("  0.0 s", "   time"))
    good, now = 0, digests(MUTANTS, ROOT)
    for mutant in chosen:
        with tempfile.TemporaryDirectory() as folder:
            is_good = judge(mutant, Path(folder).resolve())
        good += is_good
        if record:
            killed = {name: digest for name, digest in read().items() if name in now and name != mutant.name}
            write_record(killed | ({mutant.name: now[mutant.name]} if is_good else {}))
    numbers, drawn = {m.number for m in chosen}, {m.number for m in chosen if m.general}
    write(f"{len(drawn)} of {len(numbers)} designs are noticed by tests that draw what they do")
    write(f"{good} of {len(chosen)} mutants {said}")
    return len(chosen) - good


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
