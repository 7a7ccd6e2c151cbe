"""The law of host values: once one has changed, the next call equals eager or raises BakedValueError.

A table is a text of rows. A row is a program: its name, what it sets up, its step of a tensor `x`, and what changes::

    # a method of one object
    class Held:
        def rate(self): return 2.0
    held = Held()
    step: x * held.rate()
    change: held.rate = lambda: 5.0  -> held.rate
    undo: del held.rate
    other: held.another = 5.0

- `change` alters what eager code returns: the next call returns that, or raises a `BakedValueError` that says the text
  behind the arrow. A step made anew returns it, too.
- `other` alters nothing that the step depends on: the next call goes on.
- `any` alters nothing that eager code returns, though the step reads it: both are fine.
- `loud` may alter what another machine or another kernel returns: the next call raises.
- `undo`, behind one of these, restores the value: the next call goes on, whatever was raised before.
- `refused` ends the first call: the class of the error, then what its message says, as a regular expression.

Before any of these, three calls equal eager code, and so does eager code after them: nothing is refused that stays as
it is, and nothing is left behind. Each line of a row is judged on a program of its own. `step` is an expression or,
indented below, the body of a function; of several, each makes a row of its own.
"""

from __future__ import annotations

import ast
import builtins
import contextvars
import gc
import math
import os
import re
import sys
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import functional_cg as fcg

__all__ = ["Change", "Row", "X", "judge", "outcome", "parse", "rows"]

X = torch.tensor([1.0, 2.0])

# What every program finds.
PRELUDE = """
import array, builtins, collections, contextlib, contextvars, copy, ctypes, dataclasses, decimal, enum, fractions
import functools, gc, importlib, io, itertools, logging, math, operator, os, queue, random, re, sys, threading, time
import types, typing, weakref
from types import SimpleNamespace
import numpy as np, torch, torch.nn.functional as F
from torch import Tensor, nn
import functional_cg as fcg

class Cfg:
    def __init__(self, lr=2.0): self.lr, self.table, self.list = lr, {"lr": lr}, [lr, 1.0]

def module(name, **held):
    found = sys.modules["made_" + name] = types.ModuleType("made_" + name)
    vars(found).update(held)
    return found

def packaged(text, **held):
    "Functions of an installed package, by its names."
    file = os.path.join(os.path.dirname(np.__path__[0]), "package.py")
    names = {"__file__": file, "__name__": "package", **held}
    exec(compile(text, file, "exec"), names)
    return SimpleNamespace(**{"names": names, **names})
"""

KINDS = ("change", "other", "any", "loud", "undo", "refused")
SHARED: tuple[Any, ...] = (builtins, math, F, torch.Tensor, torch.nn.ReLU)


@dataclass(frozen=True)
class Change:
    """One line of a row, and the one that undoes it."""

    kind: str = "other"
    code: str = ""
    says: str = ""
    undo: str = ""


@dataclass(frozen=True)
class Row:
    """One program."""

    name: str
    setup: str = ""
    step: str = ""
    changes: tuple[Change, ...] = ()

    def make(self, change: Change, given: Mapping[str, Any]) -> tuple[Callable[..., Any], Any, Any]:
        """Run what the program sets up; its step, and functions that change it and undo that."""
        names = set(_stored(self.setup)) | set(given)
        source = f"def make({', '.join(given)}):\n{_indented(self.setup)}\n"
        if self.step:
            source += f"    def step(x):\n{textwrap.indent(_indented(self.step), '    ')}\n"
        for name, code in (("change", change.code), ("undo", change.undo)):
            outer = names & set(_stored(code)) - set(_declared(code))
            of_globals = outer & set(_declared(self.setup))
            source += f"    def {name}():\n"
            for word, some in (("global", of_globals), ("nonlocal", outer - of_globals)):
                source += f"        {word} {', '.join(sorted(some))}\n" if some else ""
            source += textwrap.indent(_indented(code or "pass"), "    ") + "\n"
        source += "    return step, change, undo\n"
        found = sys.modules["made_here"] = types.ModuleType("made_here")
        program = vars(found)
        program["__file__"] = f"{self.name}.py"
        exec(_PRELUDE, program)
        exec(compile(source, f"{self.name}.py", "exec"), program)
        return program["make"](**given)  # type: ignore[no-any-return]


_PRELUDE = compile(PRELUDE, "prelude.py", "exec")


def _indented(code: str) -> str:
    return textwrap.indent(code, "    ") or "    pass"


def _declared(code: str) -> Iterator[str]:
    for node in ast.parse(code).body:
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            yield from node.names


