"""Keep attention and RNNs on kernels whose draws are visible."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

__all__ = ["OpenKernels"]

# Kernel selection is process-wide: two threads switching it would restore each other's settings.
_SWITCH = threading.RLock()
_RNNS = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})
_ATTENTION = frozenset({F.scaled_dot_product_attention, F.multi_head_attention_forward})


class OpenKernels(TorchFunctionMode):
    """Keeps attention and RNNs on kernels composed of ATen calls where a fused one would hide its draws.

    Fused attention and cuDNN's RNNs draw internally; and seen from below autograd, cuDNN's and oneDNN's RNNs omit what
    their backward needs. While any function mode is active, ``MultiheadAttention`` and the transformer layers take the
    same path, traced or not, in training and in evaluation.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ATTENTION and _drops_out(func, args, kwargs):
            with _SWITCH, sdpa_kernel(SDPBackend.MATH):
                return func(*args, **kwargs)
        if func in _RNNS:
            with (
                _SWITCH,
                _without(torch.backends.mkldnn),
                _without(torch.backends.cudnn),
            ):
                return func(*args, **kwargs)
        return func(*args, **kwargs)


@contextmanager
def _without(backend: Any) -> Iterator[None]:
    # `backend.flags(enabled=False)` would also change the precision of matrix products.
    enabled = backend.enabled
    backend.enabled = False
    try:
        yield
    finally:
        backend.enabled = enabled


def _attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *more: Any, **named: Any
) -> None:
    """The first parameters of ``scaled_dot_product_attention``, a builtin without a signature."""


def _drops_out(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    signature = inspect.signature(_attention if func is F.scaled_dot_product_attention else func)
    given = signature.bind(*args, **kwargs).arguments
    return given.get("dropout_p", 0.0) > 0 and bool(given.get("training", True))
