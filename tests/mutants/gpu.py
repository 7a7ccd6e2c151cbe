"""GPU results for the mutants: where the hazard exists on a GPU, they must agree with the simulator.

Each mutant is run on a copy of its own, several at once if asked to; the shipped code must pass all of these tests.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.mutant import Mutant, StaleMutantError
from tests.mutants.runner import Outcome, run

__all__ = ["calibrate"]


@dataclass(frozen=True)
class _Result:
    """What came of one copy: an outcome, or why there is none."""

    outcome: Outcome | None
    error: str
    seconds: float


def calibrate(mutants: Sequence[Mutant], jobs: int, write: Callable[[str], None]) -> int:
    """Run the GPU tests of mutants, and once those of all of them on the shipped code, and write a table.

    Args:
      mutants: Which ones.
      jobs: How many copies are tested at once.
      write: Gets each line of the table.
    Returns:
      How many mutants are not killed by each of their tests, plus one if the shipped code fails any.
    """
    tests = list(dict.fromkeys(test for mutant in mutants for test in mutant.gpu))
    write(_row("mutant", "on a GPU", "time", "the mistake"))
    bad = 0
    with ThreadPoolExecutor(jobs) as pool:
        shipped = pool.submit(_tested, tests, None)
        results = {m.name: pool.submit(_tested, m.gpu, m) for m in mutants if m.gpu}
        for mutant in mutants:
            if not mutant.gpu:
                write(_row(mutant.name, "-", "", mutant.what))
                write(_line("", f"no GPU test: {mutant.no_gpu}"))
                continue
            result = results[mutant.name].result()
            verdict = _verdict(mutant, result)
            bad += verdict != "killed"
            write(_row(mutant.name, verdict, f"{result.seconds:.1f} s", mutant.what))
            _write_tests(mutant.gpu, result, write)
        result = shipped.result()
        passed = [test for test in tests if result.outcome and result.outcome.verdicts.get(test) == "PASSED"]
    good = len(passed) == len(tests)
    write(_row("shipped code", "passes" if good else "FAILS", f"{result.seconds:.1f} s", "no mistake"))
    if not good:
        _write_tests([test for test in tests if test not in passed], result, write)
    with_tests = [mutant for mutant in mutants if mutant.gpu]
    write(f"{len(with_tests) - bad} of {len(with_tests)} mutants killed on a GPU")
    write(f"{len(mutants) - len(with_tests)} have no test there")
    return bad + (not good)


def _tested(tests: Sequence[str], mutant: Mutant | None) -> _Result:
    start = time.perf_counter()
    outcome, error = None, ""
    if tests:
        with tempfile.TemporaryDirectory() as folder:
            try:
                outcome = run(tests, Path(folder).resolve(), mutant)
            except (RuntimeError, StaleMutantError, subprocess.TimeoutExpired) as caught:
                error = f"{type(caught).__name__}: {caught}"
    return _Result(outcome, error, time.perf_counter() - start)


def _verdict(mutant: Mutant, result: _Result) -> str:
    if result.outcome is None:
        return "NO RESULT"
    if result.outcome.slips():
        return "BROKEN"
    return "SURVIVED" if result.outcome.surviving(mutant.gpu) else "killed"


def _write_tests(tests: Sequence[str], result: _Result, write: Callable[[str], None]) -> None:
    for test in tests:
        verdict = result.outcome.verdicts.get(test, "did not run") if result.outcome else ""
        write(_line(verdict.lower(), test))
    for line in result.outcome.slips() if result.outcome else result.error.splitlines()[-3:]:
        write(_line("", line))


def _row(name: str, verdict: str, seconds: str, what: str) -> str:
    return f"{name:<17} {verdict:<11} {seconds:>8}  {what}"


def _line(verdict: str, text: str) -> str:
    return f"{'':<17} {verdict:<11} {text}"
