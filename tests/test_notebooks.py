"""A notebook, in the profile ``thorough`` all, runs from top to bottom on a CPU, and shows what is committed."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")

from notebooks.run import run  # noqa: E402  (it needs the packages above)
from tests.shares import share  # noqa: E402

NOTEBOOKS = sorted((Path(__file__).resolve().parent.parent / "notebooks").glob("*.ipynb"))
MAX_BYTES = 400_000
# What only one machine has.
PATHS = re.compile(r"(?<![\w.])/(?:home|root|Users|tmp|private|work|usr|opt|var)/|[A-Z]:\\|site-packages")


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds(cell: Any) -> set[str]:
    """What a cell shows: types of data, and text that it prints. Warnings of libraries come and go."""
    shown = [set(output.get("data", {})) or {output.get("name", "error")} for output in cell.outputs]
    return set().union(*shown) - {"stderr"}


def unfinished(notebook: Any) -> list[str]:
    """Say what a notebook that was run from top to bottom would not have."""
    cells = code_cells(notebook)
    counts = [cell.execution_count for cell in cells]
    outputs = [output for cell in cells for output in cell.outputs]
    wrong = [f"cells were executed as {counts}"] if counts != list(range(1, len(cells) + 1)) else []
    wrong += ["a cell shows an error" for output in outputs if output.output_type == "error"]
    if not any("image/png" in output.get("data", {}) for output in outputs):
        wrong.append("no pictures")
    texts = [str({**output, "data": {**output.get("data", {}), "image/png": ""}}) for output in outputs]
    wrong += [f"a path of one machine: {found[0]}" for text in texts if (found := PATHS.search(text))]
    return wrong


def test_there_are_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == [
        "01_state_and_graph_step",
        "02_what_goes_wrong_without_it",
        "03_property_testing",
        "04_optimizers_and_recipes",
        "05_sharded_state",
        "06_where_does_it_go",
        "07_many_models_at_once",
        "08_where_did_it_go_wrong",
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_committed_was_run(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert unfinished(notebook) == []
    assert path.stat().st_size < MAX_BYTES


@pytest.mark.timeout(400)  # a busy machine takes several times as long
@pytest.mark.parametrize("path", share(NOTEBOOKS, len(NOTEBOOKS)), ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_is_committed(
    path: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    # The user's list of fonts may name those of an environment that is gone, and a cell then says which are missing.
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path_factory.getbasetemp() / "matplotlib"))
    for record in path.parent.glob("*.json"):
        shutil.copy(record, tmp_path)
    shutil.copytree(path.parent / "helpers", tmp_path / "helpers")
    fresh = run(Path(shutil.copy(path, tmp_path)))
    assert unfinished(fresh) == []
    committed = nbformat.read(path, as_version=4)
    pairs = zip(code_cells(fresh), code_cells(committed), strict=True)
    different = [one.outputs for one, other in pairs if kinds(one) != kinds(other)]
    assert not different, f"cells that show something else: {different}"


# --- the checks find what they are for ---------------------------------------------------------------------


def test_a_failing_assertion_fails(tmp_path: Path) -> None:
    cells = [nbformat.v4.new_code_cell(source) for source in ("x = 1", "assert x == 2", "x")]
    path = tmp_path / "planted.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="AssertionError"):
        run(path)


def edit_nothing(notebook: Any) -> None:
    pass


def run_twice(notebook: Any) -> None:
    code_cells(notebook)[0].execution_count = 7


def skip_a_cell(notebook: Any) -> None:
    code_cells(notebook)[-1].execution_count = None


def clear_the_outputs(notebook: Any) -> None:
    for cell in code_cells(notebook):
        cell.outputs = []


def leave_an_error(notebook: Any) -> None:
    code_cells(notebook)[0].outputs = [nbformat.v4.new_output("error", ename="E", evalue="", traceback=[])]


def show_a_path(notebook: Any) -> None:
    code_cells(notebook)[0].outputs = [nbformat.v4.new_output("stream", text="at /home/me/train.py:3")]


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (edit_nothing, None),
        (run_twice, "executed as"),
        (skip_a_cell, "executed as"),
        (clear_the_outputs, "no pictures"),
        (leave_an_error, "error"),
        (show_a_path, "/home/"),
    ],
)
def test_a_planted_problem_is_found(edit: Callable[[Any], None], problem: str | None) -> None:
    notebook = nbformat.read(NOTEBOOKS[0], as_version=4)
    edit(notebook)
    found = unfinished(notebook)
    assert (found == []) if problem is None else (len(found) == 1 and problem in found[0])
