"""Pytrees: nested containers with tensors as leaves. With :mod:`.nodes` the one door to ``torch.utils._pytree``.

Dicts are flattened and compared by sorted key, so the order in which a dict was written never matters for what fits;
rebuilt, a dict has its keys in the order in which it was put in. ``None`` is a node without leaves, as in JAX; a
``torch.Size`` is a leaf. Types registered with ``torch.utils._pytree`` are nodes here too.

Key paths print as Python would read them: ``state.params['w']``, ``batch['x'][0]``.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as torch_pytree

from .errors import LayoutError
from .nodes import register_dataclass, register_dataclass_node, same_static, static

__all__ = [
    "KeyPath",
    "TreeView",
    "Treedef",
    "at",
    "flatten",
    "flatten_with_path",
    "leaves",
    "map",
    "path_string",
    "register_dataclass",
    "register_dataclass_node",
    "static",
    "static_values",
    "structure_diff",
    "unflatten",
]

T = TypeVar("T")
Key = torch_pytree.SequenceKey[Any] | torch_pytree.MappingKey[Any, Any] | torch_pytree.GetAttrKey
KeyPath = tuple[Any, ...]

_MAPPINGS = (dict, OrderedDict, defaultdict)
_MAX_DEPTH = 100  # far below what Python's own stack allows: a tree that is deeper contains itself


class TreeView(ABC):
    """An object that stands for a pytree stored elsewhere; a state handle is one."""

    __slots__ = ()

    @abstractmethod
    def __tree__(self) -> Any:
        """Return the pytree, built of leaves."""

    @abstractmethod
    def __tree_set__(self, updates: dict[int, Any]) -> Any:
        """Return a view with the leaves at the given flat positions replaced."""


@dataclass(frozen=True, slots=True)
class _Names:
    """What a dict is rebuilt from, beside its values.

    Attributes:
      factory: Of a defaultdict.
      sorted: Its keys in the order of the flattened values.
      put_in: Its keys in the order in which they were put in.
    """

    factory: Any
    sorted: tuple[Any, ...]
    put_in: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Treedef:
    """Structure of a pytree without its leaves.

    Two treedefs are equal when a tree of the one can take the place of a tree of the other: the order of the keys of a
    dict does not matter.

    Attributes:
      kind: Type of the node; None for a leaf.
      context: What else the node's type needs to be rebuilt (static fields, for example).
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
            and (isinstance(self.context, _Names) or same_static(self.context, other.context))
            and self.children == other.children
        )

    def sorted(self) -> Treedef:
        """The structure with all dicts in the order of their sorted keys."""
        children = tuple(child.sorted() for child in self.children)
        context = self.context
        if isinstance(context, _Names):
            context = replace(context, put_in=context.sorted)
        return replace(self, context=context, children=children)

    def __hash__(self) -> int:
        return hash((self.kind, self.num_leaves, tuple(str(key) for key in self.keys), self.children))

    @property
    def is_leaf(self) -> bool:
        return self.kind is None

    def paths(self, prefix: KeyPath = ()) -> list[KeyPath]:
        """Key paths of all leaves, in flat order."""
        if self.is_leaf:
            return [prefix]
        return [
            path
            for key, child in zip(self.keys, self.children, strict=True)
            for path in child.paths((*prefix, key))
        ]


def static_values(treedef: Treedef) -> list[Any]:
    """Values of the static fields of all registered dataclasses in a structure."""
    own = list(treedef.context) if treedef.kind is not None and dataclasses.is_dataclass(treedef.kind) else []
    return [*own, *(value for child in treedef.children for value in static_values(child))]


LEAF = Treedef(None, None, (), (), 1)


@dataclass(frozen=True, slots=True)
class _Node:
    context: Any
    keys: tuple[Any, ...]
    children: Sequence[Any]


def _sorted_keys(mapping: Any) -> list[Any]:
    try:
        return sorted(mapping)
    except TypeError:  # keys of different types have no order of their own
        return sorted(mapping, key=lambda key: (type(key).__name__, repr(key)))


def _open(tree: Any) -> _Node | None:
    """One level of a tree; None for a leaf."""
    kind = type(tree)
    if tree is None:
        return _Node(None, (), ())
    if kind in _MAPPINGS:
        names = _sorted_keys(tree)
        factory = tree.default_factory if kind is defaultdict else None
        return _Node(
            _Names(factory, tuple(names), tuple(tree)),
            tuple(torch_pytree.MappingKey(name) for name in names),
            [tree[name] for name in names],
        )
    if kind is list or kind is tuple:
        return _Node(None, tuple(torch_pytree.SequenceKey(i) for i in range(len(tree))), tree)
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return _Node(None, tuple(torch_pytree.GetAttrKey(name) for name in kind._fields), tree)
    registered = torch_pytree.SUPPORTED_NODES.get(kind)
    if registered is None or kind is torch.Size:  # a shape is one value: torch rebuilds it as a tuple
        return None
    children, context = registered.flatten_fn(tree)
    keyed = registered.flatten_with_keys_fn
    keys = (
        tuple(key for key, _ in keyed(tree)[0])
        if keyed is not None
        else tuple(torch_pytree.SequenceKey(i) for i in range(len(children)))
    )
    return _Node(context, keys, children)


