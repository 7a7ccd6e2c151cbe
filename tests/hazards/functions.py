"""Lists the tests and the devices they run on by parsing their source, without importing it."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

from tests.hazards.catalogue import FILES, Hazard

__all__ = ["ROOT", "path_of", "places", "runs_on"]

ROOT = Path(__file__).resolve().parents[2]
_ON_BOTH = ("everywhere", "on_both_devices")
_SEVERAL = "pytest.mark.multi_gpu(2)"
_ON_RANKS = "on_gloo_and_nccl"


def path_of(test: str) -> str:
    """``tests/...py::function`` of a test in the table.

    Raises:
      KeyError: If its file has no name in the table.
    """
    file, _, function = test.partition("::")
    return f"{FILES[file]}::{function}"


@functools.cache
def places(file: str) -> dict[str, frozenset[str]]:
    """The test functions of a file, and where each runs: on the ``CPU``, on one ``GPU``, on ``several GPUs``."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {
        node.name: frozenset({"GPU"} if file.startswith("tests/cuda/") else _places_of(node))
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def _places_of(test: ast.FunctionDef) -> set[str]:
    marks = [ast.unparse(decorator) for decorator in test.decorator_list]
    if "pytest.mark.cuda" in marks:
        return {"GPU"}
    if _SEVERAL in marks:
        return {"several GPUs"}
    if _ON_RANKS in marks:
        return {"CPU", "several GPUs"}
    return {"CPU", "GPU"} if any(mark in _ON_BOTH for mark in marks) else {"CPU"}


def runs_on(hazard: Hazard) -> set[str]:
    """Where the tests of a row run.

    Raises:
      KeyError: If one of them does not exist.
    """
    named = [path_of(test).split("::") for test in hazard.tests]
    return set().union(*(places(file)[function] for file, function in named))
