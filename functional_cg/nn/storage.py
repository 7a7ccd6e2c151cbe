"""Identifies the memory of a tensor where possible."""

from __future__ import annotations

from torch import Tensor

from ..shards.reader import Reader
from ..state.leaf import Leaf
from ..tensors.overlap import storage_key

__all__ = ["storage_of"]


def storage_of(tensor: Tensor) -> int | None:
    """Identity of a tensor's storage; None for leaves and inside `torch.func`, where the storage is hidden.

    Also None for tensors that a loss reads from a mesh, which have memory only where they are used.
    """
    if isinstance(tensor, Leaf | Reader):
        return None
    try:
        return storage_key(tensor)
    except NotImplementedError:
        return None
