"""The current CUDA device and stream, read without making Python objects. The door to these private getters."""

from __future__ import annotations

import torch

__all__ = ["current_device", "current_raw_stream"]


def current_raw_stream(device_index: int) -> int:
    """Handle of the current stream of a device; comparable, nothing else."""
    return torch._C._cuda_getCurrentRawStream(device_index)  # type: ignore[no-any-return, unused-ignore]


def current_device() -> int:
    """Index of the current CUDA device."""
    return torch._C._cuda_getDevice()
