"""What ``fcg.tree`` exports: flattening, mapping and replacing; :mod:`functional_cg.tree` says what a pytree is."""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as torch_pytree

from ..errors import LayoutError
from ..manual import Documented
from .nodes import registered_node
from .treedef import LEAF, KeyPath, Names, Treedef, path_string, structure_diff

T = TypeVar("T")

_MAPPINGS = (dict, OrderedDict, defaultdict)
_MAX_DEPTH = 100  # far below Python's recursion limit; a deeper tree is assumed to contain itself


class TreeView(metaclass=Documented):
    """An object that stands for a pytree stored elsewhere; a state handle is one."""

    __slots__ = ()

    @abstractmethod
    def __tree__(self) -> Any:
        """Return the pytree, built of leaves."""

    @abstractmethod
    def __tree_set__(self, updates: dict[int, Any]) -> Any:
        """Return a view with the leaves at the given flat positions replaced."""


def static_values(treedef: Treedef) -> list[Any]:
    """Return the values of the static fields of all registered dataclasses in a structure."""
    own = list(treedef.context) if isinstance(treedef.context, tuple) else []  # of a dataclass
    return [*own, *(value for child in treedef.children for value in static_values(child))]


@dataclass(frozen=True, slots=True)
class _Node:
    context: Any
    keys: tuple[Any, ...]
    children: Sequence[Any]


def _sorted_keys(mapping: Any) -> list[Any]:
    try:
        return sorted(mapping)
    except TypeError:  # keys of different types have no order
        return sorted(mapping, key=lambda key: (type(key).__name__, repr(key)))


def opened(tree: Any) -> _Node | None:
    """Return one level of a tree; None for a leaf."""
    kind = type(tree)
    if tree is None:
        return _Node(None, (), ())
    if kind in _MAPPINGS:
        names = _sorted_keys(tree)
        factory = tree.default_factory if kind is defaultdict else None
        return _Node(
            Names(factory, tuple(names), tuple(tree)),
            tuple(torch_pytree.MappingKey(name) for name in names),
            [tree[name] for name in names],
        )
    if kind is list or kind is tuple:
        return _Node(None, tuple(torch_pytree.SequenceKey(i) for i in range(len(tree))), tree)
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return _Node(None, tuple(torch_pytree.GetAttrKey(name) for name in kind._fields), tree)
    registered = registered_node(kind)
    if registered is None or kind is torch.Size:  # a shape is one value; torch would rebuild it as a tuple
        return None
    children, context = registered.flatten_fn(tree)
    keyed = registered.flatten_with_keys_fn
    keys = (
        tuple(key for key, _ in keyed(tree)[0])
        if keyed is not None
        else tuple(torch_pytree.SequenceKey(i) for i in range(len(children)))
    )
    return _Node(context, keys, children)


def _flatten_into(tree: Any, out: list[Any], path: list[Any]) -> Treedef:
    if isinstance(tree, TreeView):
        tree = tree.__tree__()
    node = opened(tree)
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
    """Return the leaves of a pytree, in flat order."""
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
    registered = registered_node(kind)
    assert registered is not None
    return registered.unflatten_fn(children, treedef.context)


def unflatten(treedef: Treedef, leaves: Iterable[Any]) -> Any:
    """Rebuild a pytree from its treedef and its leaves.

    Raises:
      ValueError: If the number of leaves does not match the treedef.
    """
    flat = list(leaves)
    if len(flat) != treedef.num_leaves:
        raise ValueError(
            f"unflatten: the treedef has {treedef.num_leaves} leaves, got {len(flat)}.\n"
            "To fix: a new leaf for each old one, in their order; to change some of them, `fcg.tree.map(fn, tree)`."
        )
    return _built(treedef, iter(flat))


def _built(treedef: Treedef, leaves: Iterator[Any]) -> Any:
    # Not a recursive inner function: its reference cycle would keep the leaves until the next collection.
    if treedef.is_leaf:
        return next(leaves)
    return node_unflatten(treedef, [_built(child, leaves) for child in treedef.children])


