"""Refuse a new state that does not fit the slots of the old one, and say what was probably meant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...errors import LayoutError
from ...state.arena import BufferSpec
from ...state.boundary import sharding_fix
from ...tree import Treedef, path_string, structure_diff

__all__ = ["refuse_new_state"]


def refuse_new_state(
    function: str, old_def: Treedef, old: Sequence[BufferSpec], new_def: Treedef, new: Sequence[Any]
) -> None:
    """Raise if the new state differs from the old one in structure, shape, dtype or device.

    Raises:
      LayoutError: Listing all differences.
    """
    rows = structure_diff(old_def, new_def, "state")
    if not rows:
        for path, spec, leaf in zip(old_def.paths(), old, new, strict=True):
            got = BufferSpec.of(leaf) if isinstance(leaf, Tensor) else None
            if got is None or not spec.same_layout(got):
                rows.append(
                    f"{path_string(path, 'state')}  expected {spec}   got {got or type(leaf).__name__}"
                )
    if rows:
        raise LayoutError.of(
            function,
            "returns a new state that is unlike the old one.",
            rows=rows,
            why="The new state is written into the slots of the old one.",
            fix=(sharding_fix(old, new) if old_def == new_def else _structure_fix(old_def, new_def))
            or _dtype_fix(old_def, old, new_def, new)
            or "return each leaf with its old shape, dtype and device; results of another kind belong in `metrics`.",
        )


def _structure_fix(old: Treedef, new: Treedef) -> str:
    if new.is_leaf and not old.is_leaf:
        return "the state comes first, `return state, metrics`."
    part = next((str(key) for key, child in zip(old.keys, old.children, strict=True) if child == new), "")
    if part:
        name = part.strip(".[]'")
        return f"return the whole state, `state.replace({name}=...)`."
    more = [str(key) for key in new.keys if key not in old.keys] if new.kind is old.kind else []
    return (
        f"`state{more[0]}` has to be there before the first call; or return it in `metrics`." if more else ""
    )


def _dtype_fix(old_def: Treedef, old: Sequence[BufferSpec], new_def: Treedef, new: Sequence[Any]) -> str:
    if old_def != new_def:
        return ""
    for path, spec, leaf in zip(old_def.paths(), old, new, strict=True):
        if not isinstance(leaf, Tensor):
            name = path_string(path, "state")
            return f"return a tensor as `{name}`, computed from the old one, such as `{name} + 1`."
        if leaf.dtype != spec.dtype and leaf.shape == spec.shape:
            name = path_string(path, "state")
            return (
                f"begin with it in {leaf.dtype}, before the first call; or return `.to({spec.dtype})` as `{name}`; "
                "results of another kind belong in `metrics`."
            )
    return ""
