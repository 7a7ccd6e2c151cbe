"""Strays: tensors of a trace that are still referenced after it ends, such as a table in a cache.

If it was made from Python numbers alone, it gets the values that a run without a trace would have put there. If that
holds for all of them, the trace runs once more, and takes them as constants. If one was made from leaves of a state or
from inputs, that is an error: it has no values, and using it raises.

What a cache holds from earlier calls is likewise a constant, if each call can tell that it still holds the same.
"""

from __future__ import annotations

import functools
import gc
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...errors import ForeignTensorError, SideEffectError
from ...messages.source import Location
from ...tensors.aten import unwrapped
from ..program import Program, Var
from ..variables import Reference
from .known import aside_from_modes, value_of

__all__ = [
    "GradsOfConstants",
    "Stray",
    "Table",
    "are_kept",
    "disown",
    "may_be_table",
    "refuse_kept",
    "refuse_unfound",
]

_DEVICE = torch.ops.prim.device.default
_DEEP = 4  # how deep a tensor may lie in what a cached function returned
_LINK = "_lru_list_elem"  # of a cache with a limit, which holds its results in a list of its own


class Stray(Tensor):
    """A tensor without memory, whose values are computed on first use. Ops on it return ordinary tensors."""

    _var: Var
    _program: Program | None  # None once its value is known, or if it has none
    _known: Tensor | None
    _none: Callable[[], SideEffectError]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return func(*_found(args), **{name: _found(value) for name, value in (kwargs or {}).items()})

    __torch_dispatch__ = __torch_function__  # type: ignore[assignment]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        try:
            return repr(self._value())
        except SideEffectError:
            return f"<a tensor of a refused trace, {self._var.spec}>"

    def _value(self) -> Tensor:
        if self._known is None:
            self._known = None if self._program is None else value_of(self._program, self._var)
            self._program = None  # it may hold much else
        if self._known is None:
            raise self._none()
        return self._known


def _found(value: Any) -> Any:
    if isinstance(value, Stray):
        return value._value()
    if isinstance(value, (list, tuple)):
        return type(value)(map(_found, value))
    return value


def disown(program: Program, given: Set[int], tensors: list[Reference], variables: Sequence[Var]) -> bool:
    """Give the tensors of a trace that are still alive their values, and turn those without values into strays.

    Args:
      program: What was traced.
      given: The storages that depend on the state or on inputs.
      tensors: Its tensors.
      variables: Their variables.
    Returns:
      Whether there were any, and all have values now.
    """
    kept = [number for number, one in enumerate(tensors) if type(one()) not in (type(None), Stray)]
    groups: dict[int, list[int]] = {}
    for number in kept:
        groups.setdefault(variables[number].storage, []).append(number)
    wholes = {var.storage: var for var in reversed(variables) if var.fills}
    for storage in groups.keys() - given:
        if (memory := value_of(program, wholes.get(storage))) is not None:
            _give_values(tensors, groups[storage], variables, memory)
    strays = [number for number in kept if type(tensors[number]()) not in (type(None), Tensor)]
    sites = {var: instr.site for instr in program.instrs for var in instr.outputs()} if strays else {}
    for number in strays:
        tensor, var = cast("Any", tensors[number]()), variables[number]
        tensor.__class__ = Stray
        tensor._var, tensor._known = var, None
        tensor._program = None if var.storage in given else program
        tensor._none = partial(_without_values, program.function, var, sites.get(var))
    return bool(kept) and not strays


def _give_values(
    tensors: list[Reference], numbers: Sequence[int], variables: Sequence[Var], memory: Tensor
) -> None:
    """Make ordinary tensors in ``memory`` of those of a trace that share a storage, as far as torch allows it."""
    tensor: Tensor | None = None
    for number in sorted(numbers, reverse=True):  # a view refers to what it is a view of, and keeps it alive
        tensor = value = None
        tensor, var = tensors[number](), variables[number]
        if tensor is None or var.spec.dtype != memory.dtype:
            continue
        place = var.spec.shape, var.spec.stride, var.offset
        value = aside_from_modes(partial(torch.as_strided, memory, *place))
        tensors[number] = lambda: None  # torch swaps nothing that is weakly referenced
        with suppress(RuntimeError):  # nor what more than Python refers to
            torch.utils.swap_tensors(tensor, value)
        tensors[number] = weakref.ref(tensor)


def _without_values(function: str, var: Var, site: Location | None) -> SideEffectError:
    return SideEffectError.of(
        function,
        "a tensor of a call that was refused is used; it has no values.",
        rows=[f"{var.spec}, made at {site or 'entry'}"],
        why="It was made of the state or the inputs while the step was traced, and something has kept it.",
        fix="clear what keeps it (a cache, an attribute, a list), and return it from the step instead.",
    )


@dataclass(frozen=True, slots=True)
class Table:
    """A tensor from before the step that something seems to remember; for the step, a constant.

    Attributes:
      name: How the user's code writes it, or where it is read.
      tensor: The tensor.
      refusal: What to raise if nothing finds it again.
    """

    name: str
    tensor: Tensor
    refusal: ForeignTensorError


