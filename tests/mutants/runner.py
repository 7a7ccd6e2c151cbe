"""Runs tests against a copy of the package, patched or not."""

from __future__ import annotations

import compileall
import functools
import gc
import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.forked import context
from tests.mutants.mutant import GENERAL, Mutant

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_SECONDS = 900
OUTPUT = "output.txt"
SLIPS = re.compile(r"^\S+:\d+: (NameError|UnboundLocalError|SyntaxError|ImportError|ModuleNotFoundError)\b")
# Loaded by pytest: says which package it tests, and spares hypothesis the work on failures that nobody reads.
PLUGIN = """
import functional_cg
import hypothesis

def pytest_report_header():
    return "package: " + functional_cg.__file__

def pytest_configure(config):
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
    hypothesis.settings.register_profile("mutants", hypothesis.settings.default, phases=phases)
    hypothesis.settings.load_profile("mutants")
"""


@dataclass(frozen=True)
class Outcome:
    """What tests say about a copy.

    Attributes:
      verdicts: ``PASSED``, ``FAILED`` or ``ERROR`` by test id.
      output: What pytest wrote.
    """

    verdicts: dict[str, str]
    output: str

    def surviving(self, tests: Sequence[str]) -> list[str]:
        """The tests that did not fail: an error in a fixture or an import kills nothing."""
        return [test for test in tests if self.verdicts.get(test) != "FAILED"]

    def slips(self) -> list[str]:
        """Lines on errors that no mistake in a design makes: a mutant with one fails everywhere, and says nothing."""
        return [line for line in self.output.splitlines() if SLIPS.search(line)]


def run(tests: Sequence[str], folder: Path, mutant: Mutant | None = None) -> Outcome:
    """Run tests on a copy of the package and of the tests in ``folder``.

    Raises:
      StaleMutantError: If the mutant does not fit the code any more.
      RuntimeError: If pytest could not run.
    """
    code, output = _pytest_on_copy(folder, ["-rpfE", "--tb=line", *tests], mutant)
    if code not in (0, 1) or f"package: {folder / 'functional_cg'}" not in output:
        raise RuntimeError(f"pytest ended with {code}:\n{output}")
    lines = re.finditer(r"^(PASSED|FAILED|ERROR) (\S+?::.*?)(?: - .*)?$", output, re.MULTILINE)
    return Outcome({line[2]: line[1] for line in lines}, output)


def collected(tests: Sequence[str], folder: Path) -> list[str]:
    """The ids of tests that pytest finds on a copy, and its complaints about others."""
    _, output = _pytest_on_copy(folder, ["--collect-only", "-q", *tests])
    return [line for line in output.splitlines() if "::" in line]


_ONE = threading.Lock()


def _pytest_on_copy(
    folder: Path, arguments: Sequence[str], mutant: Mutant | None = None
) -> tuple[int | None, str]:
    with _ONE:  # threads that ask at one time would make two, and one would be deleted while it is copied
        shipped = _shipped()
    shutil.copytree(shipped.name, folder, copy_function=_linked, dirs_exist_ok=True)
    if mutant is not None:
        mutant.apply(folder / "functional_cg")
    (folder / "where.py").write_text(PLUGIN, encoding="utf-8")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "FCG_"))
    }
    environment |= {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "SECONDS_OF_MESHES": "1"}
    # Nobody reads what was compared, and pytest would take as long to rewrite all assertions as most tests to run.
    flags = ["--assert=plain", "-p", "where", "-p", "no:cacheprovider", "-p", "no:randomly"]
    return _pytest(folder, [*flags, *arguments], environment)


@functools.cache
def _shipped() -> tempfile.TemporaryDirectory[str]:
    """The package and its tests, compiled once for all copies."""
    shipped = tempfile.TemporaryDirectory()
    for name in ("functional_cg", "tests"):
        shutil.copytree(ROOT / name, Path(shipped.name, name), ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", shipped.name)
    compileall.compile_dir(shipped.name, quiet=1)
    return shipped


def _linked(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # on another file system
        shutil.copy2(source, target)


def _pytest(folder: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[int | None, str]:
    process = context().Process(target=_in_folder, args=(folder, arguments, environment))
    process.start()
    process.join(TIMEOUT_SECONDS)
    process.kill()
    process.join()
    return process.exitcode, (folder / OUTPUT).read_text(encoding="utf-8")


def _in_folder(folder: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """What the forked process does: as if started there, without the modules of this copy."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = [str(folder), *(entry for entry in sys.path if entry not in ("", str(ROOT)))]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("functional_cg", "tests")]:
        del sys.modules[name]
    output = os.open(OUTPUT, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    gc.freeze()  # what is there already is not looked through again, by collections and by hypothesis
    code = pytest.main(list(arguments))
    sys.stdout.flush()
    os._exit(code)


def general_killers(folder: Path, mutant: Mutant, names: Sequence[str] = tuple(GENERAL)) -> tuple[str, ...]:
    """Which of the tests that draw what they do notice a mutant: names in :data:`GENERAL`."""
    outcome = run([test for name in names for test in GENERAL[name]], folder, mutant)
    failed = [test for test, verdict in outcome.verdicts.items() if verdict == "FAILED"]
    return tuple(name for name in names if any(test.startswith(GENERAL[name]) for test in failed))
