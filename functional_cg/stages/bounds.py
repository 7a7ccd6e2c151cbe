"""Indices are checked before a compiled function on the host uses them.

Such a function checks each index in the loop that reads by it. Where the loop runs on several threads, the exception
that it throws is caught by none of them, and the process ends (torch 2.13). Checked before, as a tensor, a wrong index
is an ``IndexError``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..ops import named_arguments
from .program import Instr, Program, Var, highest, map_vars

__all__ = ["check_indices"]

_library = torch.library.Library("fcg", "FRAGMENT")
_library.define("checked(Tensor index, int least, int size, int? ignored=None) -> Tensor")
_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8})


def _checked(index: Tensor, least: int, size: int, ignored: int | None = None) -> Tensor:
    if index.numel():
        counts = index if ignored is None else torch.where(index == ignored, least, index)
        low, high = (int(end) for end in counts.aminmax())
        if low < least or high >= size:
            wrong = low if low < least else high
            raise IndexError(f"index {wrong} is out of bounds for a dimension of size {size}")
    return index.clone()


_library.impl("checked", _checked, "CompositeExplicitAutograd")
_library._register_fake("checked", lambda index, *bounds: torch.empty_like(index))
_CHECKED = torch.ops.fcg.checked.default

# An index, its least value, the size that it stays below, and a value that stands for none.
Bounds = Iterator[tuple[Var, int, int, int | None]]


def _of_each_dimension(named: Mapping[str, Any]) -> Bounds:
    for axis, index in enumerate(named["indices"]):
        if isinstance(index, Var):
            size = named["self"].spec.shape[axis]
            yield index, -size, size, None


def _along_one(named: Mapping[str, Any]) -> Bounds:
    shape = named["self"].spec.shape
    yield named["index"], 0, shape[named["dim"]] if shape else 1, None


def _along_one_or_from_its_end(named: Mapping[str, Any]) -> Bounds:
    for index, _, size, _ in _along_one(named):
        yield index, -size, size, None


def _of_rows(named: Mapping[str, Any]) -> Bounds:
    yield named["indices"], 0, named["weight"].spec.shape[0], None


def _of_elements(named: Mapping[str, Any]) -> Bounds:
    size = named["self"].spec.numel
    yield named["index"], -size, size, None


def _of_classes(named: Mapping[str, Any]) -> Bounds:
    shape = named["self"].spec.shape
    yield named["target"], 0, shape[min(1, len(shape) - 1)], named["ignore_index"]


_BOUNDS: Mapping[str, Callable[[Mapping[str, Any]], Bounds]] = MappingProxyType(
    {
        "index": _of_each_dimension,
        "index_put": _of_each_dimension,
        "index_put_": _of_each_dimension,
        "_index_put_impl": _of_each_dimension,
        "_index_put_impl_": _of_each_dimension,
        "_unsafe_index": _of_each_dimension,
        "_unsafe_index_put": _of_each_dimension,
        "gather": _along_one,
        "scatter": _along_one,
        "scatter_": _along_one,
        "scatter_add": _along_one,
        "scatter_add_": _along_one,
        "scatter_reduce": _along_one,
        "scatter_reduce_": _along_one,
        "index_select": _along_one,
        "index_add": _along_one,
        "index_add_": _along_one,
        "index_reduce": _along_one,
        "index_reduce_": _along_one,
        "index_copy": _along_one_or_from_its_end,
        "index_copy_": _along_one_or_from_its_end,
        "index_fill": _along_one_or_from_its_end,
        "index_fill_": _along_one_or_from_its_end,
        "embedding": _of_rows,
        "nll_loss_forward": _of_classes,
        "nll_loss_backward": _of_classes,
        "nll_loss2d_forward": _of_classes,
        "nll_loss2d_backward": _of_classes,
        "take": _of_elements,
        "put": _of_elements,
        "put_": _of_elements,
    }
)


def check_indices(program: Program, head: Sequence[Instr]) -> list[Instr]:
    """A head whose calls that index read checked indices. Each index is checked once for each size.

    Args:
      program: The program, for numbers that are not taken.
      head: Its calls.
    """
    number, storage = highest(program)
    known: dict[tuple[Any, ...], Var] = {}
    calls: list[Instr] = []
    for instr in head:
        names: dict[Var, Var] = {}
        for bounds in _bounds(instr):
            index, *_ = bounds
            if bounds not in known:
                number, storage = number + 1, storage + 1
                known[bounds] = replace(index, index=number, storage=storage, offset=0, fills=True)
                calls.append(Instr(_CHECKED, bounds, {}, known[bounds], (), instr.site, instr.backward))
            names[index] = known[bounds]
        calls.append(_reading(instr, names) if names else instr)
    return calls


def _bounds(instr: Instr) -> Bounds:
    """The indices of a call that are computed, and what each has to be."""
    bounds = _BOUNDS.get(instr.op._schema.name.removeprefix("aten::"))
    if bounds is not None:
        for one in bounds(named_arguments(instr.op, instr.args, instr.kwargs)):
            if one[0].spec.dtype in _INTEGERS and one[0].spec.numel:
                yield one


def _reading(instr: Instr, names: Mapping[Var, Var]) -> Instr:
    def new(var: Var) -> Var:
        return names.get(var, var)

    kwargs = {name: map_vars(new, value) for name, value in instr.kwargs.items()}
    return replace(instr, args=map_vars(new, instr.args), kwargs=kwargs)
