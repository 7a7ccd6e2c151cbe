"""Whether tensors are still the part of memory that they were, and how often they were written: asked at each call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch._C._dynamo.guards import TensorGuards  # private; test_constants notices a change

__all__ = ["as_now", "view_of", "writes"]


def as_now(tensors: Sequence[Tensor]) -> Callable[[], bool]:
    """Return a function that tells whether tensors are as they are now.

    It notices writes that torch counts, other memory, and another part of the same memory or another way to read it,
    as after ``x.data = y``, which counts as no write. No single field of a tensor tells all of these: a write, a
    storage and an offset are one comparison each for each tensor, and the layouts of all are one call more.
    """
    if not tensors:
        return lambda: True
    counted = [(one, one._version) for one in tensors if not one.is_inference()]
    # torch returns one object for a storage as long as there is one, as here.
    placed = [(one, one.untyped_storage(), one.storage_offset()) for one in tensors]
    views = [view_of(one) for one in tensors]
    # Of a layout: type, dtype, device, keys such as those of conjugation, sizes, strides.
    like = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check

    def unchanged() -> bool:
        for one, version in counted:
            if one._version != version:
                return False
        for one, memory, offset in placed:
            if one.untyped_storage() is not memory or one.storage_offset() != offset:
                return False
        # It also knows what is no change of a value, such as `requires_grad` and modes of the thread.
        return like(*tensors) or [view_of(one) for one in tensors] == views

    return unchanged


def writes(tensor: Tensor) -> int:
    """Return how many writes torch has counted; a tensor of inference counts none."""
    return 0 if tensor.is_inference() else tensor._version


def view_of(tensor: Tensor) -> Any:
    """Return which part of its memory a tensor is, and how it reads that."""
    return (
        tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()
    )  # fmt: skip
