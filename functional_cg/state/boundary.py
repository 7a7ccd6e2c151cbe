"""Convert leaves at the boundary of a step: slots hold a rank's part, the function sees whole leaves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import tree as pytree
from ..errors import LayoutError
from ..shards.collectives import all_gather
from ..shards.mesh import Mesh
from ..shards.placement import Reading
from ..shards.reader import Reader, whole
from ..shards.tensor import Sharded, placed, shard_of
from ..tree import KeyPath, Treedef, path_string
from .arena import BufferSpec, unplaceable
from .leaf import as_tensor

__all__ = [
    "as_number",
    "at_rest",
    "entered",
    "held",
    "left",
    "localized",
    "mesh_of",
    "misfits",
    "reading_of",
    "refuse_meshes",
    "sharding_fix",
    "shown",
]


def mesh_of(specs: Sequence[BufferSpec]) -> Mesh | None:
    """Return the mesh that leaves lie on; None if they lie on none."""
    return next((spec.placement.mesh for spec in specs if spec.placement is not None), None)


def refuse_meshes(named: Iterable[tuple[str, BufferSpec]], function: str = "") -> None:
    """Raise if leaves lie on several meshes.

    Args:
      named: Key paths and specs.
      function: Name of the user's function.
    Raises:
      LayoutError: Naming the first leaf on each mesh.
    """
    firsts: dict[Mesh, str] = {}
    for name, spec in named:
        if spec.placement is not None:
            firsts.setdefault(spec.placement.mesh, name)
    if len(firsts) > 1:
        raise LayoutError.of(
            function,
            f"gets leaves on {len(firsts)} meshes; nothing was changed.",
            rows=[f"{name}  on {mesh}" for mesh, name in firsts.items()],
            why="The collectives of a step run over the ranks of one mesh.",
            fix="make one mesh, once, `mesh = sharding.mesh(...)`, and all states with it; from another mesh, "
            "`sharding.gather(leaf)` is a whole leaf.",
        )


def as_number(value: Any, dtype: torch.dtype) -> Any:
    """Convert as :func:`as_tensor` does, but give a Python float the dtype of a floating slot for it.

    As an operand beside a tensor, a Python number has no precision of its own, and none is lost on the way to f64.
    """
    if isinstance(value, float) and dtype.is_floating_point and dtype.itemsize > 1:
        number = torch.tensor(value, dtype=dtype, device="cpu")
        return number if math.isfinite(value) == bool(number.isfinite()) else as_tensor(value)
    return as_tensor(value)


def misfits(specs: Sequence[BufferSpec], values: Sequence[Any], paths: Sequence[KeyPath]) -> list[str]:
    """Return a line for each value whose shape or dtype is not its slot's; device and sharding may differ."""
    rows = []
    for spec, value, path in zip(specs, values, paths, strict=True):
        problem = unplaceable(value) if spec.placement is None or placed(value) is None else ""
        if not problem and (tuple(value.shape) != spec.logical_shape or value.dtype != spec.dtype):
            problem = str(BufferSpec.of(value))
        if problem:
            rows.append(f"{path_string(path, 'state')}  expected {spec}   got {problem}")
    return rows


def sharding_fix(expected: Sequence[BufferSpec], leaves: Sequence[Any]) -> str:
    """Return the fix for a leaf that misfits its slot only in sharding; an empty string if there is none."""
    for spec, leaf in zip(expected, leaves, strict=True):
        if not isinstance(leaf, Tensor) or leaf.dtype != spec.dtype or placed(leaf) == spec.placement:
            continue
        slot, shape = spec.placement, tuple(leaf.shape)
        if slot is None and shape == spec.shape:
            held = placed(leaf)
            narrow = held is not None and held.reading.param_dtype is not None
            call = f"fcg.sharding.gather(leaf{', masters=True' if narrow else ''})"
            return f"give `{call}`: the old leaf is whole on each rank, and the new one is {BufferSpec.of(leaf)}."
        if (
            slot is not None
            and slot.partial
            and shape != slot.shape
            and shape in ((slot.length,), (slot.elements,))
        ):
            return (
                "give the leaf itself, or all of it, `fcg.sharding.gather(leaf)`: of either, this rank's shard is "
                "taken; what `fcg.sharding.local` gives has lost its shape."
            )
    return ""


