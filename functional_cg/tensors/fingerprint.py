"""Whether tensors are still the part of memory that they were, and how often they were written: asked at each call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards  # private; test_constants notices a change

__all__ = ["as_now", "seen"]


def as_now(tensors: Sequence[Tensor]) -> Callable[[], bool]:
    """Return a function that tells whether tensors are as they are now.

    It notices writes that torch counts, other memory, and another part of the same memory or another way to read it,
    as after ``x.data = y``, which counts as no write. No single field of a tensor tells all of these: a count and a
    storage are one comparison each for each tensor, in generated code, and the layouts of all are one call more. An
    offset is compared where the memory has room for another one. Of sparse and nested tensors, writes alone count.
    """
    kept = tuple({id(one): one for one in tensors}.values())  # torch's guards take each tensor once
    placed, before = tuple(filter(_is_placed, kept)), list(map(seen, kept))
    names: dict[str, Any] = {"placed": placed, "like": _guards(placed)}
    lines: list[str] = []
    for i, (one, (count, memory, _)) in enumerate(zip(kept, before, strict=True)):
        names[f"t{i}"], names[f"m{i}"] = one, memory
        terms = [] if one.is_inference() else [f"t{i}._version != {count}"]
        if memory is not None:
            terms.append(f"t{i}.untyped_storage() is not m{i}")
            if not one.is_contiguous() or one.nbytes != memory.nbytes():
                terms.append(f"t{i}.storage_offset() != {one.storage_offset()}")
        lines += [f"    if {' or '.join(terms)}: return False\n"] if terms else []

    def alike() -> bool:
        # The guards also know what is no change of a value, such as `requires_grad` and modes of the thread.
        if list(map(seen, kept)) != before:
            return False
        names["like"] = _guards(placed)
        return True

    names["alike"] = alike
    source = f"def unchanged():\n{''.join(lines)}    return like(*placed) or alike()\n"
    exec(
        compile(source, f"{__file__}, generated", "exec"), names
    )  # the library's own code to whoever follows a trace
    return cast("Callable[[], bool]", names["unchanged"])


def seen(tensor: Tensor) -> tuple[int, Any, Any]:
    """Return how many writes torch has counted, the memory, and which part of it the tensor is and how it reads that.

    A tensor of inference counts no writes. Torch returns one object for a storage as long as there is one.
    """
    count = 0 if tensor.is_inference() else tensor._version
    if not _is_placed(tensor):
        return count, None, None
    view = (
        tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()
    )  # fmt: skip
    return count, tensor.untyped_storage(), view


def _is_placed(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _guards(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Return a test of types, dtypes, devices, sizes, strides, and keys such as those of conjugation."""
    return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
