"""Known values of a trace: literals, declared constants, buffers that never change, and what is computed from them.

Known, too, is how a draw compares with a number outside of its range, such as a uniform number with a rate of 0.

The host may read them during a trace, for example to branch on a flag in a table: each replay would read
the same. A literal that differs between two traces, or a declared constant that is written later, is an error
anyway. What other ranks send is never known: a trace that asked for it would wait for them, alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...ambient.modes import ordinary, without_gradients
from ...errors import HostSyncError
from ...messages.libraries import sync_fix
from ...messages.source import at_here, user_frame
from ...shards.transfers import is_between_ranks
from ...tensors.aten import map_tensors, named_arguments, tensors_in
from ...tensors.op_table import row_of
from ..evaluate import evaluate_all
from ..program import Constant, Instr, Program, Var, live, written_storages
from ..sub_programs import calls_of

__all__ = [
    "BY_NUMBER",
    "Supposed",
    "as_filling",
    "aside_from_modes",
    "by_places",
    "filled",
    "result_of",
    "value_of",
]

_T = TypeVar("_T")

_aten = torch.ops.aten
_FILLS = MappingProxyType(
    {
        _aten.index_put.default: _aten.masked_fill.Tensor,
        _aten.index_put_.default: _aten.masked_fill_.Tensor,
        _aten._index_put_impl_.default: _aten.masked_fill_.Tensor,
    }
)
BY_NUMBER = frozenset({_aten.masked_fill.Tensor, _aten.masked_fill_.Tensor})


def aside_from_modes(call: Callable[[], _T]) -> _T:
    """Return the result of a call on real tensors, in the middle of a trace."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction(), ordinary():
        without_gradients()
        return call()


def value_of(
    program: Program, var: Var | None, supposed: Callable[[Var], Tensor | None] = lambda var: None
) -> Tensor | None:
    """Return a variable's value after the calls so far; None if it depends on state, inputs or draws.

    Args:
      program: What was traced so far.
      var: The variable.
      supposed: Returns the value of part of the state that may be taken as known.
    """
    if var is None:
        return None
    own = [instr for instr in program.instrs if not instr.checks and not is_between_ranks(instr.op)]
    instrs, _ = live(calls_of(live(own, [var])[0]), [var])
    values = {constant.var: constant.value for constant in program.constants}
    decided = _decided(instrs)
    if decided:
        values |= {instrs[place].out: value for place, value in decided.items()}
        instrs, _ = live([instr for place, instr in enumerate(instrs) if place not in decided], [var])
    made: set[Var] = set()  # by earlier calls: one that writes an input in place returns it, too
    for reads, results in [*((instr.inputs(), instr.outputs()) for instr in instrs), ([var], [])]:
        for one in reads:
            if one not in values and one not in made:
                held = supposed(one)
                if held is None:
                    return None
                values[one] = held
        made.update(results)
    return _computed(instrs, values, var)


def _computed(instrs: Sequence[Instr], values: Mapping[Var, Tensor], var: Var) -> Tensor:
    def computed() -> Tensor:
        # Copies, since a call may write them in place; where they are, because a text of a tensor says so.
        found = {one: value.to(one.spec.device, copy=True) for one, value in values.items()}
        evaluate_all(instrs, found)
        return found[var]

    return aside_from_modes(computed)


_COMPARISONS = frozenset({_aten.lt.Scalar, _aten.le.Scalar, _aten.gt.Scalar, _aten.ge.Scalar})
# On floating-point numbers, these keep or reverse the order of the elements.
_MONOTONE = frozenset({"clamp", "copy", "mul"})