def contents(node: Any) -> list[tuple[Any, Any]]:
    """What one level of a tree holds, by name: its children, in order, and whatever attributes the object has."""
    attributes = list(getattr(node, "__dict__", {}).items())
    if type(node) in _MAPPINGS:
        return [*node.items(), *attributes]
    opened = _open(node)
    children = [] if opened is None else list(zip(map(str, opened.keys), opened.children, strict=True))
    return [*children, *attributes]


def same_contents(a: Sequence[tuple[Any, Any]], b: Sequence[tuple[Any, Any]]) -> bool:
    """Whether two results of :func:`contents` have the same objects under the same names."""
    return len(a) == len(b) and all(x == y and old is new for (x, old), (y, new) in zip(a, b, strict=True))


def _flatten_into(tree: Any, out: list[Any], path: list[Any]) -> Treedef:
    if isinstance(tree, TreeView):
        tree = tree.__tree__()
    node = _open(tree)
    if node is None:
        out.append(tree)
        return LEAF
    if len(path) == _MAX_DEPTH:
        raise _too_deep(path)
    start, children = len(out), []
    for key, child in zip(node.keys, node.children, strict=True):
        path.append(key)
        children.append(_flatten_into(child, out, path))
        path.pop()
    return Treedef(type(tree), node.context, node.keys, tuple(children), len(out) - start)


def _too_deep(path: Sequence[Any]) -> LayoutError:
    return LayoutError.of(
        "",
        f"a tree is nested more than {_MAX_DEPTH} levels deep, or contains itself.",
        rows=[f"{path_string(tuple(path[:8]), 'tree')}..."],
        why="A pytree ends in leaves.",
        fix="take the reference to an outer container out; stack what is a long chain, `torch.stack(...)`.",
    )


def flatten(tree: Any) -> tuple[list[Any], Treedef]:
    """Flatten a pytree into its leaves and its treedef.

    Example:
      >>> from functional_cg import tree
      >>> leaves, treedef = tree.flatten({"b": 2, "a": [1, None]})
      >>> leaves
      [1, 2]
      >>> tree.unflatten(treedef, leaves)
      {'b': 2, 'a': [1, None]}

    Raises:
      LayoutError: If the tree contains itself.
    """
    out: list[Any] = []
    treedef = _flatten_into(tree, out, [])
    return out, treedef


def flatten_with_path(tree: Any) -> tuple[list[tuple[KeyPath, Any]], Treedef]:
    """Flatten a pytree into pairs of key path and leaf, and its treedef."""
    out, treedef = flatten(tree)
    return list(zip(treedef.paths(), out, strict=True)), treedef


def leaves(tree: Any) -> list[Any]:
    """The leaves of a pytree, in flat order."""
    return flatten(tree)[0]


def node_unflatten(treedef: Treedef, children: Sequence[Any]) -> Any:
    """Rebuild one level of a tree from its children."""
    kind = treedef.kind
    if kind is type(None):
        return None
    if kind in _MAPPINGS:
        names = treedef.context
        mapping: Any = defaultdict(names.factory) if kind is defaultdict else kind()
        values = dict(zip(names.sorted, children, strict=True))
        mapping.update((name, values[name]) for name in names.put_in)
        return mapping
    if kind is list or kind is tuple:
        return kind(children)
    assert kind is not None
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return kind(*children)
    return torch_pytree.SUPPORTED_NODES[kind].unflatten_fn(children, treedef.context)


def unflatten(treedef: Treedef, leaves: Iterable[Any]) -> Any:
    """Rebuild a pytree from its treedef and its leaves.

    Raises:
      ValueError: If the number of leaves is not that of the treedef.
    """
    flat = list(leaves)
    if len(flat) != treedef.num_leaves:
        raise ValueError(f"unflatten: the treedef has {treedef.num_leaves} leaves, got {len(flat)}")
    return _built(treedef, iter(flat))


def _built(treedef: Treedef, leaves: Iterator[Any]) -> Any:
    # No inner function that names itself: it would be a cycle, which keeps the leaves until the next collection.
    if treedef.is_leaf:
        return next(leaves)
    return node_unflatten(treedef, [_built(child, leaves) for child in treedef.children])


