"""Keep attention and RNNs on kernels whose draws are visible, and draws out of loops that wait for one that fits."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..ambient.modes import SWITCH
from .attention import attention_for

__all__ = ["OpenKernels", "in_rows"]

_RNNS = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})
# Begins by asking whether its tensor is a meta tensor, which it would leave alone. Private; test_nn notices a change.
_TRUNCATED = nn.init._no_grad_trunc_normal_.__code__


class OpenKernels(TorchFunctionMode):
    """Keeps attention and RNNs on kernels composed of ATen calls where a fused one would hide its draws.

    torch's fused attention and cuDNN's RNNs draw internally; ours draws from a key, where it fits. And seen from below
    autograd, cuDNN's and oneDNN's RNNs omit what their backward needs. While any function mode is active,
    ``MultiheadAttention`` and the transformer layers take the same path, traced or not, in training and in evaluation.

    torch draws a truncated normal distribution again and again until all numbers are within the bounds, which nobody
    can know in a trace: here one draw fills the tensor, and torch has nothing left to do.

    Args:
      truncated: Fills a tensor for ``nn.init.trunc_normal_``, given the tensor, mean, std and the two bounds.
      attend: Calls a function of key and stream that attends with dropout.
    """

    def __init__(
        self,
        truncated: Callable[[Tensor, float, float, float, float], None],
        attend: Callable[[Callable[[Tensor, int], Tensor]], Tensor],
    ) -> None:
        super().__init__()
        self._truncated, self._attend = truncated, attend

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == Tensor.is_meta.__get__ and (given := _to_truncate(args[0])):  # type: ignore[attr-defined]
            self._truncated(args[0], *given)
            return True
        if func is F.multi_head_attention_forward:
            with self:
                return _without_question(func)(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func in _RNNS:
            return _composed(func, args, kwargs)
        return func(*args, **kwargs)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        *more: Any,
        **named: Any,
    ) -> Tensor:
        """Call ``scaled_dot_product_attention``, which is a builtin without a signature."""
        if dropout_p > 0:
            fused = attention_for(query, key, value, attn_mask, dropout_p, *more, **named)
            if fused is not None:
                return self._attend(fused)
            with SWITCH, sdpa_kernel(SDPBackend.MATH):
                return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, *more, **named)
        # Fused kernels of a GPU read rows. A mask that was expanded along the keys, as one made by `vmap` is, would be
        # left to products of float32.
        if attn_mask is not None and attn_mask.is_cuda and attn_mask.stride()[-1:] != (1,):
            attn_mask = in_rows(attn_mask)
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, *more, **named)


def _without_question(func: Any) -> FunctionType:
    """Return a function of torch that does not ask whether a mode is active, so that what it calls reaches the mode."""
    own = {**func.__globals__, "has_torch_function": lambda _: False}  # private; test_nn notices a change
    copy = FunctionType(func.__code__, own, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def _to_truncate(tensor: Tensor) -> tuple[float, float, float, float] | None:
    """Return mean, std and bounds if ``nn.init.trunc_normal_`` asks about the tensor that it is to fill; else None."""
    frame = sys._getframe(2)
    if frame.f_code is not _TRUNCATED:
        return None
    given = frame.f_locals
    if given["tensor"] is not tensor or given["generator"] is not None or tensor.is_meta:
        return None
    return given["mean"], given["std"], given["a"], given["b"]


def _composed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call an RNN of torch as ATen calls, each of which runs in the modes around it, as it does in a replay."""
    backends = (torch.backends.mkldnn, torch.backends.cudnn)
    with SWITCH:  # before they are read: another thread may be in here
        around = [(backend, backend.enabled) for backend in backends]
        with _set([(backend, False) for backend in backends]), _InModes(around):
            return func(*args, **kwargs)


class _InModes(TorchDispatchMode):
    """Runs each op with backends enabled or not, whatever torch found when it chose the op."""

    def __init__(self, enabled: Sequence[tuple[Any, bool]]) -> None:
        super().__init__()
        self._enabled = enabled

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with _set(self._enabled):
            return func(*args, **(kwargs or {}))


@contextmanager
def _set(enabled: Sequence[tuple[Any, bool]]) -> Iterator[None]:
    # `backend.flags(enabled=False)` would also change the precision of matrix products. Assigning `backend.enabled` is
    # refused once torch's own testing tools are imported.
    before = [(backend, backend.enabled) for backend, _ in enabled]
    try:
        for backend, value in enabled:
            backend.set_flags(value, _fp32_precision=None)
        yield
    finally:
        for backend, value in before:
            backend.set_flags(value, _fp32_precision=None)


def in_rows(mask: Tensor) -> Tensor:
    """Return a mask with rows in one piece; what was expanded along other dimensions still is.

    Args:
      mask: [..., keys].
    Example:
      >>> import torch
      >>> from functional_cg.random.kernels import in_rows
      >>> in_rows(torch.tensor([True, False])[:, None].expand(4, 8, 2, 3)).stride()
      (0, 0, 3, 1)
    """
    once = mask
    for dim, step in enumerate(mask.stride()[:-1]):
        if step == 0:
            once = once.narrow(dim, 0, 1)
    return once.contiguous().expand(mask.shape)
