"""Poison dead memory: overwrite it, so that a read after its end of life becomes visible."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from ...tensors.overlap import storage_key
from ..plan import Before, Replay
from .memory import copy_out

__all__ = ["Poisoned", "poison"]

_INTEGERS = MappingProxyType({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64})


def poison(tensor: Tensor) -> None:
    """Overwrite the whole storage of a tensor with values that cannot pass for results.

    Floating-point numbers become NaN. An integer or bool becomes its logical negation: 0, or 1 if it was 0. This is
    always a different value, and always a plausible index: a CPU would refuse an index such as 77, while a GPU silently
    reads a wrong row, so here a lookup reads a wrong row on both. Poison once: twice restores 0 and 1.
    """
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return
    if tensor.is_floating_point() or tensor.is_complex():
        _whole(tensor, torch.uint8).fill_(0xFF)  # NaN in any format
    else:
        _whole(tensor, _INTEGERS[tensor.itemsize]).logical_not_()


def _whole(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor's whole storage as elements of another dtype."""
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(tensor.untyped_storage())


class Poisoned:
    """A replay that poisons its static inputs and metrics after each call, for ``debug="poison"``.

    Args:
      replay: The replay to wrap.
      inputs: Static buffers of the inputs, which each call refills.
    """

    fresh = True

    def __init__(self, replay: Replay, inputs: Sequence[Tensor]) -> None:
        self._replay, self._inputs = replay, inputs

    def __call__(self, before: Before, /) -> Sequence[Tensor]:
        static = self._replay(before)
        metrics = static if self._replay.fresh else copy_out(static)
        dead = self._inputs if self._replay.fresh else (*self._inputs, *static)
        for tensor in {storage_key(tensor): tensor for tensor in dead}.values():  # inputs share slabs
            poison(tensor)
        return metrics

    def close(self) -> None:
        self._replay.close()
        self._inputs = ()
