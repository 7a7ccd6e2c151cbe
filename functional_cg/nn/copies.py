"""Buffers that a module may write: the caller's tensors stay as they are, the writes go to copies.

A buffer is copied when it is first written, so a mask or a table of positions costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..arena import storage_key
from ..leaf import Leaf

__all__ = ["CopyOnWrite", "has_storage", "owns_storage"]


class CopyOnWrite:
    """Redirects ATen calls on some tensors, and on views of them, to copies made when one is first written.

    Args:
      originals: Tensors that own their storages.
    """

    def __init__(self, originals: Iterable[Tensor]) -> None:
        self._originals = {storage_key(tensor): tensor for tensor in originals}
        self._copies: dict[int, Tensor] = {}

    def __bool__(self) -> bool:
        """Whether a tensor was copied."""
        return bool(self._copies)

    def write(self, tensor: Tensor) -> None:
        """Make the copy that a write to `tensor` needs, if it is one of the originals or a view of one."""
        key = storage_key(tensor) if has_storage(tensor) else None
        if key in self._originals and key not in self._copies:
            self._copies[key] = self._originals[key].clone()

    def current(self, value: Any) -> Any:
        """What now holds the values of `value`: itself, or the same part of a copy."""
        copy = self._copies.get(storage_key(value)) if self._copies and has_storage(value) else None
        if copy is None:
            return value
        if value.shape == copy.shape and value.stride() == copy.stride() and value.dtype == copy.dtype:
            return copy
        return copy.view(value.dtype).as_strided(value.shape, value.stride(), value.storage_offset())

    def call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call ``func`` on what its arguments are now."""
        if not self._copies:
            return func(*args, **kwargs)
        now = {name: _map(self.current, value) for name, value in kwargs.items()}
        return func(*_map(self.current, tuple(args)), **now)


def owns_storage(tensor: Tensor) -> bool:
    """Whether a tensor is all that there is in its storage."""
    return has_storage(tensor) and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize


def has_storage(value: Any) -> bool:
    """Whether a value is a tensor with memory of its own to look at; not so a leaf, or one inside of `torch.func`."""
    if not isinstance(value, Tensor) or isinstance(value, Leaf):
        return False
    try:
        value.untyped_storage()
    except NotImplementedError:
        return False
    return True


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_map(function, item) for item in value)
    return function(value)