def reading_of(specs: Sequence[BufferSpec]) -> Reading:
    """Return how a loss reads the leaves; the first reading that is not the default one stands for all."""
    found = (spec.placement.reading for spec in specs if spec.placement is not None)
    return next((reading for reading in found if reading != Reading()), Reading())


def entered(specs: Sequence[BufferSpec], slots: Sequence[Tensor]) -> list[Tensor]:
    """Return slots as the user's function sees them; a rank's own piece is an ordinary tensor."""
    return [
        slot
        if spec.placement is None or spec.placement.stacked
        else Sharded(slot, replace(spec.placement, at_rest=False))
        for spec, slot in zip(specs, slots, strict=True)
    ]


def at_rest(spec: BufferSpec, leaf: Tensor) -> Tensor:
    """Return a leaf as it appears outside a step, where nothing may start a collective."""
    return leaf if spec.placement is None else Sharded(leaf, replace(spec.placement, at_rest=True))


def left(specs: Sequence[BufferSpec], treedef: Treedef, result: Any) -> Any:
    """Convert a step's result ``(new_state, metrics)`` to what its slots hold: shards or whole leaves.

    What does not fit is left as it is, for the check of the new state to report.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        return result
    metrics = shown(result[1])
    if not any(spec.placement for spec in specs):
        return result[0], metrics
    leaves, found = pytree.flatten(result[0])
    if found != treedef:
        return result[0], metrics
    out = list(leaves)
    for i, (spec, leaf) in enumerate(zip(specs, leaves, strict=True)):
        placement = spec.placement
        if placement is None or not isinstance(leaf, Tensor):
            continue
        if placement.stacked and not isinstance(leaf, Sharded) and tuple(leaf.shape) == spec.shape:
            out[i] = Sharded(whole(leaf), placement)
        elif tuple(leaf.shape) == placement.shape:
            out[i] = Sharded(localized(spec, leaf), placement)
    return pytree.unflatten(treedef, out), metrics


def shown(tree: Any) -> Any:
    """Return metrics, or the result of a read-only function, with all leaves whole.

    Raises:
      LayoutError: If a leaf is sharded.
    """
    flat, treedef = pytree.flatten(tree)
    if not any(isinstance(leaf, (Sharded, Reader)) for leaf in flat):
        return tree
    rows = [
        f"{path_string(path, 'metrics')}  {BufferSpec.of(leaf)}"
        for path, leaf in zip(treedef.paths(), flat, strict=True)
        if isinstance(leaf, Sharded) and leaf.placement.partial
    ]
    if rows:
        raise LayoutError.of(
            "",
            "returns sharded leaves beside the new state.",
            rows=rows,
            why="A rank holds a shard, and what a step returns is whole.",
            fix="`sharding.gather(leaf)` for all of it, `leaf.norm()` for a number; `sharding.local(leaf)` for this "
            "rank's shard.",
        )
    return pytree.unflatten(treedef, [held(whole(leaf)) for leaf in flat])


def held(leaf: Any) -> Any:
    """Return what this rank holds of a leaf: for a leaf on a mesh, its local tensor."""
    return leaf.local if isinstance(leaf, Sharded) else leaf


def localized(spec: BufferSpec, leaf: Any) -> Any:
    """Return this rank's part of a new value for a slot; a whole value must be the same on all ranks.

    A value of another shape is left as it is, for the check that follows to report.
    """
    placement = spec.placement
    if placement is None or not isinstance(leaf, Tensor) or tuple(leaf.shape) != placement.shape:
        return leaf
    leaf = whole(leaf)
    if not isinstance(leaf, Sharded) or not leaf.placement.partial:
        return placement.own(held(leaf)) if placement.partial else held(leaf)
    if placement.sharded or not leaf.placement.sharded:
        return shard_of(leaf, placement) if placement.partial else held(leaf)
    if not placement.here:
        return leaf.local
    full = leaf.placement.unpad(all_gather(leaf.local, placement.mesh.shards))
    return placement.own(full) if placement.partial else full
