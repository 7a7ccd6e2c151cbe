"""Rows of zeros with a one in each."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["one_hot"]


def one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """Return what ``torch.nn.functional.one_hot`` does.

    Under ``torch.func.grad`` and ``vmap``, torch on a CPU asks the host whether the classes are in range. They are
    taken as valid there, as on a GPU; in an ordinary eager run, torch asks.
    """
    if (
        num_classes < 1 or torch._C._functorch.peek_interpreter_stack() is None
    ):  # private; test_packed notices
        return torch.nn.functional.one_hot(tensor, num_classes)
    return (tensor.unsqueeze(-1) == torch.arange(num_classes, device=tensor.device)).to(torch.int64)