def _stored(code: str) -> Iterator[str]:
    """Names that statements bind, those of the functions and classes in them left out."""
    nodes: list[ast.AST] = list(ast.parse(code).body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif not isinstance(node, (ast.Lambda, ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp)):
            nodes += ast.iter_child_nodes(node)


def parse(text: str) -> list[Row]:
    """Return the rows of a table."""
    return [row for block in re.split(r"(?m)^# ", text)[1:] for row in _rows_of(*block.split("\n", 1))]


def _rows_of(name: str, text: str) -> list[Row]:
    """Return a row for each step of a program."""
    setup, *rest = re.split(rf"(?m)^(step|{'|'.join(KINDS)}):", text)
    steps, changes = list[str](), list[Change]()
    for kind, body in zip(rest[::2], rest[1::2], strict=True):
        first, _, more = body.partition("\n")
        code, _, says = first.partition("  -> ")
        if kind == "refused":
            code, _, says = first.strip().partition(":")
        code = "\n".join(filter(None, (code.strip(), textwrap.dedent(more).strip())))
        if kind == "step":
            steps.append(code if "\n" in code or not first.strip() else f"return {code}")
        elif kind == "undo":
            changes[-1] = Change(changes[-1].kind, changes[-1].code, changes[-1].says, code)
        else:
            changes.append(Change(kind, code, says.strip()))
    names = [name.strip(), *(f"{name.strip()} ({number})" for number in range(2, len(steps) + 1))]
    return [
        Row(one, setup.strip(), step, tuple(changes)) for one, step in zip(names, steps or [""], strict=True)
    ]


@contextmanager
def put_back(row: Row) -> Iterator[None]:
    """Restore what a program changes outside of itself."""
    kept, environment = [dict(vars(owner)) for owner in SHARED], dict(os.environ)
    callbacks = list(gc.callbacks)
    try:
        yield
    finally:
        for owner, before in zip(SHARED, kept, strict=True):
            for name in set(vars(owner)) - set(before):
                delattr(owner, name)
            for name, value in before.items():
                if vars(owner)[name] is not value:
                    setattr(owner, name, value)
        if dict(os.environ) != environment:
            os.environ.clear()
            os.environ.update(environment)
        torch.nn.modules.module._global_forward_hooks.clear()
        gc.callbacks[:] = callbacks
        if "gc.freeze()" in row.setup:
            gc.unfreeze()
        for name in [name for name in sys.modules if name.startswith("made_")]:
            del sys.modules[name]


def value_of(result: Any) -> Any:
    """What can be compared, and told from the same value of another type."""
    return [
        repr(leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf) for leaf in fcg.tree.leaves(result)
    ]


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returns, or the error of a value that has changed."""
    try:
        return call()
    except fcg.BakedValueError as error:
        return error


def judge(row: Row, change: Change, **given: Any) -> None:
    """Hold a program against the law; it gets what is `given` by name."""
    run = contextvars.copy_context().run
    with put_back(row):
        if change.kind == "refused":
            return _is_refused(row, change, given)
        expected = run(_of_eager, row, change, given)
    with put_back(row):
        contextvars.copy_context().run(_holds, row, change, given, expected)
    return None


def _is_refused(row: Row, change: Change, given: Mapping[str, Any]) -> None:
    step, _, undo = row.make(change, given)
    with pytest.raises(getattr(fcg, change.code), match=rf"(?s)(?:{change.says}).*To fix: "):
        fcg.graph_fn(step)(X)
    undo()


def _of_eager(row: Row, change: Change, given: Mapping[str, Any]) -> tuple[list[Any], Any]:
    step, act, undo = row.make(change, given)
    before = [value_of(step(x)) for x in (X, X, 2 * X)]
    after = None
    if change.kind != "loud":
        act()
        after = value_of(step(X))
        undo()
        assert (after != before[0]) == (change.kind == "change"), "the row is not what it says"
    return before, after


def _holds(row: Row, change: Change, given: Mapping[str, Any], expected: tuple[list[Any], Any]) -> None:
    step, act, undo = row.make(change, given)
    graph, (before, after) = fcg.graph_fn(step), expected
    assert [value_of(graph(x)) for x in (X, X, 2 * X)] == before
    assert value_of(step(X)) == before[0], "a trace leaves something behind"
    act()
    got = outcome(lambda: value_of(graph(X)))
    if isinstance(got, fcg.BakedValueError):
        assert change.kind != "other", got
        assert change.says in str(got)
        assert "To fix: " in str(got)
        assert change.kind != "change" or value_of(fcg.graph_fn(step)(X)) == after, "the fix"
    else:
        assert change.kind != "loud", "it goes on"
        assert got == after, "the old value, in silence"
    if change.undo:
        undo()
        assert value_of(graph(X)) == before[0], "it was restored"


def table(text: str) -> list[Any]:
    """Return the lines of a table as parameters `row` and `change`."""
    cases = [
        (row, number, change)
        for row in parse(text)
        for number, change in enumerate(row.changes or (Change(),))
    ]
    return [
        pytest.param(row, change, id=row.name + (f", {number + 1}" if number else ""))
        for row, number, change in cases
    ]


def rows(text: str) -> pytest.MarkDecorator:
    """Call a test with each line of a table, and the row that it belongs to."""
    return pytest.mark.parametrize(("row", "change"), table(text))
