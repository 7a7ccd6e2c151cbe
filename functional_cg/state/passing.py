"""Attributes and methods of a node that is built for the moment: what they write to it would be gone, in silence."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..tree import opened

__all__ = ["read"]


def read(node: Any, name: str, error: Callable[[], Exception]) -> Any:
    """An attribute of a passing node; a method raises where it has changed the node, as a property does.

    Args:
      node: One level of a tree.
      name: The attribute.
      error: What is raised.
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
    """What one level of a tree holds, by name: its children, in order, and whatever attributes the object has."""
    attributes = list(getattr(node, "__dict__", {}).items())
    if isinstance(node, Mapping):
        return [*node.items(), *attributes]
    level = opened(node)
    children = [] if level is None else list(zip(map(str, level.keys), level.children, strict=True))
    return [*children, *attributes]


def _same(a: Sequence[tuple[Any, Any]], b: Sequence[tuple[Any, Any]]) -> bool:
    """Whether two results of :func:`_contents` have the same objects under the same names."""
    return len(a) == len(b) and all(x == y and old is new for (x, old), (y, new) in zip(a, b, strict=True))
