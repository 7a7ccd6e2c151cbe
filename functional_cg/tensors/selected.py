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

    What needs no length takes :meth:`in_front` instead.

    Args:
      values: Where the mask selects.
      mask: bool, of a shape that broadcasts with that of ``values``.
      refuse: Raises why a graph has no such result.
    """

    _whole: Tensor
    _mask: Tensor
    _refuse: Callable[[], NoReturn]

    @staticmethod
    def __new__(cls, values: Tensor, mask: Tensor, refuse: Callable[[], NoReturn]) -> Selected:
        self: Selected = Tensor._make_wrapper_subclass(cls, (0,), dtype=values.dtype, device=values.device)
        self._whole, self._mask, self._refuse = values, mask, refuse
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
        values, mask = torch.broadcast_tensors(self._whole, self._mask)
        values, mask = values.flatten(), mask.flatten()
        order, count = (~mask).argsort(stable=True), mask.sum()
        places = torch.arange(mask.numel(), device=mask.device).minimum(count - 1).clamp(min=0)
        return torch.where(count > 0, values[order[places]], 0)


def _one_in(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Selected:
    tensors = tensors_in([*args, *(kwargs or {}).values()])
    return next(one for one in tensors if isinstance(one, Selected))