def _decided(instrs: Sequence[Instr]) -> dict[int, Tensor]:
    """Return the results of comparisons of one number that come out the same for all draws, by their places.

    Random bits under a mask lie between 0 and the mask. The calls from there to the comparison are made for both ends;
    if they keep or reverse the order, and both ends compare alike, then so does all that lies between.
    """
    found = {}
    for place, instr in enumerate(instrs):
        if instr.op not in _COMPARISONS or instr.out.spec.numel != 1:
            continue
        masks = {one.out: one.args[1] for one in instrs[:place] if _masks_bits(one)}
        calls, used = live([one for one in instrs[:place] if one.out not in masks], [instr.args[0]])
        drawn, made = used & masks.keys(), {var for one in calls for var in one.outputs()}
        if not drawn or used - drawn - made or not all(map(_keeps_order, calls)):
            continue
        low, high = (
            _computed([*calls, instr], {var: _filled(var, end * masks[var]) for var in drawn}, instr.out)
            for end in (0, 1)
        )
        if aside_from_modes(partial(torch.equal, low, high)):
            found[place] = low
    return found


def _masks_bits(instr: Instr) -> bool:
    mask = instr.args[1] if instr.op._schema.name == "aten::__and__" else None
    return type(mask) is int and mask >= 0


def _keeps_order(instr: Instr) -> bool:
    """Whether a call keeps or reverses the order of the one tensor whose numbers it reads."""
    if not all(one.spec.dtype.is_floating_point for one in instr.outputs()) or instr.op is _aten.view.dtype:
        return False  # integers wrap around
    name = instr.name.rstrip("_")
    numbers = [one for one in instr.inputs() if name != "copy" or one not in instr.writes]
    return not numbers or row_of(instr.op).selects or (name in _MONOTONE and len(numbers) == 1)


def _filled(var: Var, number: int) -> Tensor:
    return aside_from_modes(partial(torch.full, var.spec.shape, number, dtype=var.spec.dtype))


def by_places(
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    value: Callable[[Tensor], Tensor | None],
    call: Callable[..., Tensor],
) -> tuple[Any, dict[str, Any]] | None:
    """Return an op and its arguments for an indexing call, with masks turned into integers; None if one is unknown.

    A ``masked_select`` is such a call, too. None for calls of other ops.

    Args:
      func: The op.
      args: Its arguments.
      kwargs: Its arguments by name.
      value: Returns what a tensor holds; None if that is not known.
      call: ``call(op, args, kwargs)`` runs an op.
    """
    if func is _aten.masked_select.default:
        shape = torch.broadcast_shapes(*(one.shape for one in args))
        values, mask = (call(_aten.expand.default, (one, shape), {}) for one in args)
        func, args = _aten.index.Tensor, (values, [mask])
    if not row_of(func).masks:
        return None
    named = named_arguments(func, args, kwargs)
    places: list[Any] = []
    for index in named.get("indices") or ():
        if not isinstance(index, Tensor) or index.dtype not in (torch.bool, torch.uint8):
            places.append(index)
            continue
        known = value(index)
        if known is None:
            return None
        places += aside_from_modes(partial(_set_places, known))
    return func, {**named, "indices": places}


def as_filling(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], call: Callable[..., Tensor]
) -> tuple[Any, tuple[Tensor, Tensor, Tensor]] | None:
    """Return an op and its arguments for an indexing call that writes one number by one mask; else None.

    How many elements the mask picks is known at a replay only, but nobody has to know.

    Args:
      func: The op.
      args: Its arguments.
      kwargs: Its arguments by name.
      call: ``call(op, args, kwargs)`` runs an op.
    """
    fill = _FILLS.get(func)
    if fill is None:
        return None
    named = named_arguments(func, args, kwargs)
    into, indices, number = named["self"], named["indices"], named["values"]
    masks = [place for place, index in enumerate(indices) if index is not None]
    if len(masks) != 1 or number.numel() != 1 or named.get("accumulate"):
        return None
    if into.is_cuda and number.dtype != into.dtype:
        return None  # torch fills for it on a host, and raises on a GPU
    mask = indices[masks[0]]
    if mask.dtype is not torch.bool:
        return None
    behind = into.dim() - masks[0] - mask.dim()
    mask = call(_aten.view.default, (mask, [*mask.shape, *[1] * behind]), {})
    return fill, (into, mask, call(_aten.view.default, (number, []), {}))


