"""Treedefs: the structure of a pytree without its leaves, and the differences between two of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .nodes import same_static

__all__ = ["LEAF", "KeyPath", "Names", "Treedef", "order_diff", "order_of", "path_string", "structure_diff"]

KeyPath = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Names:
    """What is needed to rebuild a dict from its values.

    Attributes:
      factory: Default factory of a defaultdict; None for other dicts.
      sorted: Its keys in sorted order, the order of the flattened values.
      put_in: Its keys in insertion order.
    """

    factory: Any
    sorted: tuple[Any, ...]
    put_in: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Treedef:
    """Structure of a pytree without its leaves.

    Two treedefs are equal if trees of the one can replace trees of the other: the key order of a dict does
    not matter.

    Attributes:
      kind: Type of the node; None for a leaf.
      context: What else is needed to rebuild the node (static fields, for example).
      keys: One key-path entry per child.
      children: Treedefs of the children.
      num_leaves: Number of leaves below.
    """

    kind: type | None
    context: Any
    keys: tuple[Any, ...]
    children: tuple[Treedef, ...]
    num_leaves: int

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, Treedef):
            return self is other
        return (
            self.kind is other.kind
            and self.keys == other.keys
            and same_static(_fixed(self.context), _fixed(other.context))
            and self.children == other.children
        )

    def __hash__(self) -> int:
        return hash((self.kind, self.num_leaves, tuple(str(key) for key in self.keys), self.children))

    @property
    def is_leaf(self) -> bool:
        return self.kind is None

    def paths(self, prefix: KeyPath = ()) -> list[KeyPath]:
        """Return the key paths of all leaves, in flat order."""
        if self.is_leaf:
            return [prefix]
        return [
            path
            for key, child in zip(self.keys, self.children, strict=True)
            for path in child.paths((*prefix, key))
        ]


def _fixed(context: Any) -> Any:
    """Return what trees have in common that can replace each other; 1 and True, equal to Python, are other keys."""
    return context.sorted if isinstance(context, Names) else context


LEAF = Treedef(None, None, (), (), 1)


def path_string(path: KeyPath, root: str = "") -> str:
    """Return a key path as text: ``path_string(path, "state")`` gives ``state.params['w']``."""
    return root + "".join(str(key) for key in path)


def _describe(node: Treedef) -> str:
    if node.is_leaf:
        return "a leaf"
    assert node.kind is not None
    if node.kind is type(None):
        return "None"
    return f"{_name(node)} with {len(node.children)} children"


def _name(node: Treedef) -> str:
    return "a leaf" if node.kind is None else node.kind.__name__


def _is_dict(node: Treedef) -> bool:
    return node.kind is not None and issubclass(node.kind, dict)


def structure_diff(expected: Treedef, got: Treedef, root: str = "tree") -> list[str]:
    """Return all places where two structures differ, one line each, with key paths."""
    rows: list[str] = []

    def walk(a: Treedef, b: Treedef, path: KeyPath) -> None:
        where = path_string(path, root)
        if a.kind is not b.kind:
            if not (_is_dict(a) and _is_dict(b)):
                rows.append(f"{where}  expected {_describe(a)}   got {_describe(b)}")
                return
            converts = ", which `dict(...)` converts" if a.kind is dict else ""
            rows.append(f"{where}  expected {_name(a)}   got {_name(b)}{converts}")
        here = {str(key): child for key, child in zip(a.keys, a.children, strict=True)}
        there = {str(key): child for key, child in zip(b.keys, b.children, strict=True)}
        rows.extend(
            f"{where}{key}  expected {_describe(here[key])}   got nothing" for key in here if key not in there
        )
        rows.extend(
            f"{where}{key}  expected nothing   got {_describe(there[key])}"
            for key in there
            if key not in here
        )
        if (
            a.kind is b.kind
            and set(here) == set(there)
            and not isinstance(a.context, Names)
            and not same_static(a.context, b.context)
        ):
            rows.append(f"{where}  expected static fields {a.context!r}   got {b.context!r}")
        for key, child in zip(a.keys, a.children, strict=True):
            if str(key) in there:
                walk(child, there[str(key)], (*path, key))

    walk(expected, got, ())
    return rows


def order_diff(expected: Treedef, got: Treedef, root: str = "tree") -> list[str]:
    """Return where dicts of two equal structures have their keys in another order, one line each, with key paths."""
    rows: list[str] = []

    def walk(a: Treedef, b: Treedef, path: KeyPath) -> None:
        if isinstance(a.context, Names) and a.context.put_in != b.context.put_in:
            want, have = (", ".join(map(repr, one.context.put_in)) for one in (a, b))
            rows.append(f"{path_string(path, root)}  expected keys in the order {want}   got {have}")
        for key, one, other in zip(a.keys, a.children, b.children, strict=True):
            walk(one, other, (*path, key))

    walk(expected, got, ())
    return rows


def order_of(*treedefs: Treedef) -> list[Any]:
    """Return the keys of all dicts in some structures, in insertion order."""
    found = []
    for one in treedefs:
        found += [one.context.put_in] if isinstance(one.context, Names) else []
        found += order_of(*one.children)
    return found