def map(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Apply ``function`` to the leaves of one or several trees of the same structure.

    Raises:
      LayoutError: If the trees differ in structure; all differences are listed.

    Example:
      >>> from functional_cg import tree
      >>> tree.map(lambda a, b: a + b, {"x": 1, "y": 2}, {"x": 10, "y": 20})
      {'x': 11, 'y': 22}
    """
    first, treedef = flatten(tree)
    others = []
    for other in rest:
        flat, other_def = flatten(other)
        if other_def != treedef:
            raise LayoutError.of(
                "",
                "tree.map: the trees differ in structure.",
                rows=structure_diff(treedef, other_def, "tree"),
                fix="give each tree the structure of the first one."
                if type(None) not in (treedef.kind, other_def.kind)
                else "a tree is None: `state.grads`, for one, is there with `TrainState.create(accumulate=True)`.",
            )
        others.append(flat)
    return unflatten(treedef, [function(*group) for group in zip(first, *others, strict=True)])


def path_string(path: KeyPath, root: str = "") -> str:
    """A key path as text: ``path_string(path, "state")`` gives ``state.params['w']``."""
    return root + "".join(str(key) for key in path)


def _describe(node: Treedef) -> str:
    if node.is_leaf:
        return "a leaf"
    assert node.kind is not None
    if node.kind is type(None):
        return "None"
    return f"{node.kind.__name__} with {len(node.children)} children"


def structure_diff(expected: Treedef, got: Treedef, root: str = "tree") -> list[str]:
    """All places where two structures differ, one line each, with key paths."""
    rows: list[str] = []

    def walk(a: Treedef, b: Treedef, path: KeyPath) -> None:
        where = path_string(path, root)
        if a.kind is not b.kind:
            rows.append(f"{where}  expected {_describe(a)}   got {_describe(b)}")
            return
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
            set(here) == set(there)
            and not isinstance(a.context, _Names)
            and not same_static(a.context, b.context)
        ):
            rows.append(f"{where}  expected static fields {a.context!r}   got {b.context!r}")
        for key, child in zip(a.keys, a.children, strict=True):
            if str(key) in there:
                walk(child, there[str(key)], (*path, key))

    walk(expected, got, ())
    return rows


class _Marker:
    """Stands for one leaf while ``at`` looks for what ``where`` selects."""

    __slots__ = ("position",)

    def __init__(self, position: int) -> None:
        self.position = position


def at(where: Callable[[T], Any], tree: T, value: Any) -> T:
    """Replace what ``where`` selects, functionally.

    On a plain tree this is a pure copy of the structure. On a state handle the value is written into the same
    slots and the old handle is donated.

    Args:
      where: Selects one leaf, a subtree, or a tuple or list of those: ``lambda s: s.params["w"]``.
      tree: The pytree or state handle.
      value: New value, with the structure of what ``where`` selects.
    Returns:
      The tree with the new value.
    Raises:
      LayoutError: If ``value`` has another structure than the selection.
      ValueError: If ``where`` selects what is not of the tree, or a leaf twice.

    Example:
      >>> from functional_cg import tree
      >>> tree.at(lambda t: t["a"], {"a": 1, "b": 2}, 10)
      {'a': 10, 'b': 2}
    """
    old, treedef = flatten(tree)
    markers = unflatten(treedef, [_Marker(i) for i in range(len(old))])
    selected, selected_def = flatten(where(markers))
    if not all(isinstance(item, _Marker) for item in selected):
        raise ValueError("tree.at: `where` must select leaves or subtrees of the tree, unchanged")
    if len({marker.position for marker in selected}) < len(selected):
        raise ValueError("tree.at: `where` selects a leaf twice; which value is meant?")
    new, new_def = flatten(value)
    if new_def != selected_def:
        raise LayoutError.of(
            "",
            "tree.at: the value has another structure than what `where` selects.",
            rows=structure_diff(selected_def, new_def, "value"),
        )
    updates = {marker.position: leaf for marker, leaf in zip(selected, new, strict=True)}
    if isinstance(tree, TreeView):
        return tree.__tree_set__(updates)  # type: ignore[no-any-return]
    return unflatten(treedef, [updates.get(i, leaf) for i, leaf in enumerate(old)])  # type: ignore[no-any-return]


def no_tensors(tree: Any, root: str) -> list[str]:
    """A row of a message for each leaf of a tree that is no tensor."""
    return [
        f"{path_string(path, root)}  expected a tensor   got {type(leaf).__name__}"
        for path, leaf in flatten_with_path(tree)[0]
        if not isinstance(leaf, torch.Tensor)
    ]
