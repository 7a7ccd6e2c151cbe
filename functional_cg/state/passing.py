"""Read attributes of a temporary node; refuse those that change it, as the change would be silently lost."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..pytree.trees import opened

__all__ = ["read"]


def read(node: Any, name: str, error: Callable[[], Exception]) -> Any:
    """Return an attribute of a temporary node; raise if a property, or a later method call, changes the node.

    Args:
      node: One level of a tree.
      name: The attribute.
      error: Makes the exception to raise.
    """
    before = _contents(node)

    def unchanged(value: Any) -> Any:
        if not _same(before, _contents(node)):
            raise error()
        return value

    found = unchanged(getattr(node, name))
    if getattr(found, "__self__", None) is not node:
        return found

    @functools.wraps(found)
    def method(*args: Any, **kwargs: Any) -> Any:
        return unchanged(found(*args, **kwargs))

    return method


def _contents(node: Any) -> list[tuple[Any, Any]]:
    """Return what one level of a tree holds, by name: its children in order, and the object's attributes."""
    attributes = list(getattr(node, "__dict__", {}).items())
    if isinstance(node, Mapping):
        return [*node.items(), *attributes]
    level = opened(node)
    children = [] if level is None else list(zip(map(str, level.keys), level.children, strict=True))
    return [*children, *attributes]


def _same(a: Sequence[tuple[Any, Any]], b: Sequence[tuple[Any, Any]]) -> bool:
    """Whether two results of :func:`_contents` hold the same objects under the same names."""
    return len(a) == len(b) and all(x == y and old is new for (x, old), (y, new) in zip(a, b, strict=True))
