"""torch's modes put aside for a block. Entered and left in C: whatever the handler of a signal raises, none stays on.

``torch.no_grad()`` and ``torch.inference_mode()`` are written in Python, where an exception may strike between the
change of a mode and the block that changes it back. The guard below restores both modes.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["leave_function_modes", "ordinary", "without_gradients"]


def ordinary() -> Any:
    """Enter to make ordinary tensors, also in inference mode; at its end, the modes are what they were."""
    return torch._C._InferenceMode(False)  # private, as is the next; test_signals notices a change


def leave_function_modes(depth: int) -> None:
    """Leave all function modes but the first ones: those that a signal kept from being left by their own block."""
    while torch._C._len_torch_function_stack() > depth:
        torch._C._pop_torch_function_stack()


def without_gradients() -> None:
    """Record nothing, until the end of the block of :func:`ordinary` that this is called in."""
    torch._C._set_grad_enabled(False)
