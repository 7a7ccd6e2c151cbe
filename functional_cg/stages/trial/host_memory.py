"""Host memory that holds values while a run needs the device's memory for others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..program import Var

__all__ = ["HostMemory"]

_Layout = tuple[Var, int, torch.dtype, Any, Any, Any]  # storage, shape, strides and offset


class HostMemory:
    """Keeps whole storages, byte by byte, so that views that share a storage still share one when they come back."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[list[Tensor], torch.device, list[_Layout]]] = {}

    def put(self, values: Sequence[tuple[Var, Tensor]]) -> None:
        """Copy the storages of values to the host.

        Args:
          values: Variables of one storage with their tensors.
        """
        storages = {id(one): one for one in (tensor.untyped_storage() for _, tensor in values)}
        places = {key: place for place, key in enumerate(storages)}
        layouts: list[_Layout] = [
            (var, places[id(one.untyped_storage())], one.dtype, one.shape, one.stride(), one.storage_offset())
            for var, one in values
        ]
        var, first = values[0]
        blocks = [_flat(storage).to("cpu", copy=True) for storage in storages.values()]
        self._kept[var.storage] = blocks, first.device, layouts

    def take(self, storage: int) -> Iterable[tuple[Var, Tensor]]:
        """Yield the values of a storage, in new memory on their device; none if the storage is not here."""
        blocks, device, layouts = self._kept.pop(storage, ([], torch.device("cpu"), []))
        memory = [block.to(device).untyped_storage() for block in blocks]
        for var, place, dtype, shape, stride, offset in layouts:
            yield var, torch.empty(0, dtype=dtype, device=device).set_(memory[place], offset, shape, stride)


def _flat(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
