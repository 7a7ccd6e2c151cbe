"""Check indices, divisors and probabilities on the CPU, before a compiled function uses them or a call writes a slot.

A compiled function checks an index inside the loop that uses it. If that loop runs on several threads, none of them
catches the exception, and the process dies (torch 2.13). Integer division by zero kills it as well. Other checks of
torch's kernels are omitted. Checking the tensor beforehand raises the error that the kernel would raise.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ...tensors.aten import named_arguments
from ...tensors.op_table import row_of
from ..program import Instr, Program, Var, live
from .changes import Fresh, final
from .fused import replacements

__all__ = ["check_replacements", "check_values", "may_raise"]

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


def _bounds(named: Mapping[str, Any], *, from_the_end: bool) -> Bounds:
    """Yield the bounds of a call's indices, by the names of its arguments."""
    shape = named["self"].spec.shape if "self" in named else ()
    match named:
        case {"target": index, "ignore_index": ignored}:
            yield index, 0, shape[min(1, len(shape) - 1)], ignored
        case {"indices": index, "num_weights": size, "padding_idx": ignored}:
            yield index, 0, size, ignored
        case {"indices": index, "weight": weight}:
            yield index, 0, weight.spec.shape[0], None
        case {"indices": indices}:
            yield from (
                (one, -size, size, None)
                for one, size in zip(indices, shape, strict=False)
                if isinstance(one, Var)
            )
        case {"index": index, "dim": dim}:
            size = shape[dim] if shape else 1
            yield index, -size if from_the_end else 0, size, None
        case {"index": index}:
            size = named["self"].spec.numel
            yield index, -size, size, None


def check_replacements(program: Program) -> None:
    """Check the indices of calls that may write some elements of a slot in place."""
    calls, _ = live(program.instrs, [*program.results, *(new for _, new in program.updates)])
    which = {instr for chain in replacements(program, calls) for instr in chain}
    if any(may_raise(instr, {}) for instr in which):
        program.instrs = check_values(program, program.instrs, which)


def may_raise(instr: Instr, makers: Mapping[Var, Instr]) -> bool:
    """Whether a call runs on the CPU and has indices that are not checked."""
    return any(
        demand[0].spec.device.type == "cpu" and (demand[0] not in makers or makers[demand[0]].op is not check)
        for check, demand in _demands(instr)
    )


def check_values(
    program: Program, head: Sequence[Instr], which: Collection[Instr] | None = None
) -> list[Instr]:
    """Return the head with checked indices, divisors and probabilities; each is checked once per size.

    What is checked is copied, so it is checked again once a call has written it.

    Args:
      program: The program, which tells which variable numbers are free.
      head: Its calls.
      which: The calls whose arguments are checked; None for all.
    """
    fresh = Fresh(program)
    known: dict[tuple[Any, ...], Var] = {}
    calls: list[Instr] = []
    for instr in head:
        names: dict[Var, Var] = {}
        for demand in _demands(instr) if which is None or instr in which else ():
            check, arguments = demand
            value = arguments[0]
            if demand not in known:
                known[demand] = fresh.like(value, offset=0, fills=True)
                calls.append(
                    replace(instr, op=check, args=arguments, kwargs={}, out=known[demand], writes=())
                )
            names[value] = known[demand]
        calls.append(instr.reading(partial(final, names)) if names else instr)
        written = {var.storage for var in instr.writes}
        if written:
            known = {demand: var for demand, var in known.items() if demand[1][0].storage not in written}
    return calls


def _demands(instr: Instr) -> Iterator[Demand]:
    """Yield the checks that a call needs for its tensor arguments."""
    row, named = row_of(instr.op), named_arguments(instr.op, instr.args, instr.kwargs)
    if row.bounded:
        for bounds in _bounds(named, from_the_end=row.puts):
            if bounds[0].spec.dtype in _INTEGERS and bounds[0].spec.numel:
                yield _CHECKED, bounds
    elif row.divides and isinstance(named["other"], Var):
        # Integers only: a floating-point division by zero gives infinity or NaN.
        if all(one.spec.dtype in _INTEGERS for one in instr.outputs()):
            yield _DIVISOR, (named["other"],)
    elif instr.name == "binary_cross_entropy":
        yield _PROBABILITY, (named["self"], "input")
        yield _PROBABILITY, (named["target"], "target")
