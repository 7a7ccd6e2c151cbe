"""The maintainers' page matches the package, and its examples run."""

from __future__ import annotations

import ast
import builtins
import doctest
import re

from tests.rooms import PAGE, page
from tests.test_layers import FOLDERS, ROOT, SOURCES

PATHS = sorted(set(re.findall(r"`((?:[a-z_]+/)*[a-z_]+(?:\.py|/))`", PAGE.read_text(encoding="utf-8"))))


def test_the_drawing_is_that_of_the_imports() -> None:
    assert page() == PAGE.read_text(encoding="utf-8"), "`python -m tests.rooms` draws it anew"


def test_what_the_page_names_is_there() -> None:
    places = (ROOT, ROOT / "stages", ROOT.parent)
    assert [path for path in PATHS if not any((place / path).exists() for place in places)] == []


def test_each_room_says_what_it_is() -> None:
    assert [folder for folder in sorted(FOLDERS) if not SOURCES[folder].startswith('"""')] == []


def unbound(docstring: str) -> set[str]:
    """Names that an example uses and does not bring: it would not run where a reader pastes it."""
    bound, used = set(dir(builtins)), set()
    for example in doctest.DocTestParser().get_examples(docstring):
        for node in ast.walk(ast.parse(example.source)):
            if isinstance(node, ast.Name):
                (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                bound.add(node.name)
            elif isinstance(node, ast.arg):
                bound.add(node.arg)
            elif isinstance(node, ast.alias):
                bound.add((node.asname or node.name).partition(".")[0])
    return used - bound


def test_every_example_runs_where_it_is_pasted() -> None:
    assert unbound(">>> import torch\n>>> def f(x): return g(x)\n>>> torch.ones(f(a))") == {"g", "a"}
    lacking = {
        f"{path.relative_to(ROOT)}: {getattr(node, 'name', 'module')}": names
        for path in sorted(ROOT.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and (names := unbound(ast.get_docstring(node) or ""))
    }
    assert lacking == {}
