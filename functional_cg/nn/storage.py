"""Which memory a tensor has, where it can be told."""

from __future__ import annotations

from torch import Tensor

from ..shards.reader import Reader
from ..state.leaf import Leaf
from ..tensors.overlap import storage_key

__all__ = ["storage_of"]


def storage_of(tensor: Tensor) -> int | None:
    """Identity of a tensor's storage; None of a leaf, and inside of `torch.func`, where there is none to look at.

    Nor is there one of what a loss reads of a mesh, which has memory only where it is used.
    """
    if isinstance(tensor, Leaf | Reader):
        return None
    try:
        return storage_key(tensor)
    except NotImplementedError:
        return None