def may_be_table(tensor: Tensor) -> bool:
    """Whether a tensor has values that stay as they are until torch counts a write."""
    return (
        type(tensor) is Tensor
        and not (tensor.requires_grad or tensor.is_inference() or tensor.is_meta)
        and tensor.layout == torch.strided
        and tensor.untyped_storage().resizable()  # else its memory is numpy's, or a file's
    )


def _is_cached(tensor: Tensor) -> bool:
    """Whether ``functools.cache`` or ``lru_cache`` holds a tensor, by itself or inside of what a function returned."""
    holders: list[Any] = [tensor]
    for _ in range(_DEEP):
        held = gc.get_referrers(*holders)
        kinds = set(map(type, held))
        if functools._lru_cache_wrapper in kinds or any(kind.__name__ == _LINK for kind in kinds):
            return True
        holders = [one for one in held if type(one) in (dict, list, tuple) and one is not holders]
        if not holders:
            return False
    return False


def refuse_unfound(
    tables: Sequence[Table], again: Sequence[Table], compared: Set[int], remembered: Set[int]
) -> None:
    """Raise if a tensor that a trace took as a constant is none that a cache holds.

    Args:
      tables: The tensors, of the first run.
      again: Those of the second run.
      compared: Ids of the objects of which each call tells that they are still where they were found.
      remembered: Ids of those that were found where a function remembers something.
    Raises:
      ForeignTensorError: For the first of them.
    """
    found = {id(table.tensor) for table in tables}
    for table in again:
        number = id(table.tensor)
        if number not in found or not (number in remembered & compared or _is_cached(table.tensor)):
            raise table.refusal


def are_kept(references: Sequence[Reference]) -> bool:
    """Whether user code still holds a tensor of a trace."""
    if not any(reference() is not None for reference in references):
        return False
    # Break reference cycles of the user's, such as an autograd context. `collect` does nothing while another thread
    # collects, so try again.
    if not gc.collect():
        time.sleep(0.01)
        gc.collect()
    return any(reference() is not None for reference in references)


def refuse_kept(
    name: str, program: Program, variables: Sequence[Var], references: Sequence[Reference]
) -> None:
    """Raise if a tensor of a trace is still alive: user code has stored it.

    Args:
      name: Name of the step.
      program: The traced program.
      variables: Its variables.
      references: Weak references to their tensors.
    """
    if not are_kept(references):
        return
    sites = {id(var): instr.site for instr in program.instrs for var in instr.outputs()}
    kept = {
        id(tensor): var
        for var, reference in zip(variables, references, strict=True)
        if (tensor := reference()) is not None
    }
    rows = [f"{var.spec}, made at {sites.get(id(var), 'entry')}" for var in kept.values()]
    held = _held_by_a_module(kept)
    raise SideEffectError.of(
        name,
        f"keeps {'a tensor' if len(rows) == 1 else f'{len(rows)} tensors'} of the step beyond its end.",
        rows=rows,
        why="Python runs when the step is traced, not when it is replayed: what was kept would never be updated.",
        fix=(
            f"call the module by `apply, params, buffers = fcg.from_module(module)`: `{held}` holds one. Or "
            if held
            else ""
        )
        + "return it in the metrics or in the new state instead of storing it (attribute, list, cache). "
        f"A debugger keeps what it sees: use it in `{name}.eager(...)`, or with FCG_DISABLE_CAPTURE=1.",
    )


class GradsOfConstants:
    """What torch keeps in ``.grad`` of declared constants: a ``backward()`` of the step would add to it.

    Args:
      constants: The constants by name.
    """

    def __init__(self, constants: Iterable[tuple[str, Tensor]]) -> None:
        self._held = [(name, one, one.grad) for name, one in constants if one.requires_grad and one.is_leaf]

    def refuse_change(self, function: str) -> None:
        """Raise if a run has put a gradient there.

        Raises:
          SideEffectError: Naming the constants.
        """
        rows = [f"{name}.grad" for name, constant, grad in self._held if constant.grad is not grad]
        if rows:
            raise SideEffectError.of(
                function,
                f"calls `backward()`, which keeps {len(rows)} gradient(s) beside declared constants.",
                rows=rows,
                why="Python runs when the step is traced, not when it is replayed: what was kept would never be "
                "updated.",
                fix="switch them off, `constant.requires_grad_(False)`; or differentiate with respect to the state "
                "alone, `loss, grads = fcg.value_and_grad(loss_fn)(state.params)`.",
            )

    def restore(self) -> None:
        """Put back what was there."""
        for _, constant, grad in self._held:
            if constant.grad is not grad:
                constant.grad = grad


def _held_by_a_module(kept: Mapping[int, Var]) -> str:
    """Return the attribute of a module, as ``LSTM._flat_weights``, that holds one of these tensors; "" if none does."""
    for one in gc.get_objects():
        if not issubclass(type(one), nn.Module):
            continue
        for name, value in list(vars(one).items()):
            held = value if isinstance(value, list) else [value]
            if any(isinstance(part, Tensor) and id(unwrapped(part)) in kept for part in held):
                return f"{type(one).__name__}.{name}"
    return ""
