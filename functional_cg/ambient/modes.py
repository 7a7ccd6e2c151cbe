"""torch's modes put aside for a block. Entered and left in C: whatever the handler of a signal raises, none stays on.

``torch.no_grad()`` and ``torch.inference_mode()`` are written in Python, where an exception may strike between the
change of a mode and the block that changes it back. The guard below restores both modes.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["ordinary", "restore", "surrounding", "without_gradients"]

_DEVICES = ("cpu", "cuda")


def ordinary() -> Any:
    """Enter to make ordinary tensors, also in inference mode; at its end, the modes are what they were."""
    return torch._C._InferenceMode(False)  # private, as is the next; test_signals notices a change


def surrounding() -> tuple[Any, ...]:
    """The modes that a block of Python's own would change back, unless a signal kept it from that."""
    autocast = [torch.is_autocast_enabled(device) for device in _DEVICES]
    return torch._C._len_torch_function_stack(), torch.is_autocast_cache_enabled(), autocast


def restore(modes: tuple[Any, ...]) -> None:
    """Make modes again what :func:`surrounding` has seen."""
    depth, cache, autocast = modes
    while torch._C._len_torch_function_stack() > depth:
        torch._C._pop_torch_function_stack()
    torch.set_autocast_cache_enabled(cache)
    for device, enabled in zip(_DEVICES, autocast, strict=True):
        torch.set_autocast_enabled(device, enabled)


def without_gradients() -> None:
    """Record nothing, until the end of the block of :func:`ordinary` that this is called in."""
    torch._C._set_grad_enabled(False)
