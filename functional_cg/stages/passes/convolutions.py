"""Convolutions in small groups, as a sweep makes them, without the kernel for each group that cuDNN launches for some.

cuDNN has kernels for all groups at once where a convolution moves by one place. It has none for the gradient of the
input of a convolution with a stride, and none for a kernel of one element in single precision: on an H200, 64 groups of
8 to 32 channels take 64 launches, and 3 to 30 times as long as the formulas here.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["convolution", "convolution_backward"]

_aten = torch.ops.aten
_FEW = 64  # channels; the kernel of a larger group keeps a device busy


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    *how: Any,
) -> Tensor:
    """Return a convolution: in small groups with a kernel of one element, a batched product over the groups."""
    groups = _small_groups(x, weight, *how)
    if not groups or not _is_product(weight, padding):
        return _aten.convolution.default(x, weight, bias, stride, padding, dilation, *how)  # type: ignore[no-any-return]
    read = x[_every(stride)]
    out = _image(_rows(read, groups) @ _matrices(weight, groups).mT, read)
    return out if bias is None else out + bias.view(-1, *[1] * len(stride))


def convolution_backward(
    grads: Tensor,
    x: Tensor,
    weight: Tensor,
    biases: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    *rest: Any,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of a convolution's input, weight and bias, of those that are wanted."""
    *how, wanted = rest
    groups, grads = _small_groups(x, weight, *how), _laid_as(x, grads)
    found: list[Tensor | None] = [None, None, None]
    if groups and _is_product(weight, padding):
        rows, read = _rows(grads, groups), x[_every(stride)]
        if wanted[0]:
            spread = torch.zeros_like(x)
            spread[_every(stride)] = _image(rows @ _matrices(weight, groups), grads)
            found[0] = spread
        if wanted[1]:
            found[1] = (rows.mT @ _rows(read, groups)).reshape(weight.shape)
        if wanted[2]:
            found[2] = grads.sum([0, *range(2, x.dim())])
        return tuple(found)
    if groups and wanted[0] and max(stride) > 1 == max(dilation):
        found[0] = _gradient_of_input(grads, x, weight, stride, padding, groups)
        wanted = [False, *wanted[1:]]
    if any(wanted):
        op = _aten.convolution_backward.default
        others = op(grads, x, weight, biases, stride, padding, dilation, *how, wanted)
        found = [one if one is not None else other for one, other in zip(found, others, strict=True)]
    return tuple(found)


def _gradient_of_input(
    grads: Tensor, x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], groups: int
) -> Tensor:
    """Return the gradient of a strided convolution's input by a convolution without a stride.

    A place of the input is a multiple of the stride and a rest. The places of one rest meet the elements of the kernel
    with that rest alone, so all rests of a multiple are computed at once, as channels.
    """
    dims, outputs, kernel = range(len(stride)), weight.shape[0] // groups, weight.shape[2:]
    taps = [-(-size // step) for size, step in zip(kernel, stride, strict=True)]
    lack = [(0, n * step - size) for n, step, size in zip(taps, stride, kernel, strict=True)]
    split = chain.from_iterable(zip(taps, stride, strict=True))
    parts = _padded(weight, lack).view(groups, outputs, weight.shape[1], *split)
    parts = parts.permute(0, 2, *(2 * i + 4 for i in dims), 1, *(2 * i + 3 for i in dims))
    weights = _laid_as(grads, parts.reshape(-1, outputs, *taps).flip([i + 2 for i in dims]))
    around, ones = [n - 1 for n in taps], [1] * len(stride)
    how = None, ones, around, ones, False, [0] * len(stride), groups
    made = _aten.convolution.default(grads, weights, *how).unflatten(1, (x.shape[1], *stride))
    order = chain.from_iterable((i + 2 + len(stride), i + 2) for i in dims)
    sizes = [n * step for n, step in zip(made.shape[-len(stride) :], stride, strict=True)]
    image = made.permute(0, 1, *order).reshape(*x.shape[:2], *sizes)
    cut = [(-pad, size + pad - end) for size, pad, end in zip(x.shape[2:], padding, sizes, strict=True)]
    return _padded(image, cut)


def _padded(value: Tensor, by: Sequence[tuple[int, int]]) -> Tensor:
    """Return a tensor with zeros before and after each of its last dimensions, or with less of it."""
    return F.pad(value, [*chain.from_iterable(reversed(by))])


def _laid_as(other: Tensor, value: Tensor) -> Tensor:
    """Return a value with its channels last if another has them: a compiler fuses that, and a kernel copies."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(other.dim(), torch.contiguous_format)
    is_last = not other.is_contiguous() and other.is_contiguous(memory_format=last)
    return value.contiguous(memory_format=last) if is_last and _on_gpu(other) else value


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def _small_groups(x: Tensor, weight: Tensor, *how: Any) -> int:
    """Return the number of a convolution's groups if they are small; those of one channel have kernels of their own."""
    transposed, _, groups = how
    inputs, outputs = weight.shape[1], weight.shape[0] // groups
    is_small = groups > 1 < inputs and max(inputs, outputs) <= _FEW
    return groups if is_small and not transposed and _on_gpu(x) else 0


def _is_product(weight: Tensor, padding: Sequence[int]) -> bool:
    """Whether a convolution is a product, which rounds between only if a convolution may."""
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn.conv  # type: ignore[attr-defined]
    rounds = cuda.fp32_precision == "tf32" != cudnn.fp32_precision or cuda.allow_fp16_accumulation
    return all(size == 1 for size in weight.shape[2:]) and not any(padding) and not rounds


def _every(stride: Sequence[int]) -> Any:
    return (..., *(slice(None, None, step) for step in stride))


def _matrices(weight: Tensor, groups: int) -> Tensor:
    return weight.reshape(groups, -1, weight.shape[1])


def _rows(image: Tensor, groups: int) -> Tensor:
    """Return [groups, batch * places, channels of a group]."""
    return image.movedim(1, -1).reshape(-1, groups, image.shape[1] // groups).transpose(0, 1)


def _image(rows: Tensor, like: Tensor) -> Tensor:
    """Return [batch, groups * channels, *places] of rows, with the places of another image."""
    channels = rows.shape[0] * rows.shape[2]
    return rows.transpose(0, 1).reshape(like.shape[0], *like.shape[2:], channels).movedim(-1, 1)
