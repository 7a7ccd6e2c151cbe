"""Memory that leaves its device and comes back at the same addresses.

On a GPU, the driver reserves addresses and maps memory there; torch takes them by ``__cuda_array_interface__``,
as those of any other library. On a CPU the pages are the system's, so that the contract can be tested anywhere.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..concurrency.driver import done, driver, importable

__all__ = ["Pages"]

_ALIGNMENT = 512  # bytes, as torch's allocator aligns


class Pages:
    """Parts of one range of memory.

    Args:
      sizes: Bytes of each part.
      device: Where.

    Attributes:
      parts: One tensor u8[n] of zeros each, with a storage of its own.
      users: As many as need the memory to stay.

    Raises:
      RuntimeError: On a GPU, if the driver cannot be reached.
      torch.OutOfMemoryError: If there is not enough memory.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        starts, end = [], 0
        for size in sizes:
            starts.append(end)
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        self._memory = _DeviceMemory(end, device) if device.type == "cuda" else _HostMemory(end)
        self._all = self._memory.tensor(0, end).zero_()
        self.parts = [self._memory.tensor(start, size) for start, size in zip(starts, sizes, strict=True)]
        self._kept: Tensor | None = None
        self.users: list[None] = []  # a list, since `append` and `pop` are atomic

    @property
    def away(self) -> bool:
        """Whether the memory is not there, and the values are in host memory."""
        return self._kept is not None

    def leave(self) -> None:
        """Copy all values to the host, and give the memory back; the addresses stay reserved."""
        if self.away:
            return
        kept = torch.empty(len(self._all), dtype=torch.uint8, device="cpu", pin_memory=self._all.is_cuda)
        kept.copy_(self._all)
        self._memory.unmap()
        self._kept = kept

    def come_back(self) -> None:
        """Take memory at the same addresses, with the same values.

        Raises:
          torch.OutOfMemoryError: If there is not enough of it; the values stay where they are.
        """
        if self._kept is None:
            return
        self._memory.map()
        self._all.copy_(self._kept)
        self._kept = None


class _HostMemory:
    """Anonymous memory of this process."""

    def __init__(self, nbytes: int) -> None:
        self._memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def tensor(self, start: int, nbytes: int) -> Tensor:
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=nbytes, offset=start)

    def unmap(self) -> None:
        self._memory.madvise(mmap.MADV_DONTNEED)

    def map(self) -> None:
        """Nothing: the system maps pages of zeros where they are written."""


class _DeviceMemory:
    """Memory of a GPU, mapped at reserved addresses; freed with the last tensor in it."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._driver, self._device = _driver(), device
        torch.cuda.synchronize(device)  # makes the context of torch current on this thread
        cu, index = self._driver, device.index
        self._where = cu.CUmemAllocationProp()
        self._where.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._where.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._where.location.id = index
        # Network cards read it only if it says so.
        rdma = cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
        self._where.allocFlags.gpuDirectRDMACapable = done(cu, cu.cuDeviceGetAttribute(rdma, index))
        smallest = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        grain = done(cu, cu.cuMemGetAllocationGranularity(self._where, smallest))
        self._size = -(-max(nbytes, 1) // grain) * grain
        self._address = done(cu, cu.cuMemAddressReserve(self._size, 0, 0, 0))
        self._handle: list[Any] = []  # of the memory that is mapped
        end = weakref.finalize(self, _free, cu, device, self._address, self._size, self._handle)
        end.atexit = False  # the process' memory ends with it
        self.map()

    def tensor(self, start: int, nbytes: int) -> Tensor:
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8, device=self._device)
        return torch.as_tensor(_Bytes(self, int(self._address) + start, nbytes), device=self._device)

    def unmap(self) -> None:
        torch.cuda.synchronize(self._device)
        _unmap(self._driver, self._address, self._size, self._handle)

    def map(self) -> None:
        cu = self._driver
        torch.cuda.empty_cache()  # what torch keeps in reserve would be missing here
        handle = done(cu, cu.cuMemCreate(self._size, self._where, 0))
        self._handle.append(handle)
        done(cu, cu.cuMemMap(self._address, self._size, 0, handle, 0))
        access = cu.CUmemAccessDesc()
        access.location = self._where.location
        access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        done(cu, cu.cuMemSetAccess(self._address, self._size, [access], 1))


class _Bytes:
    """What torch makes a tensor of, without a copy; the tensor keeps it, and so the memory."""

    def __init__(self, memory: _DeviceMemory, address: int, nbytes: int) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


def _driver() -> Any:
    missing = [name for name in ("cuda.bindings", "numpy") if not importable(name)]
    if missing:
        raise RuntimeError(
            f"can_sleep=True needs {' and '.join(missing)}, to map memory at fixed addresses of a GPU. "
            f"To fix: `pip install {' '.join(missing).replace('.', '-')}`."
        )
    return driver()


def _unmap(cu: Any, address: Any, size: int, handle: list[Any]) -> None:
    done(cu, cu.cuMemUnmap(address, size))
    done(cu, cu.cuMemRelease(handle.pop()))


def _free(cu: Any, device: torch.device, address: Any, size: int, handle: list[Any]) -> None:
    torch.cuda.synchronize(device)  # the driver does not wait for what still reads it
    if handle:
        _unmap(cu, address, size, handle)
    done(cu, cu.cuMemAddressFree(address, size))
