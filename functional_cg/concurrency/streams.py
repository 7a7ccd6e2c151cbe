"""The current CUDA device and stream, read without making Python objects. The door to these private getters.

A simulated stream (``functional_cg.testing``) queues work on the CPU. It is a dispatch mode, and is found among them.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

__all__ = ["Stream", "current_device", "current_raw_stream", "current_stream"]


@runtime_checkable
class Stream(Protocol):
    """What the library asks of a stream; ``torch.cuda.Stream`` is one."""

    def wait_stream(self, stream: Any) -> None:
        """Order what is queued from now on after what is queued on another stream."""
        ...

    def record_event(self, event: Any = None) -> Any:
        """An event that has happened once what is queued until now is done."""
        ...

    def synchronize(self) -> None:
        """Wait on the host until all is done."""
        ...


def current_stream(device: torch.device) -> Any:
    """The stream on which work on a device is queued now; None where it is done at once, as on the CPU."""
    if device.type == "cuda":
        return torch.cuda.current_stream(device)
    if not torch._C._len_torch_dispatch_stack():
        return None
    return next((m for m in reversed(_get_current_dispatch_mode_stack()) if isinstance(m, Stream)), None)


def current_raw_stream(device_index: int) -> int:
    """Handle of the current stream of a device; comparable, nothing else."""
    return torch._C._cuda_getCurrentRawStream(device_index)  # type: ignore[no-any-return, unused-ignore]


def current_device() -> int:
    """Index of the current CUDA device."""
    return torch._C._cuda_getDevice()
