"""Chooses leaves of a tree by a mask or by labels, which may stop above its leaves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from functional_cg import tree
from functional_cg.errors import LayoutError


@dataclass(frozen=True)
class FrozenTree:
    """An immutable, hashable pytree with hashable leaves; prints as the tree."""

    leaves: tuple[Any, ...]
    treedef: tree.Treedef

    def thaw(self) -> Any:
        """Return a fresh copy of the tree."""
        return tree.unflatten(self.treedef, self.leaves)

    def __repr__(self) -> str:
        return repr(self.thaw())


def freeze(value: Any) -> Any:
    """Turn containers into a :class:`FrozenTree`, immune to later mutation; return anything else unchanged."""
    if not isinstance(value, (dict, list, tuple)):
        return value
    flat, treedef = tree.flatten(value)
    return FrozenTree(tuple(flat), treedef)


def thaw(value: Any) -> Any:
    """Undo :func:`freeze`."""
    return value.thaw() if isinstance(value, FrozenTree) else value


def broadcast_prefix(prefix: Any, full: Any, name: str) -> list[Any]:
    """List the value of ``prefix`` that applies to each leaf of ``full``.

    Args:
      prefix: A value, or a tree that may stop above the leaves of ``full``.
      full: The whole tree.
      name: What error messages call the prefix.
    Raises:
      LayoutError: If ``prefix`` is not a prefix of ``full``; it lists the first five differences.
    """
    values, prefix_def = tree.flatten(prefix)
    _, full_def = tree.flatten(full)
    rows: list[str] = []
    source = iter(values)

    def walk(short: tree.Treedef, long: tree.Treedef, path: tree.KeyPath) -> Iterator[Any]:
        if short.is_leaf:
            value = next(source)
            yield from [value] * long.num_leaves
        elif short.kind is not long.kind or [*map(str, short.keys)] != [*map(str, long.keys)]:
            rows.extend(tree.structure_diff(long, short, tree.path_string(path, name)))
            for _ in range(short.num_leaves):
                next(source)
        else:
            for key, a, b in zip(short.keys, short.children, long.children, strict=True):
                yield from walk(a, b, (*path, key))

    out = list(walk(prefix_def, full_def, ()))
    if rows:
        raise LayoutError.of(
            "",
            f"optim: `{name}` is not a prefix of the parameters.",
            rows=rows,
            fix=f"give `{name}` one value per leaf or per subtree, under their names, "
            f"{', '.join(tree.path_string(path) for path in full_def.paths()[:4])}; or make it a function of the "
            "parameters.",
        )
    return out


def resolve_flags(mask: Any, full: Any) -> list[bool]:
    """Resolve a mask (None for all, a prefix tree of bools, or a function of the tree) to one bool per leaf.

    Raises:
      TypeError: If a value is not a Python bool; a tensor would have to be read on the host.
    """
    if mask is None:
        return [True] * len(tree.leaves(full))
    flags = broadcast_prefix(mask(full) if callable(mask) else thaw(mask), full, "mask")
    wrong = [flag for flag in flags if not isinstance(flag, bool)]
    if wrong:
        raise TypeError(
            f"mask: every leaf must be a Python bool, got {type(wrong[0]).__name__}: {wrong[0]!r}"
        )
    return flags


def select(full: Any, flags: Sequence[bool]) -> Any:
    """Replace leaves whose flag is False with None, a node without leaves."""
    flat, treedef = tree.flatten(full)
    return tree.unflatten(treedef, [leaf if keep else None for leaf, keep in zip(flat, flags, strict=True)])


def replace_selected(full: Any, flags: Sequence[bool], part: Any) -> Any:
    """Take the leaves whose flag is True from ``part``; the inverse of :func:`select`."""
    flat, treedef = tree.flatten(full)
    source = iter(tree.leaves(part))
    return tree.unflatten(
        treedef, [next(source) if take else leaf for leaf, take in zip(flat, flags, strict=True)]
    )
