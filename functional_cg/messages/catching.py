"""Find out whether running code may go on after an exception that it raises, or takes it for something else."""

from __future__ import annotations

import ast
import contextlib
import inspect
import textwrap
from types import FrameType
from typing import Any

from .code_reading import Site

__all__ = ["LEAVES", "may_swallow"]

LEAVES = ast.Return | ast.Break | ast.Continue | ast.Yield | ast.YieldFrom | ast.Await
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_PROTOCOLS = (
    frozenset(  # Python itself catches what these raise: to end a loop, to look elsewhere, or to report it
        {
            "__next__",
            "__anext__",
            "__getitem__",
            "__missing__",
            "__getattr__",
            "__getattribute__",
            "__get__",
            "__del__",
        }
    )
)
_TRUSTED = ("torch", "functional_cg")
_HARMLESS = frozenset({contextlib.nullcontext, contextlib.closing})


def may_swallow(frame: FrameType) -> bool:
    """Return whether a frame may go on if what it runs at the moment raises.

    A handler that always raises again, and ``finally`` without a ``return``, let exceptions pass. So does a ``with``
    whose context manager is torch's, or can be read and catches nothing. What cannot be read may do anything.
    """
    code = frame.f_code
    if code.co_name in _PROTOCOLS:
        return True
    if not code.co_exceptiontable:  # neither `try` nor `with`
        return False
    site = Site.of(frame, frame.f_lasti)
    if site is None:
        return True
    child, node = site.node, site.up(site.node)
    while node is not None and not isinstance(child, _FUNCTIONS):
        match node:
            case ast.Try() | ast.TryStar():
                if _leaves(node.finalbody) or (child in node.body and not all(map(_reraises, node.handlers))):
                    return True
            case ast.With() | ast.AsyncWith() if child in node.body:
                if not all(_lets_pass(site, item.context_expr) for item in node.items):
                    return True
        child, node = node, site.up(node)
    return False


def _leaves(body: list[ast.stmt]) -> bool:
    return any(isinstance(node, LEAVES) for part in body for node in ast.walk(part))


def _reraises(handler: ast.ExceptHandler) -> bool:
    return isinstance(handler.body[-1], ast.Raise) and not _leaves(handler.body)


def _lets_pass(site: Site, manager: ast.expr) -> bool:
    """Return whether a context manager is known to let exceptions pass."""
    made_by: Any = site.value(manager.func if isinstance(manager, ast.Call) else manager)
    if not isinstance(manager, ast.Call):
        made_by = type(made_by)
    if made_by in _HARMLESS or str(getattr(made_by, "__module__", None)).partition(".")[0] in _TRUSTED:
        return True
    body = inspect.getattr_static(made_by, "__exit__", None) if isinstance(made_by, type) else made_by
    try:
        [function] = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(body)))).body
    except (OSError, SyntaxError, TypeError, ValueError):
        return False
    if isinstance(made_by, type):
        returned = (node.value for node in ast.walk(function) if isinstance(node, ast.Return))
        return all(
            value is None or (isinstance(value, ast.Constant) and not value.value) for value in returned
        )
    catching = ast.Try | ast.TryStar | ast.With | ast.AsyncWith
    made = hasattr(made_by, "__wrapped__") and inspect.isgeneratorfunction(made_by.__wrapped__)
    return made and not any(
        getattr(node, "handlers", ()) or getattr(node, "items", ()) or _leaves(getattr(node, "finalbody", []))
        for node in ast.walk(function)
        if isinstance(node, catching)
    )
