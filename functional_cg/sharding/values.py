"""User functions for sharded leaves, and for values that differ between ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from .. import random
from .. import tree as pytree
from ..ambient.setting import current_mesh, inside_a_step
from ..checkpoint import names_of
from ..errors import CaptureError, LayoutError, RankError
from ..pytree.trees import no_tensors
from ..random.arguments import check_key
from ..shards.collectives import all_reduce
from ..shards.mesh import Mesh
from ..shards.peers import among, together
from ..shards.placement import Placement
from ..shards.reader import all_of, gathered, whole
from ..shards.tensor import Sharded
from ..state.arena import BufferSpec
from ..state.leaf import as_tensor, owned
from ..tensors.aten import adds_up
from ..tree import path_string
from .launch import check_mesh

__all__ = ["fold_in", "from_local", "gather", "local", "mean", "state_dict", "sum"]

T = TypeVar("T")


def mean(tree: T) -> T:
    """Average each leaf over all ranks, in a step. With one rank, return the leaves themselves.

    Gradients flow through it: the mean of the ranks' losses has the same gradient that ``value_and_grad`` takes of one
    rank's loss.

    Args:
      tree: Pytree of tensors, of equal shapes on all ranks; the mean of integers is floating. Floating leaves are
        summed in their own dtype, rounded after each addition; ``x.float()`` sums bf16 in f32.
    Returns:
      The means, with the same bits on all ranks.
    Raises:
      LayoutError: If a leaf is sharded, boolean, of a float8 dtype, or not a tensor.
      RankError: With several ranks, outside a step, or in a step whose states are on no mesh.

    Example:
      >>> import torch, functional_cg as fcg
      >>> step = fcg.graph_step(lambda state, x: (state, {"loss": fcg.sharding.mean(x.sum())}))
      >>> state, metrics = step({"n": torch.zeros(())}, torch.ones(3))
      >>> metrics["loss"].item()
      3.0
    """
    return _reduced(tree, "mean")


def sum(tree: T) -> T:  # shadows the builtin on purpose; used as `sharding.sum`
    """Sum each leaf over all ranks, in a step; otherwise like :func:`mean`."""
    return _reduced(tree, "sum")


def fold_in(key: Tensor) -> Tensor:
    """Derive a key for this rank, in a step, so that ranks that share ``state.key`` draw differently.

    With one rank, it returns ``key``.

    Args:
      key: i64[2].
    Raises:
      LayoutError: With several ranks, if it is not a key.
      RankError: With several ranks, outside a step, or in a step whose states are on no mesh.
    """
    mesh = _mesh_here("fold_in", "`fcg.random.fold_in(key, mesh.rank)`")
    if mesh is None:
        return key
    check_key(key)
    # The rank enters as a value, so that all ranks run one program.
    return random.fold_in(key, torch.tensor(mesh.rank, device="cpu").to(key.device))


def from_local(mesh: Mesh, tree: T) -> T:
    """Make leaves of this rank's own pieces, for parallelism that a step writes by hand with collectives of torch.

    In a step, such a leaf is the piece: an ordinary tensor, which any op may read. Collectives of
    ``torch.distributed._functional_collectives`` run over ``mesh.axes[-1].group``; on one rank there is no group.
    Leaves that the optimizer or ``torch.zeros_like`` make of a leaf are pieces too. Outside of a step, the leaf has the
    shape ``[ranks, *piece.shape]``: ``sharding.gather`` returns all pieces, ``sharding.local`` this rank's, and
    checkpoints hold all of them, for as many ranks.

    The ranks agree before a capture, as for other sharded states. Pieces differ along the last axis of the mesh; leaves
    beside them, and pieces along the other axis, have to be equal on all ranks, and a step that computes them from this
    rank's data or piece is refused.

    Args:
      mesh: A mesh from :func:`mesh`.
      tree: Pytree of tensors, of equal shapes on all ranks: pad a leaf that does not divide evenly.
    Returns:
      The leaves, for ``fcg.place``, for ``TrainState.create(params=...)`` without ``sharding``, or for a step.
    Raises:
      LayoutError: If a leaf is no tensor, or is sharded.
      TypeError: If ``mesh`` is none.

    Example:
      >>> import torch, functional_cg as fcg
      >>> mesh = fcg.sharding.mesh({"data": -1})
      >>> fcg.sharding.from_local(mesh, {"w": torch.ones(2)})["w"].shape
      torch.Size([1, 2])
    """
    check_mesh(mesh, "from_local")
    flat, treedef = pytree.flatten(tree)
    flat = [as_tensor(leaf) for leaf in flat]
    rows = no_tensors(pytree.unflatten(treedef, flat), "tree") or [
        f"{path_string(path, 'tree')}  expected a piece   got {BufferSpec.of(leaf)}"
        for path, leaf in zip(treedef.paths(), flat, strict=True)
        if isinstance(leaf, Sharded)
    ]
    if rows:
        raise LayoutError.of(
            "",
            "sharding.from_local: the tree has leaves that are no pieces.",
            rows=rows,
            why="A piece is an ordinary tensor that this rank holds.",
            fix="`sharding.local(leaf)` is this rank's shard of a sharded leaf; leave other values out of the tree.",
        )
    pieces = [owned(leaf).detach().to(mesh.device) for leaf in flat]
    stacked = [
        Sharded(piece, Placement(mesh, (mesh.shards.size, *piece.shape), sharded=True, stacked=True))
        for piece in pieces
    ]
    return cast("T", pytree.unflatten(treedef, stacked))


def gather(tree: T, *, masters: bool = False) -> T:
    """Replace sharded leaves by whole ones; all ranks must call it. Without a mesh, return the tree itself.

    In a step, each leaf is gathered where it is read. Outside a step, leaves are gathered at once, into memory that the
    caller owns. If ``zero`` has a ``param_dtype`` or a policy, parameters come as a loss sees them, in bfloat16 for
    instance.

    Args:
      tree: Pytree, or a single leaf.
      masters: Return parameters as the state keeps them, in their own dtype, to average them for instance; f32 masters
        of bfloat16 parameters take twice the bytes.
    Raises:
      RankError: Outside a step, if a rank does not call it, or calls it with other leaves.

    Example:
      >>> import torch, functional_cg as fcg
      >>> fcg.sharding.gather({"w": torch.ones(2)})
      {'w': tensor([1., 1.])}
    """
    flat, treedef = pytree.flatten(tree)
    if not any(isinstance(leaf, Sharded) for leaf in flat):
        return tree
    if masters:
        flat = [_in_own_dtype(leaf) for leaf in flat]
    with torch.no_grad():
        if inside_a_step():
            return cast("T", pytree.unflatten(treedef, gathered(flat)))
        with _all_ranks("sharding.gather", "gather", flat):
            out = [
                owned(whole(leaf)).clone() if isinstance(leaf, Tensor) else leaf for leaf in gathered(flat)
            ]
    return cast("T", pytree.unflatten(treedef, out))


def _in_own_dtype(leaf: Any) -> Any:
    if not isinstance(leaf, Sharded):
        return leaf
    reading = replace(leaf.placement.reading, param_dtype=None)
    return Sharded(leaf.local, replace(leaf.placement, reading=reading))


def local(leaf: Tensor) -> Tensor:
    """Return this rank's shard of a leaf as a vector, or its own piece; a leaf that is not sharded is returned whole.

    Outside a step, padding is cut off: the last ranks of a small leaf have fewer elements, or none. In a step, the
    padding is zero.

    Raises:
      TypeError: If it is not a tensor.
    """
    if not isinstance(leaf, Tensor):
        raise TypeError(
            f"sharding.local: expected a leaf, got {type(leaf).__name__}. To fix: "
            "`fcg.tree.map(fcg.sharding.local, tree)` for all leaves of a tree."
        )
    if not isinstance(leaf, Sharded):
        return owned(leaf)  # type: ignore[no-any-return]
    placement, held = leaf.placement, owned(leaf.local)
    if not placement.partial or inside_a_step():
        return placement.masked(held)
    return (held[: placement.elements] if placement.padded else held).clone()  # type: ignore[no-any-return]


def state_dict(state: Any) -> Mapping[str, Tensor]:
    """Return all leaves of a sharded state, whole, in the host memory of rank 0; an empty dict on other ranks.

    This is a collective: all ranks must call it. Leaves are gathered one at a time, so no rank's device holds more than
    one whole leaf besides its shards. Names are those of ``fcg.state_dict``, and ``fcg.load_state_dict`` loads them on
    any number of ranks.

    Args:
      state: A handle, or a pytree of tensors.
    Raises:
      CaptureError: In a step, which cannot copy to the host.
      LayoutError: If a leaf is not a tensor.
      RankError: If a rank does not call it, or calls it with other leaves.
    """
    if inside_a_step():
        raise CaptureError.of(
            "",
            "`sharding.state_dict` was called in a step.",
            why="It copies leaves to the host of rank 0, and a graph repeats what is done on the devices of all.",
            fix="call it between steps, on the state that one has returned; in a step, `sharding.gather(leaf)`.",
        )
    flat, treedef = pytree.flatten(state)
    flat = [as_tensor(leaf) for leaf in flat]
    rows = no_tensors(pytree.unflatten(treedef, flat), "state")
    if rows:
        raise LayoutError.of(
            "",
            "sharding.state_dict: the state has leaves that are no tensors.",
            rows=rows,
            why="A state dict holds tensors under their names.",
            fix="leave them out, or keep them as static fields; of a module, `module.state_dict()`.",
        )
    mesh = _mesh_of(flat)
    out: dict[str, Tensor] = {}
    with _all_ranks("sharding.state_dict", "make a state dict", flat):
        for name, leaf in zip(names_of(treedef), flat, strict=True):
            full = all_of(leaf) if isinstance(leaf, Sharded) else owned(leaf)
            if mesh is None or mesh.number == 0:
                out[name] = full.detach().to("cpu", copy=True)
    return out


class _AllReduce(torch.autograd.Function):
    """A differentiable reduction over ranks; the backward applies the same reduction to the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, mesh: Mesh, op: str) -> Tensor:
        ctx.mesh, ctx.op = mesh, op
        # Sums overflow small integers, and no backend adds all of their dtypes.
        integer = not (value.is_floating_point() or value.is_complex())
        total = all_reduce(value.long() if integer else value, mesh)
        return total / mesh.size if op == "mean" else total.to(value.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _AllReduce.apply(grad, ctx.mesh, ctx.op), None, None


def _reduced(tree: T, op: Literal["mean", "sum"]) -> T:
    mesh = _mesh_here(op, "`torch.distributed.all_reduce(value)` on all ranks")
    if mesh is None:
        return tree
    rows = [
        f"{path_string(path, 'tree')}  expected a tensor of numbers   got {_kind(leaf)}"
        for path, leaf in pytree.flatten_with_path(tree)[0]
        if not _reducible(leaf)
    ]
    if rows:
        raise LayoutError.of(
            "",
            f"`sharding.{op}` cannot reduce {'a leaf' if len(rows) == 1 else f'{len(rows)} leaves'}.",
            rows=rows,
            why="It takes the values that each rank has computed of its data, element by element.",
            fix="a number as `torch.tensor(n)`, a mask or float8 as `leaf.float()`; a sharded leaf is one over all "
            f"ranks, `leaf.{op}()`, or `sharding.gather(leaf)`.",
        )
    return cast("T", pytree.map(lambda leaf: _AllReduce.apply(leaf, mesh, op), tree))


def _reducible(leaf: Any) -> bool:
    if not isinstance(leaf, Tensor) or (isinstance(leaf, Sharded) and leaf.placement.partial):
        return False
    return adds_up(leaf.dtype) if leaf.is_floating_point() else leaf.dtype is not torch.bool


def _kind(leaf: Any) -> str:
    return str(BufferSpec.of(leaf)) if isinstance(leaf, Tensor) else type(leaf).__name__


def _mesh_here(name: str, outside: str) -> Mesh | None:
    """Return the mesh of the step that runs here; None if there is only one rank.

    Raises:
      RankError: If there are several ranks, and no mesh of a step that runs on all of them.
    """
    mesh = current_mesh()
    if mesh is not None:
        return mesh if mesh.size > 1 else None
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    here = "in a step whose states lie on no mesh" if inside_a_step() else "outside of a step"
    raise RankError.of(
        "",
        f"`sharding.{name}` was called {here}, with {dist.get_world_size()} ranks.",
        why="The ranks of a step are those that its state is sharded over; here none are known, and what this rank "
        "holds would pass for what all of them hold.",
        fix="call it in such a step, `TrainState.create(..., sharding=sharding.zero(mesh))`, and return what it gives "
        f"in the metrics; outside, {outside}.",
    )


def _mesh_of(leaves: Sequence[Any]) -> Mesh | None:
    return next((leaf.placement.mesh for leaf in leaves if isinstance(leaf, Sharded)), None)


@contextlib.contextmanager
def _all_ranks(function: str, what: str, leaves: Sequence[Any]) -> Iterator[None]:
    """Run a block of collectives outside a step, once all ranks have arrived with the same leaves."""
    mesh = _mesh_of(leaves)
    lines = [what, *(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves if isinstance(leaf, Sharded))]
    together(mesh, function, "\n".join(lines))
    with among(mesh, function):
        yield
