"""Read the current CUDA device and stream without creating Python objects.

Only this module uses torch's private getters. A simulated stream (``functional_cg.testing``) queues work on
the CPU. It is a dispatch mode, and is found on their stack.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

__all__ = ["Stream", "current_device", "current_raw_stream", "current_stream"]


@runtime_checkable
class Stream(Protocol):
    """The part of ``torch.cuda.Stream`` that the library uses."""

    def wait_stream(self, stream: Any) -> None:
        """Order work queued from now on after the work queued on another stream."""
        ...

    def record_event(self, event: Any = None) -> Any:
        """Return an event that completes when the work queued so far is done."""
        ...

    def synchronize(self) -> None:
        """Wait on the host until all queued work is done."""
        ...


def current_stream(device: torch.device) -> Any:
    """Return the stream on which work on a device is queued; None where it runs at once, as on the CPU."""
    if device.type == "cuda":
        return torch.cuda.current_stream(device)
    if not torch._C._len_torch_dispatch_stack():
        return None
    return next((m for m in reversed(_get_current_dispatch_mode_stack()) if isinstance(m, Stream)), None)


def current_raw_stream(device_index: int) -> int:
    """Return the handle of a device's current stream; good only for comparison."""
    return torch._C._cuda_getCurrentRawStream(device_index)  # type: ignore[no-any-return, unused-ignore]


def current_device() -> int:
    """Return the index of the current CUDA device."""
    return torch._C._cuda_getDevice()
