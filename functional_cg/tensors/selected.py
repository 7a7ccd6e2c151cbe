"""What a mask selects from a tensor, while nothing has asked how much that is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from .aten import tensors_in

__all__ = ["Selected"]


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
