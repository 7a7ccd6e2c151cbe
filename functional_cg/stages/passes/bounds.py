"""Check indices, divisors and probabilities before a compiled function uses them on the CPU.

A compiled function checks an index inside the loop that uses it. If that loop runs on several threads, none of them
catches the exception, and the process dies (torch 2.13). Integer division by zero kills it as well. Other checks of
torch's kernels are omitted. Checking the tensor beforehand raises the error that the kernel would raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ...tensors.aten import named_arguments
from ..program import Instr, Program, Var, highest, map_vars

__all__ = ["check_values"]

_library = torch.library.Library("fcg", "FRAGMENT")
_library.define("checked(Tensor index, int least, int size, int? ignored=None) -> Tensor")
_library.define("divisor(Tensor value) -> Tensor")
_library.define("probability(Tensor value, str name) -> Tensor")
_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8})


def _checked(index: Tensor, least: int, size: int, ignored: int | None = None) -> Tensor:
    if index.numel():
        counts = index if ignored is None else torch.where(index == ignored, least, index)
        low, high = (int(end) for end in counts.aminmax())
        if low < least or high >= size:
            wrong = low if low < least else high
            raise IndexError(f"index {wrong} is out of bounds for a dimension of size {size}")
    return index.clone()


def _divisor(value: Tensor) -> Tensor:
    if not bool(value.all()):
        raise RuntimeError("ZeroDivisionError")
    return value.clone()


def _probability(value: Tensor, name: str) -> Tensor:
    if not bool(((value >= 0) & (value <= 1)).all()):
        raise RuntimeError(f"all elements of {name} should be between 0 and 1")
    return value.clone()


for _name, _check in (("checked", _checked), ("divisor", _divisor), ("probability", _probability)):
    _library.impl(_name, _check, "CompositeExplicitAutograd")
    _library._register_fake(_name, lambda value, *others: torch.empty_like(value))
_CHECKED = torch.ops.fcg.checked.default
_DIVISOR, _PROBABILITY = torch.ops.fcg.divisor.default, torch.ops.fcg.probability.default

# An index, its least value, the size that it must stay below, and a value to ignore.
Bounds = Iterator[tuple[Var, int, int, int | None]]
# An op that checks, and its arguments; it checks the first one.
Demand = tuple[OpOverload, tuple[Any, ...]]


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


def _of_gradients(named: Mapping[str, Any]) -> Bounds:
    yield named["indices"], 0, named["num_weights"], named["padding_idx"]


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
        "index_copy": _along_one,
        "index_copy_": _along_one,
        "index_fill": _along_one_or_from_its_end,
        "index_fill_": _along_one_or_from_its_end,
        "embedding": _of_rows,
        "embedding_dense_backward": _of_gradients,
        "nll_loss_forward": _of_classes,
        "nll_loss_backward": _of_classes,
        "nll_loss2d_forward": _of_classes,
        "nll_loss2d_backward": _of_classes,
        "take": _of_elements,
        "put": _of_elements,
        "put_": _of_elements,
    }
)


def check_values(program: Program, head: Sequence[Instr]) -> list[Instr]:
    """Return the head with checked indices, divisors and probabilities; each is checked once per size.

    What is checked is copied, so it is checked again once a call has written it.

    Args:
      program: The program, which tells which variable numbers are free.
      head: Its calls.
    """
    number, storage = highest(program)
    known: dict[tuple[Any, ...], Var] = {}
    calls: list[Instr] = []
    for instr in head:
        names: dict[Var, Var] = {}
        for demand in _demands(instr):
            check, arguments = demand
            value = arguments[0]
            if demand not in known:
                number, storage = number + 1, storage + 1
                known[demand] = replace(value, index=number, storage=storage, offset=0, fills=True)
                calls.append(
                    replace(instr, op=check, args=arguments, kwargs={}, out=known[demand], writes=())
                )
            names[value] = known[demand]
        calls.append(_reading(instr, names) if names else instr)
        written = {var.storage for var in instr.writes}
        if written:
            known = {demand: var for demand, var in known.items() if demand[1][0].storage not in written}
    return calls


def _demands(instr: Instr) -> Iterator[Demand]:
    """Yield the checks that a call needs for its tensor arguments."""
    name = instr.op._schema.name.removeprefix("aten::")
    named = named_arguments(instr.op, instr.args, instr.kwargs)
    if name in _BOUNDS:
        for bounds in _BOUNDS[name](named):
            if bounds[0].spec.dtype in _INTEGERS and bounds[0].spec.numel:
                yield _CHECKED, bounds
    elif name.rstrip("_") in _DIVISIONS and isinstance(named["other"], Var):
        if all(one.spec.dtype in _INTEGERS for one in instr.outputs()):
            yield _DIVISOR, (named["other"],)
    elif name == "binary_cross_entropy":
        yield _PROBABILITY, (named["self"], "input")
        yield _PROBABILITY, (named["target"], "target")


# Checked for integers only: a floating-point division by zero gives infinity or NaN.
_DIVISIONS = frozenset({"div", "floor_divide", "remainder", "fmod"})


def _reading(instr: Instr, names: Mapping[Var, Var]) -> Instr:
    # What is checked is no argument by keyword: torch hands those on by position.
    return replace(instr, args=map_vars(lambda var: names.get(var, var), instr.args))
