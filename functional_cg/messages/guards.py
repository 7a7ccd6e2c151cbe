"""Find the truth tests that only decide whether to raise, such as ``if (labels < 0).any(): raise ValueError``.

In ``assert x.max().item() < 5``, the number decides nothing else either. A test decides more if the code around it may
go on after the exception.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import inspect
import sys
import textwrap
from collections.abc import Iterable
from itertools import pairwise, takewhile
from types import FrameType
from typing import Any

from .code_reading import Site

__all__ = ["compares_in_guard", "guard_of", "may_swallow"]

_LEAVES = ast.Return | ast.Break | ast.Continue | ast.Yield | ast.YieldFrom | ast.Await
_CATCHES = ast.ExceptHandler | ast.With | ast.AsyncWith
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
# Exceptions that say more than that something is wrong.
_SIGNALS = frozenset({"StopIteration", "StopAsyncIteration", "AttributeError"})
# Python itself catches what these raise: to end a loop, to look elsewhere, or to report it.
_PROTOCOLS = frozenset(
    "__next__ __anext__ __getitem__ __missing__ __getattr__ __getattribute__ __get__ __del__".split()
)
_TRUSTED = ("torch", "functional_cg")
_HARMLESS = (contextlib.nullcontext, contextlib.closing)


def guard_of(frame: FrameType) -> tuple[bool, str] | None:
    """Return what a frame tests at the moment, if that decides only whether it raises; else None.

    In ``a and b``, ``or`` and ``not``, it is the operand whose truth is asked for. None also where the answer that
    passes depends on other operands.

    Returns:
      (passes, text): the answer with which it does not raise, and the first line of the statement.
    """
    site = Site.of(frame, frame.f_lasti)
    # Since Python 3.13, a comparison that is only tested converts to a truth value itself.
    tests_itself = ("COMPARE_OP",) if sys.version_info >= (3, 13) else ()
    if site is None or not (site.op in ("TO_BOOL", "UNARY_NOT", *tests_itself) or "JUMP" in site.op):
        return None
    # Before Python 3.12, a jump has the span of the statement or of an earlier operand.
    if "JUMP" in site.op and sys.version_info < (3, 12):
        site = Site.of(frame, _before(frame))
    tests = [] if site is None else list(takewhile(lambda node: isinstance(node, ast.expr), site.around()))
    statement: Any = site.up(tests[-1]) if site is not None and tests else None
    passes = _passing(statement)
    if passes is None or tests[-1] is not statement.test:
        return None
    for outer, inner in zip(reversed(tests), reversed(tests[:-1]), strict=False):
        if _negates(outer):
            passes = not passes
        elif not (
            isinstance(outer, ast.BoolOp)
            and (isinstance(outer.op, ast.And) is passes or inner is outer.values[-1])
        ):
            return None
    # `0 <= x.min() <= 1` is asked part by part.
    chained = isinstance(tests[0], ast.Compare) and len(tests[0].ops) > 1
    if isinstance(tests[0], ast.BoolOp) or (chained and not passes):
        return None
    return passes, ast.unparse(statement).partition("\n")[0]


def compares_in_guard(frame: FrameType) -> bool:
    """Whether a frame calls for a number that it only compares, or tests, to decide whether to raise."""
    site = Site.of(frame, frame.f_lasti)
    if site is None or not isinstance(site.node, ast.Call):
        return False
    test, parent = site.node, site.up(site.node)
    while isinstance(parent, ast.BoolOp) or _compares(parent) or _negates(parent):
        test, parent = parent, site.up(parent)
    return _passing(parent) is not None and parent.test is test


def _compares(node: Any) -> bool:
    membership = (ast.In, ast.NotIn, ast.Is, ast.IsNot)
    return isinstance(node, ast.Compare) and not any(isinstance(op, membership) for op in node.ops)


def _negates(node: Any) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)


def _before(frame: FrameType) -> int:
    """Return the instruction that has put onto the stack what a frame's jump tests."""
    return max(
        instruction.offset
        for instruction in dis.get_instructions(frame.f_code)
        if instruction.offset < frame.f_lasti and instruction.opcode != dis.EXTENDED_ARG
    )


def _passing(statement: Any) -> bool | None:
    """Return the truth value with which a statement does not raise, if with the other one it does nothing else."""
    match statement:
        case ast.Assert():
            return True
        case ast.If() if _raises(statement.body):
            return False
        case ast.If() if _raises(statement.orelse):
            return True
    return None


def _raises(body: list[ast.stmt]) -> bool:
    """Whether a block always raises, and does nothing else that the code around it would notice."""
    named = {node.id for part in body for node in ast.walk(part) if isinstance(node, ast.Name)}
    return bool(body) and isinstance(body[-1], ast.Raise) and not _leaves(body) and named.isdisjoint(_SIGNALS)


def _leaves(body: Iterable[ast.stmt]) -> bool:
    return any(isinstance(node, _LEAVES) for part in body for node in ast.walk(part))


def may_swallow(frame: FrameType) -> bool:
    """Whether a frame may go on if what it runs at the moment raises.

    A handler that always raises again, and ``finally`` without a ``return``, let exceptions pass. So does a ``with``
    whose context manager is torch's, or can be read and catches nothing. What cannot be read may do anything.
    """
    code = frame.f_code
    if code.co_name in _PROTOCOLS or not code.co_exceptiontable:  # neither `try` nor `with`
        return code.co_name in _PROTOCOLS
    site = Site.of(frame, frame.f_lasti)
    if site is None:
        return True
    for child, node in pairwise(site.around()):
        if isinstance(child, _FUNCTIONS):
            return False
        match node:
            case ast.Try() | ast.TryStar():
                raised_again = (
                    isinstance(one.body[-1], ast.Raise) and not _leaves(one.body) for one in node.handlers
                )
                if _leaves(node.finalbody) or (child in node.body and not all(raised_again)):
                    return True
            case ast.With() | ast.AsyncWith() if child in node.body:
                if not all(_lets_pass(site, item.context_expr) for item in node.items):
                    return True
    return False


def _lets_pass(site: Site, manager: ast.expr) -> bool:
    """Whether a context manager is known to let exceptions pass: torch's, or one whose code can be read."""
    made_by: Any = site.value(manager.func if isinstance(manager, ast.Call) else manager)
    if not isinstance(manager, ast.Call):
        made_by = type(made_by)
    if made_by in _HARMLESS or str(getattr(made_by, "__module__", None)).partition(".")[0] in _TRUSTED:
        return True
    is_class = isinstance(made_by, type)
    function = inspect.unwrap(inspect.getattr_static(made_by, "__exit__", None) if is_class else made_by)
    if not is_class and (function is made_by or not inspect.isgeneratorfunction(function)):
        return False
    try:
        nodes = [*ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function))))]
    except (OSError, SyntaxError, TypeError, ValueError):
        return False
    if is_class:  # what `__exit__` returns decides alone
        returned = (node.value for node in nodes if isinstance(node, ast.Return))
        return all(
            value is None or (isinstance(value, ast.Constant) and not value.value) for value in returned
        )
    return not any(isinstance(node, _CATCHES) or _leaves(getattr(node, "finalbody", ())) for node in nodes)
