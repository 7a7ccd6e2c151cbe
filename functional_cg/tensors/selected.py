"""What the device alone selects: elements by a mask, while nothing has asked how many, and rows by their number."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from .aten import tensors_in

__all__ = ["Selected", "place_in", "taken"]

_NUMBERS = frozenset({torch.int8, torch.int16, torch.int32, torch.int64})
_MASKS = frozenset({torch.bool, torch.uint8})


class Selected(Tensor):
    """Stands for ``values[mask]``, whose length depends on the mask; any use of it is refused.

    What needs no length takes :meth:`in_front` instead; a write where the same mask selects, :meth:`written_into`.

    Args:
      values: Where the mask selects.
      mask: bool; of a shape that broadcasts with that of ``values``, or that its first axes have.
      writes: How often the step has written the mask so far.
      refuse: Raises why a graph has no such result.
    """

    _whole: Tensor
    _mask: Tensor
    _by: tuple[Tensor, int]
    _refuse: Callable[[], NoReturn]

    @staticmethod
    def __new__(cls, values: Tensor, mask: Tensor, writes: int, refuse: Callable[[], NoReturn]) -> Selected:
        self: Selected = Tensor._make_wrapper_subclass(cls, (0,), dtype=values.dtype, device=values.device)
        self._whole, self._mask = values.clone(), mask.clone()  # what is selected stays when they are written
        self._by, self._refuse = (mask, writes), refuse
        return self

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        _one_in(args, kwargs)._refuse()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        _one_in(args, kwargs)._refuse()

    def in_front(self) -> Tensor:
        """Return the selected values in order, in front of as many more of the last one as there are others."""
        if self._mask.dim() != self._whole.dim():  # it selects rows
            self._refuse()
        values, mask = torch.broadcast_tensors(self._whole, self._mask)
        values, mask = values.flatten(), mask.flatten()
        order, count = (~mask).argsort(stable=True), mask.sum()
        places = torch.arange(mask.numel(), device=mask.device).minimum(count - 1).clamp(min=0)
        return torch.where(count > 0, values[order[places]], 0)

    def written_into(self, into: Tensor, mask: Tensor, writes: int) -> bool:
        """Write what is selected where ``mask`` selects ``into``; returns whether it is the mask that has selected."""
        alike = (into.shape, into.dtype) == (self._whole.shape, self._whole.dtype)
        if (
            (self._by[0] is not mask or self._by[1] != writes)
            or not alike
            or mask.shape != into.shape[: mask.dim()]
        ):
            return False
        where = mask.view(*mask.shape, *[1] * (into.dim() - mask.dim()))
        into.copy_(torch.where(where, self._whole, into))
        return True


def _one_in(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Selected:
    tensors = tensors_in([*args, *(kwargs or {}).values()])
    return next(one for one in tensors if isinstance(one, Selected))


class _Take(torch.autograd.Function):
    """Take one place along an axis, which stays, with size 1; gradients are moved, not added: bits stay."""

    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor, place: Tensor, axis: int) -> Tensor:
        index: Any = (*[slice(None)] * axis, place)
        return values[index]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
        values, place, ctx.axis = inputs
        ctx.size = values.shape[ctx.axis]
        ctx.save_for_backward(place)
        ctx.save_for_forward(place)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _Put.apply(*gradients, *ctx.saved_tensors, ctx.axis, ctx.size), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _Take.apply(tangents[0], *ctx.saved_tensors, ctx.axis)


class _Put(torch.autograd.Function):
    """Put values at one place along an axis of zeros."""

    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor, place: Tensor, axis: int, size: int) -> Tensor:
        zeros = values.new_zeros([*values.shape[:axis], size, *values.shape[axis + 1 :]])
        out: Tensor = torch.ops.aten.index_put.default(zeros, [*[None] * axis, place], values)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int, int], output: Tensor) -> None:
        _, place, ctx.axis, ctx.size = inputs
        ctx.save_for_backward(place)
        ctx.save_for_forward(place)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _Take.apply(*gradients, *ctx.saved_tensors, ctx.axis), None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _Put.apply(tangents[0], *ctx.saved_tensors, ctx.axis, ctx.size)


def taken(values: Tensor, place: Tensor, axis: int) -> Tensor:
    """Return ``values.narrow(axis, place, 1)`` as a copy, for a number that is a tensor i64[1]."""
    return _Take.apply(values, place, axis)  # type: ignore[no-any-return]


def place_in(
    values: Tensor, index: Any, is_given: Callable[[Tensor], bool]
) -> tuple[int, Tensor, tuple[Any, ...]] | None:
    """Find the first number in an index between brackets that is a tensor of integers, and not always the same.

    Args:
      values: What is indexed.
      index: As Python hands it over.
      is_given: Whether what a tensor holds may differ between replays.
    Returns:
      (axis, place, rest): along which axis it counts, the number as i64[1], and the index of what is :func:`taken`
      there; None if there is no such number.
    """
    parts = index if isinstance(index, tuple) else (index,)
    for at, part in enumerate(parts):
        if isinstance(part, Tensor) and part.dtype in _NUMBERS and not part.dim() and is_given(part):
            before, behind = parts[:at], parts[at + 1 :]
            axis = sum(map(_axes, before))
            if any(one is Ellipsis for one in before):
                axis = values.dim() - 1 - sum(map(_axes, behind))
            return axis, part.reshape(1).to(torch.int64), (*before, 0, *behind)
    return None


def _axes(part: Any) -> int:
    """Return how many axes a part of an index is for."""
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    if not isinstance(part, Tensor):
        part = torch.empty(()) if isinstance(part, slice) else torch.as_tensor(part)
    return part.dim() if part.dtype in _MASKS else 1
