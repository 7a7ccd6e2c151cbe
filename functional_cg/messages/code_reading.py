"""Read how a line of user code asks for a tensor's value, and suggest a replacement in the user's own names.

The instruction that runs in a frame is mapped to its node in the syntax tree. The node's context tells ``if x > 0:``
from ``x > 0 and y``, and ``x[mask]`` from ``x[i]``.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import dis
import inspect
import itertools
import linecache
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType, ModuleType
from typing import Any

import torch

from .advice import (
    ARRAY,
    BUFFER,
    BUILTINS,
    DRAWN_ARRAY,
    FUNCTIONS,
    GENERIC,
    INDEX,
    LOG,
    OR_OUTSIDE,
    TABLE,
    WITHOUT_IF,
)
from .expressions import Axes, as_tensor, fold, is_mask, operand, stored_by_mask, text_of

__all__ = ["Site", "operand", "sync_spelling", "text_of"]

_F_STRING_PARTS = (ast.JoinedStr, ast.FormattedValue, ast.Constant)


def sync_spelling(frame: FrameType, lasti: int | None = None, axes: Axes = None) -> tuple[str, str]:
    """Return how the line that runs in `frame` asks for a tensor's value, and a fix in the user's names.

    Args:
      frame: The user's frame.
      lasti: The instruction (``traceback.tb_lasti``), if the frame has moved on since.
      axes: How many axes a subscripted tensor has, and the mask that is its index; None if it is no mask.
    Returns:
      (what, fix): ``("`if x > 0:`", "`torch.where(x > 0, a, b)`; or ...")``; a general answer for an unknown construct.
    """
    site = Site.of(frame, frame.f_lasti if lasti is None else lasti, axes)
    if site is None:
        return "a tensor's value", GENERIC
    answer = _truth(site) or _formatting(site)
    if answer is not None:
        return answer
    fix: str | None = None
    match site.node:
        case ast.Call():
            fix = _call(site, site.node)
        case ast.Subscript():
            fix = _subscript(site, site.node)
        case ast.Compare(ops=[ast.In() | ast.NotIn(), *_]):
            fix = f"write `{_contained(site.node)}`, a tensor, and select with `torch.where`"
        case ast.BinOp(left=left, right=right):
            array = left if isinstance(site.value(right), torch.Tensor) else right
            drawn = any(_draws(site.value(part)) for part in ast.walk(array))
            fix = (DRAWN_ARRAY if drawn else ARRAY).replace("ARRAY", text_of(array))
    return f"`{text_of(site.node)}`", fix or GENERIC


@dataclass(frozen=True, slots=True)
class Site:
    """The syntax node whose instruction runs in a frame."""

    node: Any
    op: str
    frame: FrameType
    parents: dict[ast.AST, ast.AST] = field(repr=False)
    axes: Axes = None

    @classmethod
    def of(cls, frame: FrameType, lasti: int, axes: Axes = None) -> Site | None:
        code = frame.f_code
        span = next(itertools.islice(code.co_positions(), lasti // 2, None), (None,) * 4)
        if lasti < 0 or None in span:
            return None
        try:
            tree = ast.parse("".join(linecache.getlines(code.co_filename, frame.f_globals)))
        except (SyntaxError, ValueError):
            return None
        parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
        line, end_line, column, end_column = span
        around = [node for node in parents if _contains(node, (line, column), (end_line, end_column))]
        if not around:
            return None
        # The walk goes from outer to inner nodes, so the last one of equal size is the innermost.
        node = min(reversed(around), key=_extent)
        return cls(node, dis.opname[code.co_code[lasti]], frame, parents, axes)

    def up(self, node: ast.AST) -> Any:
        return self.parents.get(node)

    def around(self) -> Iterator[Any]:
        """Yield the node, and what it is a part of, outwards."""
        node = self.node
        while node is not None:
            yield node
            node = self.up(node)

    def statement(self) -> Any:
        return next((node for node in self.around() if isinstance(node, ast.stmt)), None)

    def value(self, node: ast.AST) -> Any:
        """Look up a name, or its attributes and constant keys, without running any user code."""
        if isinstance(node, ast.Name):
            return self.frame.f_locals.get(node.id, self.frame.f_globals.get(node.id))
        if isinstance(node, ast.Attribute):
            return inspect.getattr_static(self.value(node.value), node.attr, None)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            owner = self.value(node.value)
            if type(owner) in (dict, list, tuple):
                with contextlib.suppress(LookupError, TypeError):
                    return owner[node.slice.value]
        return None


def _contains(node: Any, start: tuple[Any, Any], end: tuple[Any, Any]) -> bool:
    if not hasattr(node, "lineno"):
        return False
    return (node.lineno, node.col_offset) <= start and end <= (node.end_lineno, node.end_col_offset)


def _extent(node: Any) -> tuple[int, int]:
    return node.end_lineno - node.lineno, node.end_col_offset - node.col_offset


def _truth(site: Site) -> tuple[str, str] | None:
    """Classify a truth test: ``if``, ``while``, ``assert``, ternary, ``and``/``or``/``not`` or filter."""
    # Since Python 3.13, a comparison that is only tested converts to a truth value itself.
    if site.op not in ("TO_BOOL", "UNARY_NOT", "COMPARE_OP") and "JUMP" not in site.op:
        return None
    test, parent = site.node, site.up(site.node)
    if isinstance(test, ast.If | ast.While | ast.IfExp | ast.Assert):
        test, parent = test.test, test  # Python 3.11 gives some jumps the span of the statement
    while isinstance(parent, ast.BoolOp) or (
        isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.Not)
    ):
        test, parent = parent, site.up(parent)
    cond, text = as_tensor(test), text_of(test)
    match parent:
        case ast.IfExp() if parent.test is test:
            return f"`{text_of(parent)}`", f"`{_selected(site, cond, parent.body, parent.orelse)}`"
        case ast.If() if parent.test is test:
            return f"`if {text}:`", _branches(site, parent, cond)
        case ast.While() if parent.test is test:
            return f"`while {text}:`", (
                f"loop a fixed number of times and mask the update, `x = torch.where({cond}, new_x, x)`; "
                "or loop outside of the step"
            )
        case ast.Assert() if parent.test is test:
            return f"`assert {text}`", f"return `{cond}` in `metrics` and assert outside of the step"
        case ast.comprehension() if test in parent.ifs:
            return (
                f"`... if {text}` in a comprehension",
                f"keep every element and mask, `torch.where({cond}, x, 0)`",
            )
        case _ if isinstance(test, ast.BoolOp | ast.UnaryOp | ast.Compare):
            return f"`{text}`", f"write `{cond}`, a tensor, and select with `torch.where`"
    return f"the truth value of `{text}`", f"`torch.where({cond}, a, b)`; {OR_OUTSIDE}"


def _branches(site: Site, node: ast.If, cond: str) -> str:
    if isinstance(node.test, ast.Call) and isinstance(node.test.func, ast.Attribute):
        mask = node.test.func.value  # `if mask.any():`
        stored = stored_by_mask(node.body[0], mask, _axes(site, mask))
        if stored is not None and len(node.body) == 1 and not node.orelse:
            base, spread = operand(stored[0]), _spread(site, stored[0], mask)
            return f"leave out the `if`: `{base} = torch.where({spread}, {text_of(stored[1])}, {base})`; {OR_OUTSIDE}"
    match node.body, node.orelse:
        case [ast.Return(None | ast.Constant(None)) | ast.Assign(value=ast.Constant(None))], []:
            return f"{WITHOUT_IF}; {OR_OUTSIDE}"
        case ([ast.Assign([ast.Name(name)], yes)], [ast.Assign([ast.Name(other)], no)]) if name == other:
            return f"`{name} = {_selected(site, cond, yes, no)}`; {OR_OUTSIDE}"
        case ([ast.Assign([ast.Name(name) as target], yes)], []) if _is_tree(site.value(target)):
            select = f"lambda new, old: torch.where({cond}, new, old)"
            return f"`{name} = fcg.tree.map({select}, {text_of(yes)}, {name})`; {OR_OUTSIDE}"
        case ([ast.Assign([ast.Name(name)], yes)], []):
            return f"`{name} = torch.where({cond}, {text_of(yes)}, {name})`; {OR_OUTSIDE}"
    return f"compute both sides and select, `torch.where({cond}, a, b)`; {OR_OUTSIDE}"


def _selected(site: Site, cond: str, yes: ast.expr, no: ast.expr) -> str:
    """Write a selection between two values; either may be a tree, such as a state, if a call makes it."""
    if any(isinstance(side, ast.Call) or _is_tree(site.value(side)) for side in (yes, no)):
        return f"fcg.cond({cond}, lambda: {text_of(yes)}, lambda: {text_of(no)})"
    return f"torch.where({cond}, {text_of(yes)}, {text_of(no)})"


def _is_tree(value: object) -> bool:
    return isinstance(value, dict | list | tuple) or dataclasses.is_dataclass(value)


def _formatting(site: Site) -> tuple[str, str] | None:
    node, whole = site.node, site.node
    # Before Python 3.12, each part of an f-string, even its format, has the span of the whole string.
    while isinstance(node, _F_STRING_PARTS) and isinstance(site.up(whole), _F_STRING_PARTS):
        whole = site.up(whole)
    if isinstance(whole, ast.JoinedStr):
        values = [part.value for part in whole.values if isinstance(part, ast.FormattedValue)]
        tensors = [value for value in values if isinstance(site.value(value), torch.Tensor)] or values
        shown = tensors[0] if _extent(node) == _extent(whole) else getattr(node, "value", node)
        return f"`{text_of(whole)}`", LOG.format(x=text_of(shown))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and _is_text(node.left):
        right = node.right.elts[0] if isinstance(node.right, ast.Tuple) and node.right.elts else node.right
        return f"`{text_of(node)}`", LOG.format(x=text_of(right))
    return None


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _call(site: Site, node: ast.Call) -> str | None:
    args, template = list(node.args), None
    match node.func:
        case ast.Name(name) if name in ("max", "min") and args:
            return _extremum(site, name, args)
        case ast.Name(name):
            template = BUILTINS.get(name) or FUNCTIONS.get(name)
        case ast.Attribute(value=owner, attr=name):
            module = site.value(owner)
            template = LOG if name == "format" and _is_text(owner) else FUNCTIONS.get(name)
            by_number = isinstance(owner, ast.Name) and owner.id == "math"
            if by_number or (template is None and module is sys.modules.get("numpy")):
                if hasattr(torch, name):
                    return f"write `torch.{name}({', '.join(map(text_of, args))})`"
            if by_number:
                return f"use the torch op for `math.{name}`; {OR_OUTSIDE}"
            if not isinstance(module, ModuleType) and not _is_text(owner):
                args.insert(0, owner)
        case _:
            return None
    args += [keyword.value for keyword in node.keywords]
    if template == LOG:
        args = [arg for arg in args if not isinstance(arg, ast.Constant)] or args
        args.sort(key=lambda arg: not isinstance(site.value(arg), torch.Tensor))
    if template is None or not args:
        return f"that call needs a Python number: {GENERIC}"
    if is_mask(args[0], site.value, guessed=False):
        template = template.replace("{x} != 0", "{x}")
    if isinstance(args[0], ast.List | ast.Tuple) and "itself" in template:
        numbers = (ast.Constant, ast.UnaryOp)
        parts = [
            f"torch.tensor({text_of(e)})" if isinstance(e, numbers) else text_of(e) for e in args[0].elts
        ]
        return f"write `torch.stack([{', '.join(parts)}])`"
    x, y = operand(args[0]), operand(args[1]) if len(args) > 1 else "value"
    return template.format(x=x, y=y, name=name, args=", ".join(map(text_of, args)))


def _extremum(site: Site, name: str, args: Sequence[ast.expr]) -> str:
    if len(args) == 1 and isinstance(site.value(args[0]), torch.Tensor):
        return f"write `{operand(args[0])}.a{name}()`"
    if any(isinstance(arg, ast.Starred) for arg in args):
        return f"write `torch.stack([{', '.join(map(text_of, args))}]).a{name}(0)`"
    if len(args) == 1:
        return f"write `torch.stack(list({text_of(args[0])})).a{name}(0)`"
    numbers = [arg for arg in args if isinstance(arg, ast.Constant | ast.UnaryOp)]
    if len(args) == 2 and len(numbers) == 1:
        tensor = args[0] if args[1] is numbers[0] else args[1]
        bound = "min" if name == "max" else "max"
        return f"write `torch.clamp({text_of(tensor)}, {bound}={text_of(numbers[0])})`"
    return f"write `{fold(f'torch.{name}imum', [text_of(arg) for arg in args])}`"


def _contained(node: ast.Compare) -> str:
    item, container = node.left, node.comparators[0]
    if not isinstance(container, ast.List | ast.Tuple | ast.Set):
        return f"({text_of(ast.Compare(container, [ast.Eq()], [item]))}).any()"
    return fold("torch.logical_or", [text_of(ast.Compare(item, [ast.Eq()], [one])) for one in container.elts])


def _draws(value: Any) -> bool:
    of = value.__name__ if isinstance(value, ModuleType) else type(value).__module__
    return of.startswith("numpy.random")  # the module, or one of its generators


def _subscript(site: Site, node: ast.Subscript) -> str:
    table = site.value(node.value)
    if _is_table(table):
        if isinstance(node.value, ast.Attribute) and isinstance(
            site.value(node.value.value), torch.nn.Module
        ):
            return BUFFER.format(name=node.value.attr)
        return TABLE.format(x=text_of(node.value))
    stacked = isinstance(table, list | tuple) or isinstance(node.value, ast.List | ast.Tuple)
    base = f"torch.stack({text_of(node.value)})" if stacked else operand(node.value)
    indices = list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]
    for kind, fix in _INDEX_FIXES:
        dim = next((dim for dim, index in enumerate(indices) if kind(site, index)), None)
        if dim is not None:
            return fix(site, base, indices, dim)
    return INDEX


def _is_table(value: Any) -> bool:
    """Whether a value is numbers on the host: an array of numpy, or a sequence of them."""
    if isinstance(value, list | tuple):
        return bool(value) and all(isinstance(one, int | float) for one in value)
    return type(value).__module__ == "numpy"


def _is_window(site: Site, index: ast.AST) -> bool:
    return isinstance(index, ast.Slice) and any(
        bound is not None and not isinstance(bound, ast.Constant)
        for bound in (index.lower, index.upper, index.step)
    )


def _is_scalar(site: Site, index: ast.AST) -> bool:
    value = site.value(index)
    if isinstance(value, torch.Tensor):
        return value.ndim == 0
    return value is None and isinstance(
        index, ast.BinOp | ast.Call | ast.Name | ast.Attribute | ast.Subscript
    )


def _stored(site: Site, read: str) -> str | None:
    """Return what the statement stores in place of `read`, the subscripted values; None if it only reads them."""
    match site.up(site.node):
        case ast.Assign(targets=targets, value=value) if site.node in targets:
            return text_of(value)
        case ast.AugAssign(target=target, op=op, value=value) if target is site.node:
            return text_of(ast.BinOp(ast.Name(read), op, value))
    return None


def _fix_mask(site: Site, base: str, indices: Sequence[Any], dim: int) -> str:
    mask = _spread(site, site.node.value, indices[dim], dim)
    if stored := stored_by_mask(site.statement(), site.node.slice, _axes(site, indices[dim])):
        base = operand(stored[0])
        return f"`{base} = torch.where({mask}, {text_of(stored[1])}, {base})`"
    rows = not dim and _axes(site, indices[dim]) == 1
    whole = mask == text_of(indices[dim]) and len({*(site.axes or ())}) < 2
    kept = operand(indices[dim]) if whole else f"{mask}.expand_as({base})"
    match site.up(site.node), site.up(site.up(site.node)):
        case ast.Attribute(attr="mean"), ast.Call(args=args, keywords=named) if rows or not (args or named):
            along = ", ".join(map(ast.unparse, [*args, *named]))
            return f"`torch.where({mask}, {base}, 0).sum({along}) / {kept}.sum({along})`"
    return f"`torch.where({mask}, {base}, 0)` keeps the shape; divide by `{kept}.sum()` for a mean"


def _axes(site: Site, mask: ast.AST) -> int:
    return site.axes[1] if site.axes else getattr(site.value(mask), "ndim", 1)


def _spread(site: Site, base: ast.AST, mask: ast.AST, dim: int = 0) -> str:
    """Return a mask with the axes of what it selects from, as far as that is known."""
    table = site.value(base)
    known = isinstance(table, torch.Tensor) and isinstance(site.value(mask), torch.Tensor)
    axes = site.axes[0] if site.axes else table.ndim if known else dim + _axes(site, mask)
    missing = axes - dim - _axes(site, mask)
    return f"{operand(mask)}[...{', None' * missing}]" if missing > 0 else text_of(mask)


def _fix_window(site: Site, base: str, indices: Sequence[Any], dim: int) -> str:
    start = operand(indices[dim].lower) if indices[dim].lower else "0"
    length, note = "n", ", with a length `n` that is fixed"
    match indices[dim].upper:
        case ast.BinOp(left=left, op=ast.Add(), right=right) if operand(left) == start:
            length, note = text_of(right), ""
    rows = f"torch.arange({length}, device={base}.device) + {start}"
    read = f"{base}.index_select({dim}, {rows})"
    stored = _stored(site, read)
    if stored is not None:
        return f"`{base} = {base}.index_copy({dim}, {rows}, {stored})`{note}"
    return f"`{read}`{note}; a window of varying length becomes a mask and `torch.where`"


def _fix_scalar(site: Site, base: str, indices: Sequence[Any], dim: int) -> str:
    return f"write `{base}[{', '.join(map(text_of, indices))}]`, which reads the index on the device"


_INDEX_FIXES: tuple[
    tuple[Callable[[Site, ast.AST], bool], Callable[[Site, str, Sequence[Any], int], str]], ...
] = (
    (lambda site, index: is_mask(index, site.value, guessed=site.axes is not None), _fix_mask),
    (_is_window, _fix_window),
    (_is_scalar, _fix_scalar),
)