def filled(func: Any, args: Sequence[Any], call: Callable[..., Tensor]) -> Tensor:
    """Make the calls for a ``masked_fill`` by a number on a GPU, which torch's own kernel would read on the host.

    Args:
      func: The op, in place or not.
      args: Its arguments.
      call: ``call(op, args, kwargs)`` runs an op.
    """
    into, mask, number = args
    number = call(_aten._to_copy.default, (number,), {"dtype": into.dtype})
    chosen = call(_aten.where.self, (mask, number, into), {})
    return call(_aten.copy_.default, (into, chosen), {}) if func._schema.is_mutable else chosen


def result_of(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], value: Callable[[Tensor], Tensor | None]
) -> tuple[Any] | None:
    """Return the result, as a 1-tuple, of a call that reads only known values and writes none; else None.

    Args:
      func: The op.
      args: Its arguments.
      kwargs: Its arguments by name.
      value: Returns what a tensor holds; None if that is not known.
    """
    if is_between_ranks(func):
        return None
    values = {id(tensor): value(tensor) for tensor in tensors_in([*args, *kwargs.values()])}
    if func._schema.is_mutable or any(one is None for one in values.values()):
        return None

    given, named = map_tensors(lambda one: values[id(one)], (args, dict(kwargs)))
    return (aside_from_modes(lambda: func(*given, **named)),)


def _set_places(mask: Tensor) -> list[Tensor]:
    return [one.clone() for one in mask.nonzero().unbind(1)]


class Supposed:
    """Buffers of modules whose values a trace takes as known, because the step never writes them.

    A forward may ask the host for a flag that it keeps in a buffer, such as whether a quantiser is on. The trace reads
    it from the state that the step was called with, and the program says so: a call with a state that holds another
    value does not fit it.

    Args:
      program: The program, which lists the suppositions.
      value: Returns what a slot holds; None if nobody knows.
    """

    def __init__(self, program: Program, value: Callable[[int], Tensor | None]) -> None:
        self._program, self._value = program, value
        self._sites: dict[str, tuple[str, str]] = {}

    def value_of(self, var: Var, buffers: Iterable[Var | None]) -> Tensor | None:
        """Return what a variable holds if it is a slot, and one of the buffers that modules were given; else None."""
        found = next((one for one in self._program.suppositions if one.var == var), None)
        if found is None and var in self._program.slots and var in buffers:
            number = self._program.slots.index(var)
            value = aside_from_modes(lambda: self._value(number))
            if value is not None:
                found = Constant(var, value, self._program.slot_names[number])
                self._program.suppositions.append(found)
                self._sites[found.name] = _asked_here()
        return None if found is None else found.value

    def refuse_written(self) -> None:
        """Raise if the step changes a buffer whose value it was traced with.

        Raises:
          HostSyncError: Naming the buffer and the line that asked for its value.
        """
        program, written = self._program, written_storages(self._program.instrs)
        for one in program.suppositions:
            number = program.slots.index(one.var)
            returned = program.new_state[number] if number < len(program.new_state) else one.var
            if _place(returned) != _place(one.var) or one.var.storage in written:
                site, fix = self._sites[one.name]
                raise HostSyncError.of(
                    program.function,
                    f"asks for the value of `{one.name}` on the host, and changes it.",
                    rows=[site],
                    why="Replay repeats kernels, not Python: what is decided now would be decided for ever.",
                    fix=f"{fix or 'compute both sides and select, `torch.where(flag, a, b)`'}; if it is set once, as "
                    "by an initialisation from data, run the module on a first batch before `from_module`.",
                )


def _asked_here() -> tuple[str, str]:
    """Return how the user's line asks for a value, and where; and what to do about it."""
    frame = user_frame()
    what, fix = ("", "") if frame is None else sync_fix(frame)
    return f"{what}{at_here()}".removeprefix(", at "), fix


def _place(var: Var) -> Any:
    return var.storage, var.offset, var.spec
