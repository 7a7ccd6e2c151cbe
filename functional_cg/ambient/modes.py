"""Override torch's modes for a block, in C: no exception of a signal handler leaves one on.

``torch.no_grad()`` and ``torch.inference_mode()`` are written in Python: an exception may strike after they
change a mode and before the block begins that restores it. The guard below restores both modes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from ..concurrency.turns import lock_through_forks
from .compiling import leave, outside

__all__ = [
    "DEVICES",
    "SWITCH",
    "beneath",
    "dispatch_modes",
    "ordinary",
    "restore",
    "surrounding",
    "without_gradients",
]

DEVICES = ("cpu", "cuda")
# Held while modes of the process are others for one op. Two threads would restore each other's, and whoever asks for
# the modes shall not see them.
SWITCH = lock_through_forks()


def ordinary() -> Any:
    """Make ordinary tensors in a ``with`` block, even in inference mode; its end restores the modes."""
    return torch._C._InferenceMode(False)  # private, as is the next; test_signals notices a change


def surrounding() -> tuple[Any, ...]:
    """Return the modes that Python context managers restore, unless a signal keeps them from it."""
    autocast = [torch.is_autocast_enabled(device) for device in DEVICES]
    depth, cache = torch._C._len_torch_function_stack(), torch.is_autocast_cache_enabled()
    return depth, cache, autocast, _nesting(), outside()


def restore(modes: tuple[Any, ...]) -> None:
    """Restore the modes that :func:`surrounding` returned."""
    depth, cache, autocast, nesting, compiler = modes
    while torch._C._len_torch_function_stack() > depth:
        torch._C._pop_torch_function_stack()
    torch.set_autocast_cache_enabled(cache)
    for device, enabled in zip(DEVICES, autocast, strict=True):
        torch.set_autocast_enabled(device, enabled)
    while _nesting() > nesting:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()  # only the outermost block does, and kept casts would go stale
    leave(compiler)


def _nesting() -> int:
    """Return in how many blocks of autocast this thread is; both calls happen in C, with none of a handler between."""
    _, nesting = map(operator.call, (torch.autocast_increment_nesting, torch.autocast_decrement_nesting))
    return nesting


def without_gradients() -> None:
    """Disable autograd until the enclosing :func:`ordinary` block ends."""
    torch._C._set_grad_enabled(False)


def dispatch_modes() -> list[TorchDispatchMode]:
    """Return the dispatch modes of this thread, the innermost last."""
    return _get_current_dispatch_mode_stack()


@contextmanager
def beneath(modes: Sequence[TorchDispatchMode], mode: AbstractContextManager[Any]) -> Iterator[None]:
    """Run a block in one more dispatch mode, which sees what leaves ``modes``, the innermost of this thread."""
    for _ in modes:
        _pop_mode()
    try:
        with mode:
            for one in modes:
                _push_mode(one)
            try:
                yield
            finally:
                for _ in modes:
                    _pop_mode()
    finally:
        for one in modes:
            _push_mode(one)
