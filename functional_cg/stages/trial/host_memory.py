"""Host memory in which values of a GPU wait while a run needs the memory of the GPU for others."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...concurrency.driver import done, driver, importable
from ..program import Var

__all__ = ["HostMemory"]

_Layout = tuple[Var, int, torch.dtype, Any, Any, Any]  # storage, shape, strides and offset


class HostMemory:
    """Keeps the storages of values, byte by byte, so that views of one storage come back as views of one.

    Copies are ordered by the stream, as all calls of a run are. The blocks serve one run after another. They are pinned
    here, since those that torch pins stay with the process.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}
        self._kept: dict[int, tuple[list[tuple[Tensor, torch.device]], list[_Layout]]] = {}
        self._pinned: list[tuple[Any, torch.device]] = []  # addresses, and whose copies use them

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
        blocks = []
        for storage in storages.values():
            source = _flat(storage)
            block = self._block(len(source), source.device)
            block.copy_(source, non_blocking=True)
            blocks.append((block, source.device))
        self._kept[values[0][0].storage] = blocks, layouts

    def take(self, storage: int) -> Iterable[tuple[Var, Tensor]]:
        """Return the values of a storage, in new memory of their device."""
        blocks, layouts = self._kept.pop(storage)
        memory = []
        for block, device in blocks:
            mine = torch.empty(len(block), dtype=torch.uint8, device=device)
            memory.append(mine.copy_(block, non_blocking=True).untyped_storage())
        self._release(blocks)
        for var, place, dtype, shape, stride, offset in layouts:
            empty = torch.empty(0, dtype=dtype, device=blocks[place][1])
            yield var, empty.set_(memory[place], offset, shape, stride)

    def end_run(self) -> None:
        """Forget what a run has set aside and not read again."""
        for blocks, _ in self._kept.values():
            self._release(blocks)
        self._kept.clear()

    def free(self) -> None:
        """Give all memory back, once the device has done with it."""
        self._free.clear()
        self._kept.clear()
        while self._pinned:
            address, device = self._pinned.pop()
            torch.cuda.synchronize(device)
            done(driver(), driver().cuMemFreeHost(address))

    def _release(self, blocks: Iterable[tuple[Tensor, torch.device]]) -> None:
        for block, _ in blocks:
            self._free.setdefault(len(block), []).append(block)

    def _block(self, nbytes: int, device: torch.device) -> Tensor:
        known = self._free.get(nbytes)
        if known:
            return known.pop()
        if device.type == "cuda" and nbytes and importable("cuda.bindings"):
            error, address = driver().cuMemAllocHost(nbytes)
            if error == driver().CUresult.CUDA_SUCCESS:
                self._pinned.append((address, device))
                return torch.frombuffer(
                    (ctypes.c_uint8 * nbytes).from_address(int(address)), dtype=torch.uint8
                )
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")  # copied more slowly, and that is all


def _flat(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
