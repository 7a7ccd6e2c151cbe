"""Attention with dropout from a key, on a GPU in one kernel that never holds all weights.

torch's fused kernels draw from a generator that nobody can see. Here the weights that stay are those of
:func:`functional_cg.random.keep_mask`: the numbers are the same as those of the math backend, up to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..tensors.aten import unwrapped
from ..tensors.once import knows_one_derivative

__all__ = ["ATTENTION", "attention_for"]

ATTENTION = "fcg::scaled_dot_product_dropout_attention"
_WIDEST = 256  # wider heads do not fit in the registers of a GPU
_RATES = 0.01, 0.99  # between which dropout takes 16 bits a weight

_LIBRARY = torch.library.Library("fcg", "FRAGMENT")
_HOW = "int stream, int dropped, float kept_scale, bool is_causal, float scale, bool keeps"
_LIBRARY.define(
    "scaled_dot_product_dropout_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor draws, "
    f"{_HOW}) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(
    "scaled_dot_product_dropout_attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, "
    f"Tensor? mask, Tensor draws, Tensor out, Tensor sums, Tensor kept, {_HOW}) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _cuda(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    # Imported at the first call on CUDA: CPU builds of torch come without triton.
    from functional_cg.random.attention_launch_triton import attention_cuda

    return attention_cuda(*args)


def _backward_cuda(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    from functional_cg.random.attention_launch_triton import attention_backward_cuda

    return attention_backward_cuda(*args)


def _fake(query: Tensor, key: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, queries, _ = query.shape
    words = (batch, heads, _words(key), queries) if args[-1] else (0,)
    sums = query.new_empty((2, batch, heads, queries), dtype=torch.float32)
    return _by_query(query), sums, query.new_empty(words, dtype=torch.int32)


def _backward_fake(grad: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = map(_by_query, given[:3])
    return query, key, value


def _words(key: Tensor) -> int:
    """Of 32 bits, for the weights of one query."""
    return -(-key.shape[2] // 32)


def _by_query(like: Tensor) -> Tensor:
    batch, heads, rows, width = like.shape
    return like.new_empty((batch, rows, heads, width)).transpose(1, 2)


_LIBRARY.impl("scaled_dot_product_dropout_attention", _cuda, "CUDA")
_LIBRARY.impl("scaled_dot_product_dropout_attention_backward", _backward_cuda, "CUDA")
torch.library.register_fake(ATTENTION, _fake, lib=_LIBRARY)
torch.library.register_fake(f"{ATTENTION}_backward", _backward_fake, lib=_LIBRARY)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, draws: Tensor, *how: Any
    ) -> Tensor:
        given = query, key, value, mask, draws
        out, sums, kept = torch.ops.fcg.scaled_dot_product_dropout_attention(*given, *how)
        ctx.save_for_backward(*given, out, sums, kept)
        ctx.how = how
        return out  # type: ignore[no-any-return]

    @staticmethod
    @knows_one_derivative(
        "scaled_dot_product_attention: with dropout from a key it is differentiated twice, and on a GPU its kernel "
        "knows its first derivative only.\n"
        "To fix: `with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):` around it, where you need "
        "the second one."
    )
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = torch.ops.fcg.scaled_dot_product_dropout_attention_backward(
            grad, *ctx.saved_tensors, *ctx.how
        )
        return (*grads, *(None,) * (2 + len(ctx.how)))


def attention_for(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Callable[[Tensor, int], Tensor] | None:
    """Return ``attend(key, stream)`` for the arguments of ``scaled_dot_product_attention``; None if no kernel fits.

    It fits tensors on a GPU of [batch, heads, length, at most 256], but not of double precision, where torch may choose
    a fused kernel, too. It has one derivative, and none in forward mode or under ``vmap``. What does not fit is left to
    the caller, who draws the same mask for the math backend, and holds all weights.
    """
    rates = _RATES[0] <= dropout_p <= _RATES[1]
    given = [query, key, value, *([] if attn_mask is None else [attn_mask])]
    both = is_causal and attn_mask is not None  # torch refuses it
    if enable_gqa or both or not rates or not all(map(_is_plain, given)) or not _may_fuse():
        return None
    query, key, value, attn_mask = _as_autocast(query, key, value, attn_mask)
    if not _fits(query, key, value) or (attn_mask is not None and not _fits_mask(attn_mask, query, key)):
        return None
    mask = None if attn_mask is None else attn_mask.expand(*query.shape[:3], key.shape[2])
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    # The backward needs to know which weights stay, a bit each; where those are larger than the query, it draws them.
    keeps = 4 * _words(key) <= query.shape[3] * query.element_size()

    def attend(draws: Tensor, stream: int) -> Tensor:
        dropped = round((1 - (1 - dropout_p)) * 65536)  # as `native_dropout` is drawn
        how = stream, dropped, 1 / (1 - dropout_p), bool(is_causal), float(factor), keeps
        return _Attention.apply(query, key, value, mask, draws, *how)  # type: ignore[no-any-return]

    return attend


def _may_fuse() -> bool:
    """Whether the user has left torch a fused kernel to choose."""
    kernels = torch.backends.cuda
    return bool(
        kernels.flash_sdp_enabled() or kernels.mem_efficient_sdp_enabled() or kernels.cudnn_sdp_enabled()
    )


def _is_plain(tensor: Any) -> bool:
    """Whether it is a tensor on a GPU without a tangent, and seen by no transform of ``torch.func``."""
    return (
        isinstance(tensor, Tensor)
        and tensor.is_cuda
        and unwrapped(tensor) is tensor
        and forward_ad.unpack_dual(tensor).tangent is None
    )


def _as_autocast(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Cast what autocast would cast at this call."""
    if not torch.is_autocast_enabled("cuda"):
        return tensors
    dtype = torch.get_autocast_dtype("cuda")
    return tuple(
        one.to(dtype)
        if one is not None and one.dtype in (torch.float32, torch.float16, torch.bfloat16)
        else one
        for one in tensors
    )


def _fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    if query.dtype not in (torch.bfloat16, torch.float16, torch.float32) or query.dim() != 4:
        return False
    shape = (*query.shape[:2], *key.shape[2:3], query.shape[3])
    return (
        key.shape == value.shape == shape
        and query.dtype == key.dtype == value.dtype
        and 0 < query.shape[3] <= _WIDEST
        and bool(query.numel())
        and bool(key.numel())
    )


def _fits_mask(mask: Tensor, query: Tensor, key: Tensor) -> bool:
    known = mask.dtype in (torch.bool, torch.float32, query.dtype)  # torch refuses others
    whole = *query.shape[:3], key.shape[2]
    broadcasts = mask.dim() <= len(whole) and all(
        size in (1, full) for size, full in zip(mask.shape[::-1], whole[::-1], strict=False)
    )
    return known and broadcasts and not mask.requires_grad
