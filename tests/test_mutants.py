"""The tests of hazards are tested: each mutant makes its tests fail, and the shipped code makes them pass."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.mutants import gpu
from tests.mutants.__main__ import main
from tests.mutants.catalogue import MUTANTS
from tests.mutants.gpu import calibrate
from tests.mutants.mutant import GENERAL, MAX_LINES, Mutant, StaleMutantError
from tests.mutants.pipelines import PIPELINES
from tests.mutants.record import digests, known_dead, read, to_run, write
from tests.mutants.runner import ROOT, Outcome, collected, general_killers, run
from tests.shares import THOROUGH


def planted(old: str, new: str, *killers: str) -> Mutant:
    return Mutant("planted", "a planted mutant", ((old, new),), killers)


def chosen() -> list[Mutant]:
    """All in the profile ``thorough``. Those of pipelines start processes, and their tests are few: there alone."""
    if THOROUGH:
        return list(MUTANTS)
    return to_run([one for one in MUTANTS if one not in PIPELINES], ROOT, read())


@pytest.mark.parametrize("mutant", chosen(), ids=lambda mutant: mutant.name)
def test_each_mutant_is_killed(mutant: Mutant, tmp_path: Path) -> None:
    """By the first of its tests; by each of them in the profile ``thorough``."""
    killers = mutant.killers if THOROUGH else mutant.killers[:1]
    outcome = run(killers, tmp_path, mutant)
    assert killers
    assert not outcome.surviving(killers), outcome.output
    assert outcome.slips() == []


def a_project(root: Path) -> Path:
    for name, text in (
        ("functional_cg/one.py", "x = 1\ny = 2\n"),
        ("tests/test_one.py", "def test_x(): ...\n"),
    ):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("functional_cg/one.py", "x = 1\ny = 3\n"),
        ("functional_cg/one.py", "y = 2\n"),
        ("functional_cg/two.py", "x = 1\n"),
        ("tests/test_one.py", ""),
    ],
    ids=["its file", "its passage", "another place", "its test"],
)
def test_what_was_killed_before_a_change_is_not_known_to_be_dead(
    file: str, text: str, tmp_path: Path
) -> None:
    mutants = [planted("x = 1", "x = 2", "tests/test_one.py::test_x")]
    root, record = a_project(tmp_path), tmp_path / "killed.txt"
    assert known_dead(mutants, root, read(record)) == []
    write(digests(mutants, root), record)
    assert known_dead(mutants, root, read(record)) == mutants
    assert known_dead([replace(mutants[0], killers=())], root, read(record)) == []
    (root / file).write_text(text, encoding="utf-8")
    assert known_dead(mutants, root, read(record)) == []


def test_some_of_the_dead_are_killed_again(tmp_path: Path) -> None:
    mutants = [
        replace(planted("x = 1", f"x = {n}", "tests/test_one.py::test_x"), name=f"N{n}") for n in range(2, 45)
    ]
    root = a_project(tmp_path)
    killed = digests(mutants[1:], root)
    assert [one.name for one in to_run(mutants, root, killed)] == ["N2", "N3", "N23", "N43"]
    assert to_run(mutants, root, {}) == mutants


def test_all_are_there() -> None:
    """Designs of a step on one device, of shards, pipelines, branches, parts, compilers, host watches, interrupts."""
    compiled, lines = {33, 34, *(set(range(48, 56)) - {52})}, {*range(35, 43), 46, 47}
    assert {mutant.number for mutant in MUTANTS} == {
        *range(1, 28),
        *compiled,
        *lines,
        *range(60, 66),
        *(set(range(70, 96)) - {78}),
        *range(110, 135),
        *range(140, 144),
        150,
        *(set(range(160, 254)) - {177}),
        *range(260, 267),
    }
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert {name for mutant in MUTANTS for name in mutant.general} <= set(GENERAL)


def test_twelve_are_noticed_without_knowing_them() -> None:
    """By random programs or the state machine alone, as recorded; the tests below repeat some of the record."""
    general = {mutant.number for mutant in MUTANTS if {"programs", "machine"} & set(mutant.general)}
    assert len(general) >= 12


@pytest.mark.parametrize("name", ["N10", "N16"])
def test_random_programs_notice_what_the_record_says(name: str, tmp_path: Path) -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.name == name)
    assert "programs" in mutant.general
    assert general_killers(tmp_path, mutant, ["programs"]) == ("programs",)


@pytest.mark.parametrize("name", ["N13"])
def test_the_machine_notices_what_the_record_says(name: str, tmp_path: Path) -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.name == name)
    assert "machine" in mutant.general
    assert general_killers(tmp_path, mutant, ["machine"]) == ("machine",)


def test_a_gpu_notices_or_it_is_said_why_not() -> None:
    assert [one.name for one in MUTANTS if bool(one.gpu) == bool(one.no_gpu)] == []
    assert [one.name for one in MUTANTS if len(one.gpu) > 2 or "\n" in one.no_gpu] == []


def test_the_tests_of_mutants_exist(tmp_path: Path) -> None:
    """On the shipped code they pass, as all tests of this suite do."""
    tests = sorted({test for mutant in MUTANTS for test in (*mutant.killers, *mutant.gpu)})
    assert sorted(collected(tests, tmp_path)) == tests


def test_without_a_gpu_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--gpu", "--jobs", "2"]) == 2
    assert capsys.readouterr().out == "--gpu: torch sees no GPU here\n"


def test_the_table_of_a_gpu() -> None:
    """With tests that need none: killed, survived, broken, stale, without a test, and a shipped code that fails."""
    test = "tests/properties/test_replay.py::test_commit_is_parallel[cpu]"
    line = "    deque(map(operator.call, calls), maxlen=0)\n"
    staged = "    plan.staged = {old for old, new in plan.commits if new.storage in in_slots}\n"
    mutants = [
        replace(planted(staged, "    plan.staged = set()\n"), name="mistake", gpu=(test,)),
        replace(planted(line, line.replace("calls)", "[*calls])")), name="harmless", gpu=(test,)),
        replace(planted(line, "    deque(map(nobody, calls), maxlen=0)\n"), name="slip", gpu=(test,)),
        replace(planted("this passage is nowhere", ""), name="old", gpu=(test,)),
        replace(planted("", ""), name="none", no_gpu="there is no such hazard"),
    ]
    lines: list[str] = []
    assert calibrate(mutants, 2, lines.append) == 3
    verdicts = [f"{mutant.name:<17} " for mutant in mutants]
    table = "\n".join(lines)
    for start, verdict in zip(verdicts, ["killed", "SURVIVED", "BROKEN", "NO RESULT", "-"], strict=True):
        assert f"\n{start}{verdict} " in table, table
    for said in (f"failed      {test}", f"passed      {test}", "NameError: name 'nobody'", "occurs 0 times"):
        assert said in table, table
    assert "no GPU test: there is no such hazard" in table
    assert re.search(r"\nshipped code +passes ", table)
    assert table.endswith("\n1 of 4 mutants killed on a GPU\n1 have no test there")


def test_a_shipped_code_that_fails_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    test = "tests/a.py::test_a"
    monkeypatch.setattr(gpu, "run", lambda tests, folder, mutant: Outcome({test: "FAILED"}, ""))
    lines: list[str] = []
    assert calibrate([replace(planted("a", "b"), gpu=(test,))], 1, lines.append) == 1
    assert re.search(r"\nshipped code +FAILS .*\n +failed +tests/a.py::test_a\n", "\n".join(lines))


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
        ("import torch\n", "import torch\n\n", r"occurs \d\d+ times"),
        ("    deque(map(operator.call, calls), maxlen=0)\n", "\n" * (MAX_LINES + 1), "at most 20 lines"),
    ],
    ids=["gone", "ambiguous", "long"],
)
def test_a_stale_mutant_is_loud(old: str, new: str, said: str) -> None:
    before = (ROOT / "functional_cg" / "state" / "leaf.py").read_text(encoding="utf-8")
    with pytest.raises(StaleMutantError, match=said):
        planted(old, new).apply(ROOT / "functional_cg")
    assert (ROOT / "functional_cg" / "state" / "leaf.py").read_text(encoding="utf-8") == before


def test_a_slip_is_noticed(tmp_path: Path) -> None:
    """A mutant whose own code is wrong fails everywhere: that says nothing of the tests."""
    test = "tests/properties/test_replay.py::test_commit_is_parallel[cpu]"
    slip = planted("    deque(map(operator.call, calls), maxlen=0)\n", "    nobody(calls)\n")
    outcome = run([test], tmp_path, slip)
    assert outcome.surviving([test]) == []
    assert [line.rpartition(": NameError: ")[2] for line in outcome.slips()] == [
        "name 'nobody' is not defined"
    ]


@pytest.mark.parametrize(
    "arguments",
    [["N99"], ["--changed", "N1"], ["--gpu", "--jobs", "0"], ["--jobs", "2"], ["--gpu", "--general"]],
)
def test_bad_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["N16"]) == 0
    printed = capsys.readouterr().out
    assert "N16              killed    programs" in printed
    assert printed.endswith("1 of 1 mutants killed\n")
