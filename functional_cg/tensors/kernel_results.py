"""Strides and dtypes that torch's kernels choose for their results, where its fake tensors have others.

For an operand whose elements do not lie in the order of its dimensions, such as an image in channels_last, torch has
two formulas for strides: that of the kernel, and that of the fake tensor. They differ for about twenty ops (torch 2.11
and 2.13). For operands of several dtypes, ten ops return another dtype than their fake tensors say: a loss of half
precision against single is one of them. So the kernel itself is asked, on a few elements that lie in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .aten import named_arguments, tensors_in
from .op_table import row_of

__all__ = ["KernelResults"]

_FEW = 2  # elements in each dimension
_Layout = tuple[tuple[int, ...], torch.dtype] | None  # strides and dtype of a tensor


class KernelResults:
    """Asks kernels, each once for operands that lie in the same order."""

    def __init__(self) -> None:
        self._found: dict[Any, list[_Layout] | None] = {}

    def correct(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Any:
        """Return the result of a call on fake tensors, with the strides and the dtype that the kernel gives it.

        Args:
          func: The op.
          args: Its arguments.
          kwargs: Its arguments by name.
          out: What it returned.
        """
        if not _runs_on_few(func):
            return out
        operands = list(tensors_in([*args, *kwargs.values()]))
        turned = not all(map(_contiguous, operands))
        mixed = len({one.dtype for one in operands}) > 1
        if not (turned or mixed) or not all(one.numel() for one in operands if one.dim() > 1):
            return out
        found = self._asked(func, args, kwargs, operands)
        if found is None:
            return out
        if isinstance(out, Tensor):
            return _corrected(out, found[0], operands, turned=turned)
        pairs = zip(out, found, strict=True)
        return tuple(_corrected(one, layout, operands, turned=turned) for one, layout in pairs)

    def _asked(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], operands: Sequence[Tensor]
    ) -> list[_Layout] | None:
        """Return how the results for few elements lie; None if the kernel does not run on so few."""
        named = named_arguments(func, args, kwargs)
        rest = {name: one for name, one in named.items() if not isinstance(one, Tensor)}
        key = func, *map(_kind, operands), str(rest)
        if key not in self._found:
            with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
                few = {name: _few(one) if isinstance(one, Tensor) else one for name, one in named.items()}
                try:
                    out = func(**_with_sizes(few))
                except (RuntimeError, IndexError, ValueError):
                    self._found[key] = None
                else:
                    results = [out] if isinstance(out, Tensor) else out
                    self._found[key] = [
                        (one.stride(), one.dtype) if isinstance(one, Tensor) else None for one in results
                    ]
        return self._found[key]


def _with_sizes(named: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call on few elements, with those that say sizes of its operands suited to these."""
    if "normalized_shape" in named:
        named["normalized_shape"] = [min(size, _FEW) for size in named["normalized_shape"]]
    if "HxW" in named:
        rows, channels, *image = named["input"].shape
        named |= {"N": rows, "C": channels, "HxW": math.prod(image), "group": 1}
    return named


@cache
def _runs_on_few(func: Any) -> bool:
    """Whether an op may be run on a few elements to see what it returns: it draws and writes nothing.

    Cached: a schema takes longer to read than an op to trace.
    """
    shapeless = torch.Tag.pointwise in func.tags or row_of(func).shapeless
    written = any(result.alias_info is not None for result in func._schema.returns)
    return shapeless and not written and torch.Tag.nondeterministic_seeded not in func.tags


def _contiguous(tensor: Tensor) -> bool:
    """Whether the elements lie in the order of the dimensions without gaps, as far as strides say."""
    step = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if stride != step:
            return False
        step *= size
    return True


def _pattern(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and strides of a tensor of few elements that lie in the same order, with gaps at the same places."""
    shape = tuple(min(size, _FEW) for size in tensor.shape)
    stride = [0] * len(shape)
    dense, step = 1, 1
    # Dimensions of one element have strides, too, by which kernels choose a layout.
    for place in sorted(range(len(shape)), key=lambda place: (tensor.stride(place), shape[place], -place)):
        if tensor.stride(place) == 0:
            continue
        if tensor.stride(place) > dense or (tensor.stride(place) < dense and shape[place] > 1):
            step *= 2
        stride[place] = step
        dense, step = tensor.stride(place) * tensor.shape[place], step * shape[place]
    return shape, tuple(stride)


def _kind(tensor: Tensor) -> Any:
    return *_pattern(tensor), tensor.dtype, tensor.device


def _few(tensor: Tensor) -> Tensor:
    shape, stride = _pattern(tensor)
    length = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return torch.ones(length, dtype=tensor.dtype, device=tensor.device).as_strided(shape, stride)


def _corrected(out: Any, layout: _Layout, operands: Sequence[Tensor], *, turned: bool) -> Any:
    """Return a fake result, or one like it of this dtype, whose dimensions lie in the order of these strides."""
    if not isinstance(out, Tensor) or layout is None:
        return out
    order, dtype = layout
    stride = _laid(out, order, operands) if turned and out.dim() and out.numel() else out.stride()
    if (out.stride(), out.dtype) == (stride, dtype):
        return out
    return out.new_empty_strided(out.shape, stride, dtype=dtype)


def _laid(out: Tensor, order: tuple[int, ...], operands: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the strides of a result whose dimensions lie in the order of these strides."""
    like = next((one for one in operands if one.shape == out.shape and _pattern(one)[1] == order), None)
    if like is not None:
        return like.stride()
    sizes = list(zip(out.shape, order, strict=True))
    return tuple(math.prod(size for size, other in sizes if size > 1 and other < own) for own in order)
