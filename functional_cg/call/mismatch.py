"""Describe how a call's inputs differ from those of a capture, and how to fix it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import torch

from .. import tree as pytree
from ..pytree.sameness import same
from ..pytree.treedef import order_diff
from ..state.arena import BufferSpec
from ..tree import Treedef
from .inputs import InputLayout
from .signature import Call

__all__ = ["alike", "layout_differences", "layout_fix", "order_differences", "states_fix"]


def _differing(expected: InputLayout, got: InputLayout) -> list[tuple[str, Any, Any]]:
    """Return (name, expected, got) for each leaf that differs between two layouts of one structure."""
    leaves = zip(expected.names, expected.leaves, got.leaves, strict=True)
    return [(name, want, have) for name, want, have in leaves if not _fits(want, have)]


def _fits(want: Any, have: Any) -> bool:
    if isinstance(want, BufferSpec) and isinstance(have, BufferSpec):
        return want.same_layout(have)
    return same(want, have)


def alike(expected: InputLayout, got: InputLayout) -> bool:
    """Whether two layouts differ in the order of keys at most."""
    return expected.treedef == got.treedef and not _differing(expected, got)


def layout_differences(expected: InputLayout, got: InputLayout) -> list[str]:
    """Return all differences between two layouts, one line each."""
    if expected.treedef == got.treedef:
        found = _differing(expected, got)
        return [f"{name}  expected {_shown(want)}   got {_shown(have)}" for name, want, have in found]
    want, have = (dict(zip(one.names, map(_shown, one.leaves), strict=True)) for one in (expected, got))
    before, now = expected.arguments, got.arguments
    return _only_in_one(want, have) or _only_in_one(
        dict.fromkeys(before, "an argument"), dict.fromkeys(now, "an argument")
    ) + [row for n in before if n in now for row in pytree.structure_diff(before[n], now[n], n)]


def _only_in_one(want: Mapping[str, str], have: Mapping[str, str]) -> list[str]:
    return [
        f"{n}  expected {want.get(n, 'nothing')}   got {have.get(n, 'nothing')}"
        for n in dict.fromkeys((*want, *have))
        if (n in want) is not (n in have)
    ]


def order_differences(expected: Call, got: Call) -> list[str]:
    """Return where two calls that do not differ otherwise have keys in another order, one line each."""
    want, have = (one.layout.arguments | {s.name: s.node for s in one.states} for one in (expected, got))
    rows = [row for name in want for row in order_diff(want[name], have[name], name)]
    if expected.layout.extras != got.layout.extras:
        orders = (", ".join(one.layout.extras) for one in (expected, got))
        rows.append("arguments by name  expected {}   got {}".format(*orders))
    return rows


def _shown(leaf: Any) -> str:
    return str(leaf) if isinstance(leaf, BufferSpec) else f"{type(leaf).__name__} {leaf!r}"


def layout_fix(expected: InputLayout, got: InputLayout, more: str) -> str:
    """Return the fix for the first kind of difference: structure, then objects, dtypes, shapes.

    Args:
      expected: Layout of a capture.
      got: Another layout.
      more: The option that allows one more capture, as the user writes it.
    """
    if expected.treedef != got.treedef:
        return _structure_fix("", expected.arguments, got.arguments, more)
    pairs = _differing(expected, got)
    if not pairs:
        return (
            "give the keys that order, as in `{key: batch[key] for key in order}`, since the function does otherwise "
            f"in this one; to pay for one more graph, use {more}."
        )
    for name, want, have in pairs:
        if not isinstance(want, BufferSpec) or not isinstance(have, BufferSpec):
            return _object_fix(name, have)
    for name, want, have in pairs:
        if want.dtype != have.dtype:
            return _dtype_fix(name, want, have)
    if all(want.shape and want.shape[1:] == have.shape[1:] and have.shape for _, want, have in pairs):
        return f"pad the last batch or drop it; to pay for one more graph, use {more}."
    return f"give `{pairs[0][0]}` the shape that it had; to pay for one more graph, use {more}."


def states_fix(states: Mapping[str, Treedef], expected: InputLayout, call: Call) -> str:
    """Return the fix for a call with states in other places.

    Args:
      states: Structure of each state of a capture, by the argument's name.
      expected: Layout of its other arguments.
      call: Another call.
    """
    given = {state.name for state in call.states}
    for name, node in states.items():
        if name not in given and call.layout.arguments.get(name) == node:
            return f"`{name}` is a plain tree, such as `fcg.snapshot` returns: make it a state, `fcg.place({name})`."
    named = " and ".join(f"`{name}`" for name in states) or "no argument"
    whole = f"{call.function}({', '.join([*states, *expected.arguments])})"
    first = f"pass a state as {named}, as in the first call, and nowhere else"
    return f"{first}: check the order of the arguments, `{whole}`."


def _object_fix(name: str, value: Any) -> str:
    if (
        isinstance(value, str | bytes)
        and name.endswith("]")
        and name.rstrip("]").rpartition("[")[2].isdigit()
    ):
        column = name.rpartition("[")[0]
        return f"leave `{column}` out, for text would need a graph for each value; or encode it as numbers."
    if name.isidentifier():
        return f'name it, `static_argnames=("{name}",)`: each value then has a graph of its own.'
    return (
        f"make `{name}` an argument of its own and name it in `static_argnames`: each value then has a graph of its "
        "own; what is a number or a tensor stays one."
    )


def _dtype_fix(name: str, want: BufferSpec, have: BufferSpec) -> str:
    number = {torch.float32: "float", torch.int64: "int", torch.bool: "bool"}.get(want.dtype)
    if want.shape == have.shape == () and have.dtype.is_floating_point and not want.dtype.is_floating_point:
        return f"pass `float({name})` from the first call on: the capture was made with a whole number."
    if number and want.shape == have.shape == ():
        return f"pass `{number}({name})`."
    return f"convert it, `{name}.to({want.dtype})`, or `.astype(...)` where it is an array of numpy."


def _structure_fix(place: str, want: Mapping[str, Treedef], have: Mapping[str, Treedef], more: str) -> str:
    """Return the fix for the first difference in structure, among arguments or the children of one node."""
    missing, extra = [n for n in want if n not in have], [n for n in have if n not in want]
    for name in extra:
        meant = next((n for n in missing if difflib.get_close_matches(name.lower(), [n.lower()])), None)
        if meant is not None:
            return f"did you mean `{place}{meant}` by `{place}{name}`?"
    if extra and not missing:
        return f"leave `{place}{extra[0]}` out; to pay for one more graph, use {more}."
    if missing:
        return f"pass `{place}{missing[0]}` as before; to pay for one more graph, use {more}."
    for name, node in want.items():
        if node.kind is not have[name].kind:
            return f"pass {_kind(node)} as `{place}{name}`; to pay for one more graph, use {more}."
        if node != have[name]:
            return _structure_fix(f"{place}{name}", _children(node), _children(have[name]), more)
    return f"give `{place}` the static fields that it had; to pay for one more graph, use {more}."


def _children(node: Treedef) -> dict[str, Treedef]:
    return {str(key): child for key, child in zip(node.keys, node.children, strict=True)}


def _kind(node: Treedef) -> str:
    if node.is_leaf:
        return "a tensor"
    return "None" if node.kind is type(None) or node.kind is None else f"a {node.kind.__name__}"
