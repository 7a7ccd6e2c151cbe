"""Find the truth tests that only decide whether to raise, such as ``if (labels < 0).any(): raise ValueError``.

In ``assert x.max().item() < 5``, the number decides nothing else either.
"""

from __future__ import annotations

import ast
import dis
import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any

from .catching import LEAVES
from .code_reading import Site

__all__ = ["Guard", "compares_in_guard", "guard_of"]

_TESTS = frozenset({"TO_BOOL", "UNARY_NOT"})
_PROTOCOLS = frozenset(
    {"StopIteration", "StopAsyncIteration", "AttributeError"}
)  # say more than that something is wrong


@dataclass(frozen=True, slots=True)
class Guard:
    """A truth test whose statement raises unless it comes out as ``passes``; ``text`` is the statement's first line."""

    passes: bool
    text: str


def guard_of(frame: FrameType) -> Guard | None:
    """Return what a frame tests at the moment, if that decides only whether it raises; else None.

    In ``a and b``, ``or`` and ``not``, it is the operand whose truth is asked for. None also where the answer that
    passes depends on other operands.
    """
    site = Site.of(frame, frame.f_lasti)
    if site is None or not (site.op in _TESTS or "JUMP" in site.op or _tests_by_comparing(site.op)):
        return None
    if "JUMP" in site.op and sys.version_info < (
        3,
        12,
    ):  # it has the span of the statement or of an earlier operand
        site = Site.of(frame, _before(frame))
        if site is None:
            return None
    tests: list[Any] = [site.node]
    while isinstance(parent := site.up(tests[-1]), ast.expr):
        tests.append(parent)
    statement, passes = parent, _of_statement(parent)
    if passes is None or tests[-1] is not statement.test:
        return None
    for outer, inner in zip(reversed(tests), reversed(tests[:-1]), strict=False):
        passes = _of_operand(outer, inner, passes=passes)
        if passes is None:
            return None
    chained = (
        isinstance(tests[0], ast.Compare) and len(tests[0].ops) > 1
    )  # `0 <= x.min() <= 1` is asked part by part
    if isinstance(tests[0], ast.BoolOp) or (chained and not passes):
        return None
    return Guard(passes, ast.unparse(statement).partition("\n")[0])


def compares_in_guard(frame: FrameType) -> bool:
    """Whether a frame calls for a number that it only compares, or tests, to decide whether to raise."""
    site = Site.of(frame, frame.f_lasti)
    if site is None or not isinstance(site.node, ast.Call):
        return False
    test, parent = site.node, site.up(site.node)
    while isinstance(parent, ast.BoolOp) or _compares(parent) or _negates(parent):
        test, parent = parent, site.up(parent)
    return _of_statement(parent) is not None and parent.test is test


def _compares(node: Any) -> bool:
    membership = (ast.In, ast.NotIn, ast.Is, ast.IsNot)
    return isinstance(node, ast.Compare) and not any(isinstance(op, membership) for op in node.ops)


def _negates(node: Any) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)


def _tests_by_comparing(op: str) -> bool:
    """Whether a comparison may convert its result to a truth value itself, if that is all it is for."""
    return op == "COMPARE_OP" and sys.version_info >= (3, 13)


def _before(frame: FrameType) -> int:
    """Return the instruction that has put onto the stack what a frame's jump tests."""
    return max(
        instruction.offset
        for instruction in dis.get_instructions(frame.f_code)
        if instruction.offset < frame.f_lasti and instruction.opcode != dis.EXTENDED_ARG
    )


def _of_statement(statement: Any) -> bool | None:
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
    if not body or not isinstance(body[-1], ast.Raise):
        return False
    nodes = [node for part in body for node in ast.walk(part)]
    return not any(
        isinstance(node, LEAVES) or (isinstance(node, ast.Name) and node.id in _PROTOCOLS) for node in nodes
    )


def _of_operand(outer: ast.AST, inner: ast.AST, *, passes: bool) -> bool | None:
    """Return the truth value of an operand with which the whole is ``passes``, as far as it decides; else None."""
    match outer:
        case ast.UnaryOp(op=ast.Not()):
            return not passes
        case ast.BoolOp() if isinstance(outer.op, ast.And) is passes or inner is outer.values[-1]:
            return passes
    return None
