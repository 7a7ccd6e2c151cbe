"""Which tensors a program holds: strided ones, as many elements at each call; in a product, of one dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import LayoutError
from ..messages.source import at_here
from ..state.arena import BufferSpec
from ..tensors.op_table import row_of

__all__ = ["MIXED_DTYPES", "not_strided", "refuse_layouts", "refuse_mixed_dtypes"]

MIXED_DTYPES = "expected tensors of one dtype"

_DENSE = "use dense gradients, `sparse=False`, and dense tensors, `.to_dense()` before the step."
_PADDED = (
    "pad its parts to one length, `torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)`; a mask tells real rows "
    "from padding, `torch.arange(x.shape[1]) < lengths[:, None]`."
)


def not_strided(function: str, what: object, verb: str = "makes", where: str = "") -> LayoutError:
    """Return the error for a tensor whose size in memory depends on values.

    Args:
      function: Name of the user's function.
      what: Its layout and shape, or the call that makes it.
      verb: What the function does to it.
      where: At which line, as in ``, at train.py:33``; by default the one that runs.
    """
    nested = "sparse" not in str(what)
    return LayoutError.of(
        function,
        f"{verb} a {'nested' if nested else 'sparse'} tensor.",
        rows=[f"{what}{where or at_here()}"],
        why="How much memory it takes depends on values; a graph has fixed buffers.",
        fix=_PADDED if nested else _DENSE,
    )


def refuse_layouts(function: str, func: Any, tensors: Sequence[Tensor]) -> None:
    """Refuse a call that makes nested tensors, or reads any tensor that is not strided.

    Raises:
      LayoutError: Naming the call or the layout.
    """
    if "_nested_" in func.__name__:
        raise not_strided(function, func)
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            raise not_strided(function, f"{tensor.layout} of {tensor.dim()} dimensions", "reads")


def refuse_mixed_dtypes(func: Any, tensors: Sequence[Tensor]) -> None:
    """Refuse, as the kernel would, a product of tensors of different dtypes; a fake product accepts them.

    Raises:
      RuntimeError: Naming the dtypes.
    """
    if row_of(func).product and len({tensor.dtype for tensor in tensors}) > 1:
        found = ", ".join(str(BufferSpec.of(tensor)) for tensor in tensors)
        raise RuntimeError(f"{MIXED_DTYPES}, got {found}")
