"""Torch's operators that take functions, as plain ATen calls, which a trace records and autograd differentiates.

No recorded call can hold a function. Here flex attention maps those of one score over all scores, so tensors that they
close over, such as a learned bias or the documents of a batch, are read and differentiated like any other; the scores
take memory, queries times keys. An associative scan applies its function to whole slices. Values are those of torch's
operators up to rounding.

Source: Dong et al. 2024, "Flex Attention: A Programming Model for Generating Optimized Attention Kernels"; Blelloch
1990, "Prefix sums and their applications".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["associative_scan", "flex_attention"]


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: Mapping[str, Any],
    score_buffers: tuple[Tensor, ...] = (),
    mask_buffers: tuple[Tensor, ...] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what ``torch.ops.higher_order.flex_attention`` computes, with its arguments.

    Args:
      query: f[B, H, T, D].
      key: f[B or 1, G, S, D]; G divides H.
      value: f[B or 1, G, S, E].
      score_mod: ``score_mod(score, b, h, q, k, *score_buffers)`` returns a score.
      block_mask: ``BlockMask.as_tuple()``; its last part is ``mask_mod(b, h, q, k, *mask_buffers)``.
      scale: Factor of the scores.
      kernel_options: Of a kernel that is not used here.
      score_buffers: Further tensors.
      mask_buffers: Further tensors.
    Returns:
      (out, logsumexp, largest): f[B, H, T, E] with strides in the order of the query's, and of the scores of each query
      the logarithm of the sum of exponentials and the largest, f[B, H, T], both to base 2.
    """
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        query, key, value = (one.to(torch.get_autocast_dtype(kind)) for one in (query, key, value))
    groups, dtype = query.shape[1] // key.shape[1], torch.promote_types(query.dtype, torch.float32)
    keys, values = (
        one.repeat_interleave(groups, dim=1).expand(len(query), -1, -1, -1) for one in (key, value)
    )
    scores = query.to(dtype) @ keys.to(dtype).mT * scale
    places = [torch.arange(size, device=scores.device) for size in scores.shape]
    with _IndexByTensors():
        visible = _everywhere(block_mask[-1], 0, len(mask_buffers))(*places, *mask_buffers)
        scores = _everywhere(score_mod, 1, len(score_buffers))(scores, *places, *score_buffers)
    visible = _in_blocks(visible, block_mask, scores.shape[-2:])
    scores = torch.where(visible, scores.to(dtype), -math.inf)
    # The softmax of a row without a visible key is zero, and so is its gradient.
    out = torch._safe_softmax(scores, -1).to(query.dtype) @ values
    return _in_order_of(query, out), scores.logsumexp(-1) / math.log(2), scores.amax(-1) / math.log(2)


class _IndexByTensors(TorchFunctionMode):
    """Makes ``table[h, q]`` with numbers that are tensors an index on the device; torch would ask for their values."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__getitem__:
            table, given = args
            given = given if isinstance(given, tuple) else (given,)
            if any(isinstance(one, Tensor) for one in given) and all(
                isinstance(one, Tensor | int) for one in given
            ):
                indices = [
                    one if isinstance(one, Tensor) else torch.full((), one, device=table.device)
                    for one in given
                ]
                return torch.ops.aten.index.Tensor(table, indices)
        return func(*args, **(kwargs or {}))


def _everywhere(function: Callable[..., Tensor], scores: int, buffers: int) -> Callable[..., Tensor]:
    """Map a function of ``scores`` numbers and four places over batch, heads, queries and keys."""
    for place in reversed(range(4)):
        of_places = [0 if other == place else None for other in range(4)]
        function = torch.vmap(function, in_dims=(*[0] * scores, *of_places, *[None] * buffers))
    return function


def _in_blocks(visible: Tensor, block_mask: Sequence[Any], shape: Sequence[int]) -> Tensor:
    """Return what a mask of blocks lets through: all of its full blocks, ``visible`` in its other ones."""
    _, _, count, indices, full_count, full_indices, *_ = block_mask
    sizes = [min(size, length) for size, length in zip(block_mask[-3:-1], shape, strict=True)]
    visible = visible & _elements(count, indices, sizes, shape)
    return visible if full_count is None else visible | _elements(full_count, full_indices, sizes, shape)


def _elements(count: Tensor, indices: Tensor, sizes: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Return bool[B, H, T, S]: whether an element lies in one of the blocks, the first ``count`` of each row."""
    columns = indices.shape[-1]
    listed = torch.arange(columns, device=indices.device) < count[..., None]
    places = torch.where(listed, indices, columns).long()
    blocks = torch.zeros(*indices.shape[:-1], columns + 1, dtype=torch.bool, device=indices.device)
    blocks = blocks.scatter(-1, places, True)[..., :columns]
    for dim, size, length in zip((-2, -1), sizes, shape, strict=True):
        blocks = blocks.repeat_interleave(size, dim=dim).narrow(dim, 0, length)
    return blocks


def _in_order_of(query: Tensor, out: Tensor) -> Tensor:
    """Lay a result out with its dimensions in memory as those of the query; the last one stays contiguous."""
    strides = query.stride()
    order = [*sorted(range(3), key=lambda dim: strides[dim], reverse=True), 3]
    return out.permute(order).contiguous().permute([order.index(dim) for dim in range(4)])


def associative_scan(
    combine: Callable[..., Sequence[Tensor]], elements: Sequence[Tensor], others: Sequence[Tensor] = ()
) -> list[Tensor]:
    """Compute what ``torch.ops.higher_order.associative_scan`` computes, with its arguments.

    Args:
      combine: ``combine(*left, *right, *others)`` returns what is made of two elements, by element of their tensors.
      elements: Tensors with elements along their first axis; at least one.
      others: Further tensors.
    Returns:
      For each tensor: place ``i`` has what is made of elements 0 to ``i``. It takes two calls of ``combine`` for each
      binary digit of their number.
    """
    count = elements[0].shape[0]
    if count < 2:
        return [one.clone() for one in elements]
    pairs = combine(*(one[:-1:2] for one in elements), *(one[1::2] for one in elements), *others)
    odd = associative_scan(combine, pairs, others)
    even = [one[:1] for one in elements]
    if count > 2:
        before = (one[: (count - 1) // 2] for one in odd)
        later = combine(*before, *(one[2::2] for one in elements), *others)
        even = [torch.cat(both) for both in zip(even, later, strict=True)]
    return [_in_turn(*both) for both in zip(even, odd, strict=True)]


def _in_turn(even: Tensor, odd: Tensor) -> Tensor:
    """Join elements of even and of odd places; there may be one more of the first."""
    both = torch.stack([even[: len(odd)], odd], 1).flatten(0, 1)
    return both if len(even) == len(odd) else torch.cat([both, even[-1:]])
