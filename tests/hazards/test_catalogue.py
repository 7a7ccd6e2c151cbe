"""The table of hazards is complete, its tests exist, and its page is up to date."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

import functional_cg as fcg
from tests.exports import exports
from tests.hazards.catalogue import FILES, HAZARDS, Hazard
from tests.hazards.document import PAGE, page
from tests.hazards.functions import ROOT, path_of, places, runs_on
from tests.mutants.catalogue import MUTANTS

BY_ID = {hazard.id: hazard for hazard in HAZARDS}
HERE = Path(__file__).parent


def missing(hazard: Hazard) -> list[str]:
    """The tests of a row that do not exist."""
    named = [path_of(test).split("::") for test in hazard.tests]
    return [f"{file}::{function}" for file, function in named if function not in places(file)]


def test_all_hazards_are_there() -> None:
    assert [hazard.number for hazard in HAZARDS] == list(range(1, 243))
    assert [sum(hazard.priority == p for hazard in HAZARDS) for p in (1, 2, 3)] == [179, 51, 12]
    assert all(hazard.outcome for hazard in HAZARDS)


@pytest.mark.parametrize("hazard", HAZARDS, ids=BY_ID)
def test_row_is_proven(hazard: Hazard) -> None:
    """Each row has a test, and all its tests exist."""
    assert missing(hazard) == []
    assert len(set(hazard.tests)) == len(hazard.tests)
    assert hazard.tests


def test_a_test_that_is_gone_is_noticed() -> None:
    first = HAZARDS[0]
    assert missing(replace(first, tests=("ownership::test_that_is_gone",))) == [
        "tests/test_ownership.py::test_that_is_gone"
    ]
    with pytest.raises(KeyError):
        runs_on(replace(first, tests=("ownership::test_that_is_gone",)))
    with pytest.raises(KeyError):
        path_of("nowhere::test_row")


def test_each_test_of_this_folder_belongs_to_the_row_of_its_name() -> None:
    for file in sorted(HERE.glob("test_h*.py")):
        for function in places(file.relative_to(ROOT).as_posix()):
            rows = [h for h in HAZARDS if any(path_of(test).endswith(f"::{function}") for test in h.tests)]
            named = re.match(r"test_h(\d+)_", function)
            assert rows, f"{file.name}::{function} is in no row"
            assert named is None or int(named[1]) in [hazard.number for hazard in rows], function


def test_files_exist_and_are_used() -> None:
    assert all((ROOT / file).is_file() for file in FILES.values())
    assert {test.partition("::")[0] for hazard in HAZARDS for test in hazard.tests} == set(FILES)


def test_mutants_exist() -> None:
    """Each mutant that a row names is one that tests notice, and each mutant has a row."""
    named = {number for hazard in HAZARDS for number in hazard.mutants}
    assert named == {mutant.name.split()[0] for mutant in MUTANTS}


def test_errors_that_rows_name_are_public() -> None:
    for hazard in HAZARDS:
        for name in re.findall(r"\b[A-Z]\w+Error\b", hazard.sees):
            assert name in {*exports(fcg), "TypeError", "ValueError", "OSError", "RuntimeError"}, (
                f"{hazard.id}: {name}"
            )
        if hazard.outcome == "refused":
            assert re.search(r"\b[A-Z]\w+Error\b|torch.func's own error", hazard.sees), hazard.id


def test_where_a_row_runs() -> None:
    assert runs_on(BY_ID["H32"]) == {"GPU"}
    assert runs_on(BY_ID["H28"]) == {"CPU"}
    assert runs_on(BY_ID["H12"]) == {"CPU", "GPU"}
    assert runs_on(BY_ID["H81"]) == {"CPU", "several GPUs"}


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python -m tests.hazards`"
