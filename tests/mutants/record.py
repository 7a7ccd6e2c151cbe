"""Which mutants are known to be dead: killed by their tests, with sources and tests that are still the same.

The gate runs the others, so it runs again what a change may have brought back to life. ``python -m tests.mutants``
runs all and writes ``killed.txt``, a mutant and a digest a line; no history of the sources is needed to read it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tests.mutants.mutant import Mutant

__all__ = ["FILE", "digests", "known_dead", "read", "to_run", "write"]

FILE = Path(__file__).with_name("killed.txt")
SAMPLE = 20  # of so many that are dead, one is killed again at each run


def digests(mutants: Iterable[Mutant], root: Path) -> dict[str, str]:
    """A digest of each mutant, of the files that it patches and of those of its tests, by name.

    A mutant whose passage is not there exactly once has none.
    """
    sources = {
        file: file.read_text(encoding="utf-8") for file in sorted((root / "functional_cg").rglob("*.py"))
    }
    found = {}
    for mutant in mutants:
        patched = [
            [file for file, text in sources.items() for _ in range(text.count(old))]
            for old, _ in mutant.edits
        ]
        if all(len(files) == 1 for files in patched):
            tests = [root / test.partition("::")[0] for test in mutant.killers]
            files = dict.fromkeys([*(files[0] for files in patched), *filter(Path.is_file, tests)])
            parts = [repr((mutant.edits, mutant.killers)).encode(), *(file.read_bytes() for file in files)]
            found[mutant.name] = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    return found


def read(file: Path = FILE) -> dict[str, str]:
    """The digests with which mutants were killed, by name; none without a record."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return {name: digest for digest, _, name in (line.partition(" ") for line in lines)}


def write(killed: Mapping[str, str], file: Path = FILE) -> None:
    """Write the digests with which mutants were killed, by name."""
    lines = [f"{digest} {name}\n" for name, digest in sorted(killed.items())]
    file.write_text("".join(lines), encoding="utf-8")


def known_dead(mutants: Sequence[Mutant], root: Path, killed: Mapping[str, str]) -> list[Mutant]:
    """Those that were killed as they are now."""
    now = digests(mutants, root)
    return [one for one in mutants if one.name in now and killed.get(one.name) == now[one.name]]


def to_run(mutants: Sequence[Mutant], root: Path, killed: Mapping[str, str]) -> list[Mutant]:
    """Those that are not known to be dead, and some of those that are."""
    dead = known_dead(mutants, root, killed)
    spared = {one.name for number, one in enumerate(dead) if number % SAMPLE}
    return [one for one in mutants if one.name not in spared]
