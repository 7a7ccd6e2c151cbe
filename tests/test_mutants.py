"""The tests of hazards are tested: each mutant makes its tests fail, and the shipped code makes them pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.__main__ import main
from tests.mutants.catalogue import MUTANTS
from tests.mutants.mutant import GENERAL, MAX_LINES, Mutant, StaleMutantError
from tests.mutants.runner import ROOT, general_killers, run

KILLERS = tuple(dict.fromkeys(test for mutant in MUTANTS for test in mutant.killers))


def planted(old: str, new: str, *killers: str) -> Mutant:
    return Mutant("planted", "a planted mutant", ((old, new),), killers)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_mutant_is_killed_by_each_of_its_tests(mutant: Mutant, tmp_path: Path) -> None:
    outcome = run(mutant.killers, tmp_path, mutant)
    assert mutant.killers
    assert not outcome.surviving(mutant.killers), outcome.output


def test_the_shipped_code_passes_all_of_these_tests(tmp_path: Path) -> None:
    outcome = run(KILLERS, tmp_path)
    assert outcome.verdicts == dict.fromkeys(KILLERS, "PASSED"), outcome.output


def test_all_twenty_are_there() -> None:
    assert {mutant.number for mutant in MUTANTS} == set(range(1, 21))
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert {name for mutant in MUTANTS for name in mutant.general} <= set(GENERAL)


def test_twelve_are_noticed_without_knowing_them() -> None:
    """By random programs or the state machine alone, as recorded; the tests below repeat some of the record."""
    general = {mutant.number for mutant in MUTANTS if {"programs", "machine"} & set(mutant.general)}
    assert len(general) >= 12


@pytest.mark.parametrize("name", ["N1", "N10", "N16"])
def test_random_programs_notice_what_the_record_says(name: str, tmp_path: Path) -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.name == name)
    assert "programs" in mutant.general
    assert general_killers(tmp_path, mutant, ["programs"]) == ("programs",)


@pytest.mark.parametrize("name", ["N9", "N12", "N13"])
def test_the_machine_notices_what_the_record_says(name: str, tmp_path: Path) -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.name == name)
    assert "machine" in mutant.general
    assert general_killers(tmp_path, mutant, ["machine"]) == ("machine",)


def test_tests_on_a_gpu_exist() -> None:
    for test in dict.fromkeys(test for mutant in MUTANTS for test in mutant.gpu):
        file, _, function = test.partition("::")
        assert f"\ndef {function}(" in (ROOT / file).read_text(encoding="utf-8"), test


def test_a_survivor_is_noticed(tmp_path: Path) -> None:
    """A change that is no mistake: the test passes, so it does not count as a kill."""
    test = "tests/properties/test_replay.py::test_commit_is_parallel[cpu]"
    harmless = planted(
        "    deque(map(operator.call, calls), maxlen=0)\n",
        "    deque(map(operator.call, [*calls]), maxlen=0)\n",
    )
    outcome = run([test], tmp_path, harmless)
    assert outcome.surviving([test]) == [test]
    assert outcome.verdicts == {test: "PASSED"}


def test_code_that_cannot_be_imported_is_no_kill(tmp_path: Path) -> None:
    broken = planted("    deque(map(operator.call, calls), maxlen=0)\n", "    deque(\n")
    with pytest.raises(RuntimeError, match="pytest ended with"):
        run(["tests/properties/test_replay.py::test_commit_is_parallel[cpu]"], tmp_path, broken)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("this passage is nowhere", "", "occurs 0 times"),
        ("import torch\n", "import torch\n\n", r"occurs \d\d times"),
        ("    deque(map(operator.call, calls), maxlen=0)\n", "\n" * (MAX_LINES + 1), "at most 20 lines"),
    ],
    ids=["gone", "ambiguous", "long"],
)
def test_a_stale_mutant_is_loud(old: str, new: str, said: str) -> None:
    before = (ROOT / "functional_cg" / "leaf.py").read_text(encoding="utf-8")
    with pytest.raises(StaleMutantError, match=said):
        planted(old, new).apply(ROOT / "functional_cg")
    assert (ROOT / "functional_cg" / "leaf.py").read_text(encoding="utf-8") == before


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["N16"]) == 0
    printed = capsys.readouterr().out
    assert "N16              killed    programs" in printed
    assert printed.endswith("1 of 1 mutants killed\n")
