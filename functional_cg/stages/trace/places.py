"""Places that are numbers on the device, as in ``table[t]``: read and written there, without asking for the number.

PyTorch asks for it, and returns a view. Here the result is a copy: reading it after what it was taken from has been
written is refused, and so is writing into it, unless the next thing is that it is put back, as by ``table[t] += 1``.
Gradients have the bits of PyTorch's, except for the sign of a zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import CaptureError, FunctionalCGError, ReadOnlyError
from ...messages.source import at_here
from ...tensors.aten import tensors_in, unwrapped
from ...tensors.overlap import storage_key
from ..variables import History

__all__ = ["Places", "at_a_place"]

_SELECTS = frozenset({Tensor.select, torch.select})
_GET, _SET = Tensor.__getitem__, Tensor.__setitem__
_NUMBERS = frozenset({torch.int8, torch.int16, torch.int32, torch.int64})
_MASKS = frozenset({torch.bool, torch.uint8})


class Places:
    """The copies that a trace has made of what it has taken at places on the device.

    Args:
      function: Name of the user's function, for messages.
      history: What the calls of the trace have written.
    """

    def __init__(self, function: str, history: History) -> None:
        self._function, self._writes_to, self.is_given = function, history.writes_to, history.is_given
        # By storage of a copy: what it was taken from, at which index, and how often that had been written.
        self._copies: dict[int, tuple[Tensor, Any, int]] = {}
        # By storage of what a copy that was written was taken from.
        self._owed: dict[int, FunctionalCGError] = {}

    def clear(self) -> None:
        """Drop all tensors."""
        self._copies.clear()

    def note(self, part: Tensor, values: Tensor, index: Any) -> None:
        """Note that ``part`` is a copy of ``values[index]``."""
        values = unwrapped(values)
        self._copies[storage_key(unwrapped(part))] = values, index, self._writes_to(values)

    def put_back(self, values: Tensor, index: Any, new: Any) -> None:
        """Note that ``new`` is about to be assigned to ``values[index]``: it may be a copy that was taken there."""
        copy = self._copies.get(storage_key(unwrapped(new))) if isinstance(new, Tensor) else None
        if copy is not None and copy[0] is unwrapped(values) and copy[1] is index:
            self._owed.pop(storage_key(copy[0]), None)

    def check(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], written: Sequence[Tensor]
    ) -> None:
        """Refuse a call that would do something else if copies were views.

        Raises:
          CaptureError, ReadOnlyError: Naming the line.
        """
        if not self._copies:
            return
        for key in map(storage_key, tensors_in([*args, *kwargs.values()])):
            if key in self._owed:
                raise self._owed[key]
            if key in self._copies:
                values, _, writes = self._copies[key]
                if self._writes_to(values) != writes:
                    raise self._stale(func)
        for key in self._copies.keys() & set(map(storage_key, written)):
            self._owed[storage_key(self._copies[key][0])] = self._lost(func)

    def refuse_owed(self) -> None:
        """Raise if a copy was written and not put back."""
        for error in self._owed.values():
            raise error

    def _stale(self, func: Any) -> CaptureError:
        return CaptureError.of(
            self._function,
            "reads `y[t]`, with a number `t` on the device, after a write into `y`.",
            rows=[f"{func}{at_here()}"],
            why="In PyTorch it is a view and shows what was written; here it is a copy that was made before.",
            fix="take it again, `y[t]`; or say that it is a copy, `y[t].clone()`.",
        )

    def _lost(self, func: Any) -> ReadOnlyError:
        return ReadOnlyError.of(
            self._function,
            "writes in place into `y[t]`, with a number `t` on the device.",
            rows=[f"{func}{at_here()}"],
            why="In PyTorch it is a view, and the write reaches `y`; here it is a copy: the write would be lost.",
            fix="assign, `y[t] = y[t] + x` or `y[t] += x`; of `y[t].clone()`, any write is fine.",
        )


def at_a_place(func: Any, args: Sequence[Any], call: Callable[..., Any], places: Places) -> tuple[Any] | None:
    """Return the result, as a 1-tuple, of an indexing function whose index has a number on the device; else None.

    Args:
      func: The function.
      args: Its arguments.
      call: ``call(func, args, kwargs)`` runs a function as the trace does.
      places: The copies that the trace has made.
    """
    if func in _SELECTS and len(args) == 3:
        values, axis, number = args
        func, args = _GET, (values, (*[slice(None)] * (axis % values.dim()), number))
    if func is not _GET and func is not _SET:
        return None
    values, index, *new = args
    found = _place_in(values, index, places.is_given)
    if found is None:
        return None
    where, rest = found
    if func is _SET:
        places.put_back(values, index, *new)
    part = _GET(values, where)
    if func is _GET:
        part = call(_GET, (part, rest), {})
        places.note(part, values, index)
        return (part,)
    call(_SET, (part, rest, *new), {})
    return (_SET(values, where, part),)


def _place_in(values: Tensor, index: Any, is_given: Callable[[Tensor], bool]) -> tuple[Any, Any] | None:
    """Find the first number in an index between brackets that is a tensor of integers, and not always the same.

    Args:
      values: What is indexed.
      index: As Python hands it over.
      is_given: Whether what a tensor holds may differ between replays.
    Returns:
      (where, rest): an index of that number alone, which keeps its axis with size 1, and the index of what is there;
      None if there is no such number.
    """
    parts = index if isinstance(index, tuple) else (index,)
    for at, part in enumerate(parts):
        if isinstance(part, Tensor) and part.dtype in _NUMBERS and not part.dim() and is_given(part):
            before, behind = parts[:at], parts[at + 1 :]
            axis = sum(map(_axes, before))
            if any(one is Ellipsis for one in before):
                axis = values.dim() - 1 - sum(map(_axes, behind))
            return (*[slice(None)] * axis, part.reshape(1).to(torch.int64)), (*before, 0, *behind)
    return None


def _axes(part: Any) -> int:
    """Return how many axes a part of an index is for."""
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    if not isinstance(part, Tensor):
        part = torch.empty(()) if isinstance(part, slice) else torch.as_tensor(part)
    return part.dim() if part.dtype in _MASKS else 1
