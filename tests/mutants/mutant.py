"""A mutant: the shipped code with one thing wrong."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MAX_LINES = 20

# Tests that draw what they do: random programs, the same on several streams, training with random optimizers, and the
# state machine.
GENERAL = {
    "programs": ("tests/properties/test_replay.py::test_replay_equals_eager_for_random_programs",),
    "streams": ("tests/properties/test_simulator.py::test_random_programs_on_any_streams_equal_eager",),
    "optimizers": ("tests/properties/test_replay.py::test_replay_equals_eager_for_drawn_optimizers",),
    "machine": (
        "tests/properties/test_machine.py::TestMachine",
        "tests/properties/test_machine.py::TestSimulatorMachine",
    ),
}


class StaleMutantError(Exception):
    """A mutant's passage is not in the code any more."""


@dataclass(frozen=True)
class Mutant:
    """One mistake.

    Attributes:
      name: Number in the list of naive designs, with a word where a number has several mutants.
      what: The mistake.
      edits: Pairs of a passage, which must occur exactly once in the package, and what stands there instead.
      killers: Ids of the tests that notice, the fastest first.
      general: What notices without knowing the mistake: names in :data:`GENERAL`. Without any, only tests that were
        written for such a mistake kill it.
      gpu: Ids of tests that notice on a GPU, one or two fast ones.
      no_gpu: Why there is none: why the mistake is no hazard there, or cannot be seen.
    """

    name: str
    what: str
    edits: tuple[tuple[str, str], ...]
    killers: tuple[str, ...]
    general: tuple[str, ...] = ()
    gpu: tuple[str, ...] = ()
    no_gpu: str = ""

    @property
    def number(self) -> int:
        """Its number in the list."""
        return int(self.name.split()[0].removeprefix("N"))

    def apply(self, package: Path) -> None:
        """Patch a copy of the package.

        Raises:
          StaleMutantError: If a passage is not there exactly once, or the patch is too long.
        """
        if sum(len(new.splitlines()) for _, new in self.edits) > MAX_LINES:
            raise StaleMutantError(f"{self.name}: a mutant is a patch of at most {MAX_LINES} lines")
        for old, new in self.edits:
            sources = {file: file.read_text(encoding="utf-8") for file in package.rglob("*.py")}
            found = [file for file, source in sources.items() for _ in range(source.count(old))]
            if len(found) != 1 or old == new:
                raise StaleMutantError(
                    f"{self.name} ({self.what}): this passage occurs {len(found)} times; write the mutant anew:\n{old}"
                )
            found[0].unlink()  # it may be a link to a file that other copies share
            found[0].write_text(sources[found[0]].replace(old, new), encoding="utf-8")
