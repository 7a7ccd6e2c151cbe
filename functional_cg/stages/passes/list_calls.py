"""Calls on lists of tensors, such as fused optimizers: calls on parts of the lists compute the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...tensors.aten import FUSED
from ..program import Instr

__all__ = ["at_places", "group_size"]


def group_size(instr: Instr) -> int:
    """Return the length of the lists that a call may be split by; 0 if it is one call for other reasons."""
    grouped = instr.op._schema.name.startswith((*FUSED, "aten::_foreach_"))
    lengths = {len(one) for one in _lists(instr)} - {0}
    return next(iter(lengths)) if grouped and not instr.writes and len(lengths) == 1 else 0


def at_places(instr: Instr, places: Sequence[int]) -> Instr:
    """Return the call on these places of the lists alone."""

    def at(value: Any) -> Any:
        return [value[place] for place in places] if isinstance(value, (list, tuple)) and value else value

    kwargs = {name: at(arg) for name, arg in instr.kwargs.items()}
    made = tuple(map(at, instr.out)) if isinstance(instr.out, tuple) else at(instr.out)
    return replace(instr, args=tuple(map(at, instr.args)), kwargs=kwargs, out=made)


def _lists(instr: Instr) -> list[Any]:
    outputs = instr.out if isinstance(instr.out, tuple) else (instr.out,)
    return [one for one in (*instr.args, *instr.kwargs.values(), *outputs) if isinstance(one, (list, tuple))]
