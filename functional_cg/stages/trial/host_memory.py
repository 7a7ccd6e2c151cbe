"""Host memory in which values of a GPU wait while a run needs the memory of the GPU for others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ...concurrency.driver import done, driver, importable
from ..program import Var

__all__ = ["HostMemory"]

_Layout = tuple[Var, int, torch.dtype, tuple[int, ...], tuple[int, ...], int]


class HostMemory:
    """Keeps the storages of values, byte by byte, so that views of one storage come back as views of one.

    Copies are ordered by the stream, as all calls of a run are. The blocks serve one run after another. They are pinned
    here, since those that torch pins stay with the process.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}
        self._kept: dict[int, tuple[list[tuple[Tensor, torch.device]], list[_Layout]]] = {}
        self._pinned: list[Tensor] = []

    def put(self, values: Sequence[tuple[Var, Tensor]]) -> None:
        """Copy the storages of values to the host.

        Args:
          values: Variables of one storage with their tensors.
        """
        storages = {id(one): one for one in (tensor.untyped_storage() for _, tensor in values)}
        places = {key: place for place, key in enumerate(storages)}
        layouts = [
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
            self._free.setdefault(len(block), []).append(block)
        for var, place, dtype, shape, stride, offset in layouts:
            empty = torch.empty(0, dtype=dtype, device=blocks[place][1])
            yield var, empty.set_(memory[place], offset, shape, stride)

    def end_run(self) -> None:
        """Forget what a run has set aside and not read again."""
        for blocks, _ in self._kept.values():
            for block, _ in blocks:
                self._free.setdefault(len(block), []).append(block)
        self._kept.clear()

    def free(self) -> None:
        """Give all memory back, once the device has done with it."""
        if self._pinned:
            torch.cuda.synchronize()
        for block in self._pinned:
            done(driver(), driver().cuMemHostUnregister(block.data_ptr()))
        self._pinned.clear()
        self._free.clear()
        self._kept.clear()

    def _block(self, nbytes: int, device: torch.device) -> Tensor:
        known = self._free.get(nbytes)
        if known:
            return known.pop()
        # The first touch of memory is slow; `fill_` does it with several threads.
        block = torch.empty(nbytes, dtype=torch.uint8, device="cpu").fill_(0)
        if device.type == "cuda" and nbytes and importable("cuda.bindings"):
            (error,) = driver().cuMemHostRegister(block.data_ptr(), nbytes, 0)
            if error == driver().CUresult.CUDA_SUCCESS:  # else the copies are slower, and that is all
                self._pinned.append(block)
        return block


def _flat(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
