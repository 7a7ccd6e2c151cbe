"""Values that a trace knows: literals, declared constants, and what is computed from them alone.

The host may read such a value while the step is traced, as a branch on a flag in a table does: each replay would read
the same. A literal that changes between two traces, and a declared constant that is written later, are errors anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...ambient.modes import ordinary, without_gradients
from ...tensors.aten import named_arguments, tensors_in
from ..program import Program, Var, live, map_vars

__all__ = ["aside_from_modes", "by_places", "result_of", "value_of"]

_BY_MASK = frozenset(
    f"aten::{name}" for name in "index index_put index_put_ _unsafe_index _index_put_impl_".split()
)


def aside_from_modes(call: Callable[[], Any]) -> Any:
    """What a call returns on real tensors, in the middle of a trace."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction(), ordinary():
        without_gradients()
        return call()


def value_of(program: Program, var: Var | None) -> Tensor | None:
    """What a variable holds at the end of the calls so far; None if it depends on the state, an input or a draw."""
    if var is None:
        return None
    instrs, _ = live([instr for instr in program.instrs if not instr.checks], [var])
    values = {constant.var: constant.value for constant in program.constants}
    made = {out for instr in instrs for out in instr.outputs()}
    if not all(one in values or one in made for instr in instrs for one in (*instr.inputs(), var)):
        return None
    if not instrs and var not in values:
        return None

    def computed() -> Tensor:
        found = {one: value.clone() for one, value in values.items()}  # a call may write into it
        for instr in instrs:
            kwargs = {name: map_vars(found.__getitem__, value) for name, value in instr.kwargs.items()}
            _bind(instr.out, instr.op(*map_vars(found.__getitem__, instr.args), **kwargs), found)
        return found[var]

    value: Tensor = aside_from_modes(computed)
    return value


def _bind(out: Any, value: Any, values: dict[Var, Tensor]) -> None:
    if isinstance(out, Var):
        values[out] = value
    elif isinstance(out, (list, tuple)):
        for one, part in zip(out, value, strict=True):
            _bind(one, part, values)


def by_places(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], value: Callable[[Tensor], Tensor | None]
) -> list[Any] | None:
    """The indices of a call that takes elements by masks, as the places where these are set; None if one is unknown.

    Args:
      func: The op.
      args: Its arguments.
      kwargs: Its arguments by name.
      value: What a tensor holds, if it is known.
    """
    if func._schema.name not in _BY_MASK:
        return None
    places: list[Any] = []
    for index in named_arguments(func, args, kwargs).get("indices") or ():
        if not isinstance(index, Tensor) or index.dtype not in (torch.bool, torch.uint8):
            places.append(index)
            continue
        mask = value(index)
        if mask is None:
            return None
        places += aside_from_modes(partial(_set_places, mask))
    return places


def result_of(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], value: Callable[[Tensor], Tensor | None]
) -> tuple[Any] | None:
    """What a call returns that reads known values alone, and writes none; None of any other.

    Args:
      func: The op.
      args: Its arguments.
      kwargs: Its arguments by name.
      value: What a tensor holds, if it is known.
    """
    values = {id(tensor): value(tensor) for tensor in tensors_in([*args, *kwargs.values()])}
    if func._schema.is_mutable or any(one is None for one in values.values()):
        return None

    def real(given: Any) -> Any:
        if isinstance(given, (list, tuple)):
            return type(given)(map(real, given))
        return values[id(given)] if isinstance(given, Tensor) else given

    return (aside_from_modes(lambda: func(*real(args), **{name: real(one) for name, one in kwargs.items()})),)


def _set_places(mask: Tensor) -> list[Tensor]:
    return [one.clone() for one in mask.nonzero().unbind(1)]
