"""Poison: overwrite memory that nobody may read any more, so that whoever does shows it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .capture import Replay, copy_out
from .lower import Before

__all__ = ["Poisoned", "poison"]

_POISON_INT = 77  # a wrong number that is still a valid index of most tables


def poison(tensor: Tensor) -> None:
    """Overwrite the whole storage of a tensor with values that cannot pass for results."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage)
    if tensor.dtype is torch.bool:
        whole.logical_not_()  # either value may be right by chance, the opposite of the last one is not
    elif tensor.is_floating_point() or tensor.is_complex():
        bytes_ = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        bytes_.fill_(0xFF)  # NaN in any format
    else:
        whole.fill_(_POISON_INT)


class Poisoned:
    """``debug="poison"``: a replay after which its static inputs and metrics hold garbage.

    Args:
      replay: The replay.
      inputs: Static buffers of the inputs, which each call fills again.
    """

    fresh = True

    def __init__(self, replay: Replay, inputs: Sequence[Tensor]) -> None:
        self._replay, self._inputs = replay, inputs

    def __call__(self, before: Before, /) -> Sequence[Tensor]:
        static = self._replay(before)
        metrics = static if self._replay.fresh else copy_out(static)
        for dead in self._inputs if self._replay.fresh else (*self._inputs, *static):
            poison(dead)
        return metrics

    def close(self) -> None:
        self._replay.close()
        self._inputs = ()
