"""Checks gradients against parameters, converts their dtypes, and handles parameters without a gradient."""

from __future__ import annotations

from typing import Any

from torch import Tensor, zeros_like

from functional_cg import tree
from functional_cg.errors import LayoutError


def refuse_unlike(params: Any, grads: Any) -> None:
    """Raise for gradients that do not match the parameters: fused kernels walk raw memory unchecked.

    Raises:
      LayoutError: If ``grads`` differs in structure, shapes or dtypes; two different floating dtypes are fine. Lists
        all differences.
    """

    def unlike(p: Tensor, g: Any) -> bool:
        if not isinstance(g, Tensor):
            return True
        converts = p.is_floating_point() and g.is_floating_point()
        return p.shape != g.shape or (p.dtype != g.dtype and not converts)

    flat, treedef = tree.flatten_with_path(params)
    values, other = tree.flatten(grads)
    rows = (tree.structure_diff(treedef, other, "grads") if other != treedef else []) or [
        f"{tree.path_string(path, 'grads')}  expected {p.dtype} {list(p.shape)}   got "
        + (f"{g.dtype} {list(g.shape)}" if isinstance(g, Tensor) else repr(g))
        for (path, p), g in zip(flat, values, strict=True)
        if unlike(p, g)
    ]
    if rows:
        raise LayoutError.of(
            "",
            "optim: the gradients are unlike the parameters.",
            rows=rows,
            why="Each parameter has one gradient, of its shape.",
            fix=_fix(treedef, other),
        )


def _fix(params: tree.Treedef, grads: tree.Treedef) -> str:
    if params == grads:
        return "give each gradient the shape of its parameter, as `fcg.value_and_grad` does."
    missing = [key for key in params.keys if key not in grads.keys]
    if params.kind is grads.kind and missing and len(missing) < len(params.keys):
        name = str(missing[0]).strip("[]")
        return f"None leaves a parameter as it is: `state.apply_gradients({{**grads, {name}: None}})`."
    made = "`loss, grads = fcg.value_and_grad(loss_fn)(state.params)`"
    return f"{made}, value first, then `state.apply_gradients(grads)`."


def left_out(params: Any, grads: Any) -> set[int]:
    """Flat positions of parameters whose gradient, or a subtree containing it, is None."""
    found: set[int] = set()

    def walk(p: tree.Treedef, g: tree.Treedef, start: int) -> None:
        if g.kind is type(None):
            found.update(range(start, start + p.num_leaves))
        elif p.kind is g.kind and p.keys == g.keys:
            for ours, theirs in zip(p.children, g.children, strict=True):
                walk(ours, theirs, start)
                start += ours.num_leaves

    walk(tree.flatten(params)[1], tree.flatten(grads)[1], 0)
    return found


def filled(params: Any, grads: Any, positions: set[int]) -> Any:
    """Fill in zeros for missing gradients."""
    flat, treedef = tree.flatten(params)
    given = iter(tree.leaves(grads))
    values = [zeros_like(p) if i in positions else next(given, None) for i, p in enumerate(flat)]
    return grads if next(given, None) is not None else tree.unflatten(treedef, values)


def owners_by_path(state: Any, params: Any) -> list[int | None]:
    """For each leaf of an optimizer state, the flat position of its parameter, or None if it has none.

    A leaf belongs to the parameter whose key path is a suffix of its own, the longest if there are several.
    """
    paths = tree.flatten(params)[1].paths()
    out = []
    for path, _ in tree.flatten_with_path(state)[0]:
        owners = [i for i, name in enumerate(paths) if path[len(path) - len(name) :] == name]
        out.append(max(owners, key=lambda i: len(paths[i]), default=None))
    return out


def hidden(flags: list[bool], state: Any) -> Any:
    """Zero the leaves whose flag is True: nothing computed from them is used."""
    flat, treedef = tree.flatten(state)
    return tree.unflatten(
        treedef, [zeros_like(leaf) if hide else leaf for leaf, hide in zip(flat, flags, strict=True)]
    )


def kept(flags: list[bool], old: Any, new: Any) -> Any:
    """The new tree, except that leaves whose flag is True keep their old value."""
    rows = zip(tree.leaves(old), tree.leaves(new), flags, strict=True)
    return tree.unflatten(tree.flatten(new)[1], [a if keep else b for a, b, keep in rows])


def in_dtypes_of(params: Any, grads: Any) -> Any:
    """Cast gradients to the parameter dtypes: moments in a narrower dtype would lose small values."""
    return tree.map(lambda p, g: g.to(p.dtype), params, grads)
