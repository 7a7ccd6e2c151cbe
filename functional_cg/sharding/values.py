"""What a user asks of sharded leaves and of values that differ between ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor

from .. import random
from .. import tree as pytree
from ..checkpoint import names_of
from ..leaf import owned
from ..shards.collectives import all_reduce
from ..shards.mesh import Mesh
from ..shards.reader import gathered, whole
from ..shards.tensor import Sharded
from ..surroundings import current_mesh, inside_a_step

__all__ = ["fold_in", "gather", "local", "mean", "state_dict", "sum"]

T = TypeVar("T")


def mean(tree: T) -> T:
    """The mean over all ranks of each leaf, in a step; without a mesh, the leaves themselves.

    Gradients flow through it: the mean of the ranks' losses has the gradient that ``value_and_grad`` takes of one.

    Args:
      tree: Pytree of floating tensors, of equal shapes on all ranks.

    Example:
      >>> import torch, functional_cg as fcg
      >>> step = fcg.graph_step(lambda state, x: (state, {"loss": fcg.sharding.mean(x.sum())}))
      >>> state, metrics = step({"n": torch.zeros(())}, torch.ones(3))
      >>> metrics["loss"].item()
      3.0
    """
    return _reduced(tree, "mean")


def sum(tree: T) -> T:  # the field's name for it; used as `sharding.sum`
    """The sum over all ranks of each leaf, in a step; without a mesh, the leaves themselves."""
    return _reduced(tree, "sum")


def fold_in(key: Tensor) -> Tensor:
    """A key of this rank's own, in a step: ranks that share ``state.key`` draw differently. Without a mesh, ``key``.

    Args:
      key: i64[2].
    """
    mesh = current_mesh()
    if mesh is None or mesh.size == 1:
        return key
    # The rank enters as a value, so that all ranks run one program.
    return random.fold_in(key, torch.tensor(mesh.rank, device="cpu").to(key.device))


def gather(tree: T) -> T:
    """Whole leaves in place of sharded ones; all ranks call it. Without a mesh, the tree itself.

    In a step each leaf is gathered where it is read. Outside it is gathered at once, into memory of the caller's.

    Args:
      tree: Pytree, or a single leaf.

    Example:
      >>> import torch, functional_cg as fcg
      >>> fcg.sharding.gather({"w": torch.ones(2)})
      {'w': tensor([1., 1.])}
    """
    flat, treedef = pytree.flatten(tree)
    if not any(isinstance(leaf, Sharded) for leaf in flat):
        return tree
    with torch.no_grad():
        out = gathered(flat)
        if not inside_a_step():
            out = [owned(whole(leaf)).clone() for leaf in out]
    return cast("T", pytree.unflatten(treedef, out))


def local(leaf: Tensor) -> Tensor:
    """This rank's elements of a leaf: a vector of the shard's length; a leaf on no mesh, as it is.

    Outside of a step the padding is cut off; the last ranks of a small leaf have fewer elements, or none.
    """
    if not isinstance(leaf, Sharded):
        return owned(leaf)  # type: ignore[no-any-return]
    placement, held = leaf.placement, owned(leaf.local)
    if not placement.sharded or inside_a_step():
        return cast("Tensor", held if not placement.sharded else placement.masked(held))
    start = placement.mesh.shards.rank * placement.length
    return held[: max(0, min(placement.length, placement.numel - start))].clone()  # type: ignore[no-any-return]


def state_dict(state: Any) -> Mapping[str, Tensor]:
    """All leaves of a sharded state, whole, in the host memory of rank 0; an empty dict on the other ranks.

    Collective: all ranks call it. Leaf by leaf, so that no rank holds more than one whole leaf beside its shards. Names
    are those of ``fcg.state_dict``, and ``fcg.load_state_dict`` takes them on any number of ranks.

    Args:
      state: A handle, or a pytree of tensors.
    """
    flat, treedef = pytree.flatten(state)
    out: dict[str, Tensor] = {}
    for name, leaf in zip(names_of(treedef), flat, strict=True):
        full = _once(leaf) if isinstance(leaf, Sharded) else owned(leaf)
        if not isinstance(leaf, Sharded) or leaf.placement.mesh.rank == 0:
            out[name] = full.detach().to("cpu", copy=True)
    mesh = next((leaf.placement.mesh for leaf in flat if isinstance(leaf, Sharded)), None)
    return out if mesh is None or mesh.rank == 0 else {}


def _once(leaf: Sharded) -> Tensor:
    """A leaf gathered by itself, in its own dtype."""
    bare = Sharded(leaf.local, leaf.placement.without_reading())
    with torch.no_grad():
        return whole(gathered([bare])[0])


class _AllReduce(torch.autograd.Function):
    """A reduction over ranks. Each rank's loss counts as its own: what they average is the transposed reduction."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, mesh: Mesh, op: str) -> Tensor:
        ctx.mesh, ctx.op = mesh, op
        total = all_reduce(value, mesh)
        return total / mesh.size if op == "mean" else total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _AllReduce.apply(grad, ctx.mesh, ctx.op), None, None


def _reduced(tree: T, op: Literal["mean", "sum"]) -> T:
    mesh = current_mesh()
    if mesh is None or mesh.size == 1:
        return tree
    return cast("T", pytree.map(lambda leaf: _AllReduce.apply(leaf, mesh, op), tree))
