"""Read what selects by a mask: whether an index is one, and what a statement stores by it."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["is_mask", "stored_by_mask"]


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

    def __init__(self, mask: str) -> None:
        self._mask = mask

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        return node.value if ast.unparse(node.slice) == self._mask else node


def stored_by_mask(statement: Any, mask: ast.AST) -> tuple[ast.AST, ast.AST] | None:
    """Return the tensor that a statement changes where a mask is True, and what it stores; None for any other.

    Example:
      >>> import ast
      >>> from functional_cg.messages.masks import stored_by_mask
      >>> (statement,) = ast.parse("x[m] += 2 * y[m]").body
      >>> tensor, stored = stored_by_mask(statement, statement.target.slice)
      >>> ast.unparse(tensor), ast.unparse(stored)
      ('x', 'x + 2 * y')
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
    return target.value, _Whole(text).visit(copy.deepcopy(stored))
