"""Override torch's modes for a block, in C: no exception of a signal handler leaves one on.

``torch.no_grad()`` and ``torch.inference_mode()`` are written in Python: an exception may strike after they
change a mode and before the block begins that restores it. The guard below restores both modes.
"""

from __future__ import annotations

from typing import Any

import torch

from .compiling import leave, outside

__all__ = ["DEVICES", "ordinary", "restore", "surrounding", "without_gradients"]

DEVICES = ("cpu", "cuda")


def ordinary() -> Any:
    """Make ordinary tensors in a ``with`` block, even in inference mode; its end restores the modes."""
    return torch._C._InferenceMode(False)  # private, as is the next; test_signals notices a change


def surrounding() -> tuple[Any, ...]:
    """Return the modes that Python context managers restore, unless a signal keeps them from it."""
    autocast = [torch.is_autocast_enabled(device) for device in DEVICES]
    depth, cache = torch._C._len_torch_function_stack(), torch.is_autocast_cache_enabled()
    return depth, cache, autocast, outside()


def restore(modes: tuple[Any, ...]) -> None:
    """Restore the modes that :func:`surrounding` returned."""
    depth, cache, autocast, compiler = modes
    while torch._C._len_torch_function_stack() > depth:
        torch._C._pop_torch_function_stack()
    torch.set_autocast_cache_enabled(cache)
    for device, enabled in zip(DEVICES, autocast, strict=True):
        torch.set_autocast_enabled(device, enabled)
    leave(compiler)


def without_gradients() -> None:
    """Disable autograd until the enclosing :func:`ordinary` block ends."""
    torch._C._set_grad_enabled(False)
