"""Expressions of the user's code: as text, as tensors, and as masks."""

from __future__ import annotations

import ast
import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["Axes", "as_tensor", "fold", "is_mask", "operand", "stored_by_mask", "text_of"]

Axes = tuple[int, int] | None  # of a tensor that is subscripted, and of the mask that is its index
_TEXT_SHOWN = 72


def text_of(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= _TEXT_SHOWN else text[: _TEXT_SHOWN - 1] + "…"


def operand(node: ast.AST) -> str:
    tight = isinstance(node, ast.Name | ast.Attribute | ast.Subscript | ast.Call)
    return text_of(node) if tight else f"({text_of(node)})"


def as_tensor(test: ast.expr) -> str:
    """Return an expression for `test` as a tensor."""
    match test:
        case ast.BoolOp():
            name = "torch.logical_and" if isinstance(test.op, ast.And) else "torch.logical_or"
            parts = [as_tensor(value) for value in test.values]
        case ast.Compare(ops=[_, _, *_]):
            terms = [test.left, *test.comparators]
            name = "torch.logical_and"
            parts = [
                text_of(ast.Compare(left, [op], [right]))
                for left, op, right in zip(terms, test.ops, terms[1:], strict=False)
            ]
        case ast.UnaryOp(op=ast.Not()):
            return f"torch.logical_not({as_tensor(test.operand)})"
        case _:
            return text_of(test)
    return fold(name, parts)


def fold(name: str, parts: Sequence[str]) -> str:
    return functools.reduce(lambda head, part: f"{name}({head}, {part})", parts)


def is_mask(index: ast.AST, value_of: Callable[[ast.AST], Any], *, guessed: bool) -> bool:
    """Whether an index is a mask.

    Args:
      index: The index.
      value_of: Returns the value of an expression; None if it is not known.
      guessed: Whether what may be one is one.
    """
    match index:
        case ast.Compare():
            return True
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            return is_mask(operand, value_of, guessed=guessed)
        case ast.BinOp(left=left, op=ast.BitAnd() | ast.BitOr() | ast.BitXor()):
            return is_mask(left, value_of, guessed=guessed)
    value = value_of(index)
    if isinstance(value, torch.Tensor):
        return value.dtype in (torch.bool, torch.uint8)
    return guessed and isinstance(index, ast.Call | ast.Name | ast.Attribute | ast.Subscript)


class _Whole(ast.NodeTransformer):
    """Puts whole tensors in place of what a mask selects from them."""

    def __init__(self, mask: str, ndim: int) -> None:
        self._mask, self._ndim = mask, ndim

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        if ast.unparse(node.slice) == self._mask:
            return node.value
        match node.slice:
            case ast.Tuple(elts=[mask, *rest]) if ast.unparse(mask) == self._mask:
                return ast.Subscript(node.value, ast.Tuple([ast.Slice()] * self._ndim + rest))
        return node


def stored_by_mask(statement: Any, mask: ast.AST, ndim: int = 1) -> tuple[ast.AST, ast.AST] | None:
    """Return the tensor that a statement changes where a mask is True, and what it stores; None for any other.

    Args:
      statement: The statement.
      mask: The mask.
      ndim: How many axes it has.

    Example:
      >>> import ast
      >>> from functional_cg.messages.expressions import stored_by_mask
      >>> (statement,) = ast.parse("x[m] += 2 * y[m]").body
      >>> tensor, stored = stored_by_mask(statement, statement.target.slice)
      >>> ast.unparse(tensor), ast.unparse(stored)
      ('x', 'x + 2 * y')
      >>> (statement,) = ast.parse("x[m] = y[m] * z[m, None]").body
      >>> ast.unparse(stored_by_mask(statement, statement.targets[0].slice)[1])
      'y * z[:, None]'
    """
    match statement:
        case ast.Assign(targets=[ast.Subscript() as target], value=value):
            stored = value
        case ast.AugAssign(target=ast.Subscript() as target, op=op, value=value):
            stored = ast.BinOp(target.value, op, value)
        case _:
            return None
    text = ast.unparse(mask)
    if ast.unparse(target.slice) != text:
        return None
    return target.value, _Whole(text, ndim).visit(copy.deepcopy(stored))
