"""Ravel a tree into one vector, in the index space of an arena's role.

``ravel`` lays leaves out as the arena does, including padding (zeros), so a role such as ``params``, its
gradient and a bucket of a collective share one index space. A step that ravels a whole role of its state
reads the slab itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import tree as pytree
from ..errors import LayoutError
from ..tree import path_string, structure_diff
from .arena import BufferSpec, offsets

__all__ = ["ravel", "unravel"]

# The registration lives as long as this module.
_library = torch.library.Library("fcg", "FRAGMENT")
_library.define("ravel(Tensor[] leaves, int[] offsets, int length) -> Tensor")


def _ravel(leaves: Sequence[Tensor], offsets: Sequence[int], length: int) -> Tensor:
    out = torch.zeros(length, dtype=leaves[0].dtype, device=leaves[0].device)
    places = [
        torch.as_strided(out, leaf.shape, leaf.stride(), at) for leaf, at in zip(leaves, offsets, strict=True)
    ]
    torch._foreach_copy_(places, list(leaves))
    return out


def _ravel_fake(leaves: Sequence[Tensor], offsets: Sequence[int], length: int) -> Tensor:
    return leaves[0].new_empty(length)


def _keep_layout(ctx: Any, inputs: Any, output: Tensor) -> None:
    leaves, ctx.offsets, _ = inputs
    ctx.layouts = [(leaf.shape, leaf.stride()) for leaf in leaves]


def _ravel_backward(ctx: Any, grad: Tensor) -> tuple[list[Tensor], None, None]:
    grad = grad.contiguous()
    start, places = int(grad.storage_offset()), zip(ctx.layouts, ctx.offsets, strict=True)
    leaves = [torch.as_strided(grad, shape, stride, start + at) for (shape, stride), at in places]
    return leaves, None, None


_library.impl("ravel", _ravel, "CompositeExplicitAutograd")
_library._register_fake("ravel", _ravel_fake)
torch.library.register_autograd("fcg::ravel", _ravel_backward, setup_context=_keep_layout, lib=_library)


def ravel(tree: Any, like: Any = None) -> Tensor:
    """Copy the leaves of a tree into one vector, in the arena's layout.

    Args:
      tree: Pytree of tensors of one dtype and device, at least one.
      like: Tree of the same structure, shapes and dtypes, whose strides the vector follows; by default
        ``tree``.
    Returns:
      A vector [length] of all leaves, with zeros as padding.
    Raises:
      LayoutError: If the tree has no leaves, if leaves are sharded or differ in dtype or device, or if the
        structure, a shape or a dtype is not that of ``like``.

    Example:
      >>> import torch
      >>> from functional_cg.state.flat import ravel
      >>> ravel({"a": torch.ones(2), "b": torch.ones(1)}).tolist()
      [1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    """
    leaves, treedef = pytree.flatten(tree)
    models, expected = (leaves, treedef) if like is None else pytree.flatten(like)
    if expected != treedef:
        raise LayoutError.of(
            "",
            "ravel: the trees have different structures.",
            rows=structure_diff(expected, treedef),
            fix="pass a tree of the structure of `like`.",
        )
    specs, places, length = _layout(treedef, models)
    rows = [
        f"{path_string(path, 'tree')}  expected {spec}   got {BufferSpec.of(leaf)}"
        for path, spec, leaf in zip(treedef.paths(), specs, leaves, strict=True)
        if tuple(leaf.shape) != spec.shape or leaf.dtype != spec.dtype
    ]
    if rows:
        raise LayoutError.of("", "ravel: the tree is unlike `like`.", rows=rows)
    ordered = [_in_strides(leaf, spec.stride) for leaf, spec in zip(leaves, specs, strict=True)]
    return torch.ops.fcg.ravel(ordered, places, length)  # type: ignore[no-any-return]


def unravel(like: Any, vector: Tensor) -> Any:
    """Return views of a vector, as a tree with the structure, shapes and strides of ``like``.

    Example:
      >>> import torch
      >>> from functional_cg.state.flat import ravel, unravel
      >>> tree = {"a": torch.ones(2), "b": torch.zeros(1)}
      >>> unravel(tree, ravel(tree))
      {'a': tensor([1., 1.]), 'b': tensor([0.])}
    """
    leaves, treedef = pytree.flatten(like)
    specs, places, length = _layout(treedef, leaves)
    if tuple(vector.shape) != (length,):
        raise LayoutError.of(
            "",
            "unravel: the vector has another length than the tree.",
            rows=[f"vector  expected [{length}]   got {BufferSpec.of(vector)}"],
            fix="pass a vector made by `ravel` of the same tree.",
        )
    vector = vector.contiguous()
    start = int(vector.storage_offset())
    views = [
        torch.as_strided(vector, s.shape, s.stride, start + at) for s, at in zip(specs, places, strict=True)
    ]
    return pytree.unflatten(treedef, views)


def _in_strides(leaf: Tensor, stride: tuple[int, ...]) -> Tensor:
    if leaf.stride() == stride:
        return leaf
    return torch.empty_strided(leaf.shape, stride, dtype=leaf.dtype, device=leaf.device).copy_(leaf)


def _layout(
    treedef: pytree.Treedef, leaves: Sequence[Tensor]
) -> tuple[Sequence[BufferSpec], Sequence[int], int]:
    """Return the specs of leaves, their places in one vector, and its length."""
    if not leaves:
        raise LayoutError.of(
            "", "ravel: the tree has no leaves.", fix="pass a tree with at least one tensor."
        )
    specs = [BufferSpec.of(leaf) for leaf in leaves]
    wanted = specs[0]
    rows = [
        f"{path_string(path, 'tree')}  expected {wanted.dtype} on {wanted.device}, whole   got {spec}"
        for path, spec in zip(treedef.paths(), specs, strict=True)
        if (spec.dtype, spec.device) != (wanted.dtype, wanted.device)
        or (spec.placement is not None and spec.placement.partial)
    ]
    if rows:
        raise LayoutError.of(
            "",
            "ravel: the leaves do not fit in one vector.",
            rows=rows,
            why="A vector has one dtype and one device, and a rank holds no more than pieces of sharded leaves.",
            fix="ravel the leaves of each dtype on their own, with `fcg.optim.partition` for an optimizer; of shards, "
            "leave out `optim.flatten`: each rank updates its own only.",
        )
    return specs, *offsets(specs)