def map(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Apply ``function`` to the leaves of one or several trees of the same structure.

    Raises:
      LayoutError: If the trees differ in structure; it lists the first five differences.

    Example:
      >>> from functional_cg import tree
      >>> tree.map(lambda a, b: a + b, {"x": 1, "y": 2}, {"x": 10, "y": 20})
      {'x': 11, 'y': 22}
    """
    return _mapped("map", "give each tree the structure of the first one.", function, [tree, *rest])


def _mapped(name: str, fix: str, function: Callable[..., Any], trees: Sequence[Any]) -> Any:
    first, treedef = flatten(trees[0])
    others = []
    for other in trees[1:]:
        flat, other_def = flatten(other)
        if other_def != treedef:
            raise LayoutError.of(
                "",
                f"tree.{name}: the trees differ in structure.",
                rows=structure_diff(treedef, other_def, "tree"),
                fix=fix
                if type(None) not in (treedef.kind, other_def.kind)
                else "a tree is None: `state.grads`, for one, is there with `TrainState.create(accumulate=True)`.",
            )
        others.append(flat)
    return unflatten(treedef, [function(*group) for group in zip(first, *others, strict=True)])


def stack(trees: Iterable[Any]) -> Any:
    """Stack trees of one structure, leaf by leaf: states of single models become one of all, for a sweep.

    Args:
      trees: Pytrees of tensors of the same shapes and dtypes.
    Returns:
      A plain pytree of new tensors [n, ...].
    Raises:
      ValueError: If there is no tree.
      LayoutError: If the trees differ in structure, which includes static fields such as an optimizer, or leaves in
        shape or dtype.

    Example:
      >>> import torch
      >>> from functional_cg import tree
      >>> tree.stack([{"w": torch.zeros(2)}, {"w": torch.ones(2)}])
      {'w': tensor([[0., 0.],
              [1., 1.]])}
    """
    trees = list(trees)
    if not trees:
        raise ValueError("tree.stack: there is no tree to stack.")
    fix = (
        "create all of them with one optimizer; then give each its own numbers, "
        "`fcg.optim.set_hyperparams(state, learning_rate=torch.tensor([0.1, 0.01]))`."
    )
    names = [path_string(path, "tree") for path in flatten(trees[0])[1].paths()]
    rest = iter(names)
    return _mapped("stack", fix, lambda *leaves: _stacked(next(rest), leaves), trees)


def _stacked(name: str, leaves: Sequence[Any]) -> torch.Tensor:
    layouts = {_layout(leaf): n for n, leaf in reversed([*enumerate(leaves)])}
    if len(layouts) > 1:
        rows = [f"{name}  of tree {n}  {layout}" for layout, n in layouts.items()]
        raise LayoutError.of(
            "", "tree.stack: the trees have leaves of different shapes or dtypes.", rows=rows[::-1],
            why="All members of a stack have one layout.",
            fix="make each with the same sizes; what differs in size belongs in another stack.",
        )  # fmt: skip
    if not isinstance(leaves[0], torch.Tensor):
        raise LayoutError.of(
            "", "tree.stack: a leaf is no tensor.", rows=[f"{name}  {type(leaves[0]).__name__}"],
            fix="make it a tensor, `torch.tensor(0.1)`.",
        )  # fmt: skip
    return torch.stack(leaves)  # type: ignore[arg-type]


def _layout(leaf: Any) -> str:
    return f"{leaf.dtype} {list(leaf.shape)}" if isinstance(leaf, torch.Tensor) else type(leaf).__name__


def take(tree: Any, index: int | Sequence[int] | Sequence[bool] | torch.Tensor) -> Any:
    """Select from the first dimension of each leaf: a member of a stack, or some of its members in a new order.

    Args:
      tree: A pytree of tensors [n, ...], such as the state of a sweep.
      index: Number of a member, negative from the end; or several numbers, a sequence or i64[k]; or bool[n], true for
        each member to keep.
    Returns:
      A plain pytree of new tensors: [...] for one number, [k, ...] for several.
    Raises:
      IndexError: If there is no such member, or a leaf has no dimensions.
      TypeError: If ``index`` is something else.

    Example:
      >>> import torch
      >>> from functional_cg import tree
      >>> state = {"w": torch.tensor([1.0, 2.0, 3.0])}
      >>> tree.take(state, 1), tree.take(state, [2, 0])
      ({'w': tensor(2.)}, {'w': tensor([3., 1.])})
      >>> tree.take(state, state["w"] > 1.5)
      {'w': tensor([2., 3.])}
    """
    numbers = torch.as_tensor(index)
    is_mask = numbers.dtype is torch.bool
    if is_mask != (is_mask and numbers.dim() == 1) or (_is_fractional(numbers) and numbers.numel()):
        raise TypeError(
            f"tree.take: expected the number of a member, several numbers, or bool[n], got {numbers.dtype} "
            f"{list(numbers.shape)}.\nTo fix: `tree.take(state, 3)`, `tree.take(state, [3, 0])`, or "
            "`tree.take(state, losses.isfinite())`."
        )
    chosen = numbers.nonzero()[:, 0] if is_mask else numbers.long()
    asked = (
        [] if isinstance(index, torch.Tensor) else chosen.view(-1).tolist()
    )  # of a tensor, torch checks the values

    def taken(leaf: torch.Tensor) -> torch.Tensor:
        if not leaf.dim():
            raise IndexError("tree.take: a leaf has no dimensions, so this is no tree of several members.")
        count = len(leaf)
        if (is_mask and len(numbers) != count) or not all(-count <= one < count for one in asked):
            what = f"bool[{len(numbers)}]" if is_mask else str(index)
            raise IndexError(f"tree.take: there are {count} members, got {what}.")
        return leaf[chosen.to(leaf.device)].clone()

    return map(taken, tree)


def _is_fractional(numbers: torch.Tensor) -> bool:
    return numbers.is_floating_point() or numbers.is_complex()


class _Marker:
    """Stands for one leaf while ``at`` finds what ``where`` selects."""

    __slots__ = ("position",)

    def __init__(self, position: int) -> None:
        self.position = position


def at(where: Callable[[T], Any], tree: T, value: Any) -> T:
    """Replace what ``where`` selects, functionally.

    On a plain tree this copies the structure. On a state handle it writes the value into the same memory and
    donates the old handle.

    Args:
      where: Selects one leaf, a subtree, or a tuple or list of those: ``lambda s: s.params["w"]``.
      tree: The pytree or state handle.
      value: New value, with the structure of what ``where`` selects.
    Returns:
      The tree with the new value.
    Raises:
      LayoutError: If ``value`` and the selection differ in structure.
      ValueError: If ``where`` selects something that is not in the tree, or a leaf twice.

    Example:
      >>> from functional_cg import tree
      >>> tree.at(lambda t: t["a"], {"a": 1, "b": 2}, 10)
      {'a': 10, 'b': 2}
    """
    old, treedef = flatten(tree)
    markers = unflatten(treedef, [_Marker(i) for i in range(len(old))])
    selected, selected_def = flatten(where(markers))
    if not all(isinstance(item, _Marker) for item in selected):
        raise ValueError(
            "tree.at: `where` must select leaves or subtrees of the tree, unchanged.\n"
            "To fix: `lambda tree: tree.a` selects; the new value is the last argument, `tree.at(where, tree, value)`."
        )
    if len({marker.position for marker in selected}) < len(selected):
        raise ValueError(
            "tree.at: `where` selects a leaf twice, which would have two new values.\n"
            "To fix: select each leaf once, `lambda tree: (tree.a, tree.b)`, with a value for each, `(1, 2)`."
        )
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
    """Return a message row for each leaf of a tree that is not a tensor."""
    return [
        f"{path_string(path, root)}  expected a tensor   got {type(leaf).__name__}"
        for path, leaf in flatten_with_path(tree)[0]
        if not isinstance(leaf, torch.Tensor)
    ]
