"""Reading leaves of a mesh in a loss: gathered where they are used, their gradients reduced in the backward.

A loss gets a :class:`Reader` in place of each leaf. What reads it gets the whole leaf, gathered at that place together
with the leaves of its bucket. Two buckets stay gathered at a time. What autograd keeps of a gathered leaf for the
backward is the way to gather it again (``reshard``), so that no rank ever holds more than its shards and few buckets.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..overlap import storage_key
from .collectives import all_gather, all_reduce, reduce_scatter
from .placement import Placement, Reading
from .tensor import Sharded

__all__ = ["Reader", "gathered", "like_leaf", "readers", "variable_of", "whole"]

_AT_ONCE = 2  # gathered buckets that stay: layers share a border, and a layer reads its weights one by one
_QUESTIONS = frozenset(
    {
        Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.device.__get__, Tensor.ndim.__get__,  # type: ignore[attr-defined]
        Tensor.layout.__get__, Tensor.is_leaf.__get__, Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
        Tensor.is_cuda.__get__, Tensor.is_cpu.__get__, Tensor.is_meta.__get__, Tensor.itemsize.__get__,  # type: ignore[attr-defined]
        Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.is_floating_point,
        Tensor.is_complex, Tensor.stride, Tensor.is_contiguous, Tensor.is_inference, Tensor.get_device,
        torch.is_tensor, torch.is_floating_point, torch.is_complex, torch.numel,
    }
)  # fmt: skip


class Reader(Tensor):
    """A leaf of a mesh as a loss sees it: whichever op reads it gets the whole leaf."""

    _read: Callable[[], Tensor]

    __slots__ = ("_read",)

    @staticmethod
    def __new__(
        cls, like: Tensor, shape: Sequence[int], dtype: torch.dtype, read: Callable[[], Tensor]
    ) -> Reader:
        reader = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=like.device, requires_grad=like.requires_grad
        )
        reader._read = read
        return reader

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _QUESTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        seen: dict[int, Tensor] = {}
        return func(*_read_all(args, seen), **_read_all(kwargs, seen))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        seen: dict[int, Tensor] = {}  # an op that C++ called: it saw no function mode
        return func(*_read_all(args, seen), **_read_all(kwargs or {}, seen))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Reader({self.dtype}, {list(self.shape)})"


def _read_all(value: Any, seen: dict[int, Tensor]) -> Any:
    if isinstance(value, Reader):
        if id(value) not in seen:
            seen[id(value)] = value._read()
        return seen[id(value)]
    if isinstance(value, dict):
        return {name: _read_all(item, seen) for name, item in value.items()}
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        items = [_read_all(item, seen) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def whole(tensor: Tensor) -> Tensor:
    """What a reader reads; any other tensor as it is."""
    return tensor._read() if isinstance(tensor, Reader) else tensor


def variable_of(leaf: Tensor) -> Tensor:
    """What gradients are taken with respect to: of the kind that this rank keeps of a gradient."""
    if not isinstance(leaf, Sharded):
        return leaf
    reading = leaf.placement.reading or Reading()
    placement = leaf.placement
    if placement.sharded or reading.gradient == "whole":
        return leaf.local
    return placement.own(leaf.local)


class _Bucket:
    """Leaves that are gathered together; it gathers as often as it is asked to.

    Args:
      leaves: The leaves.
      variables: What gradients are taken with respect to, in their order; shards or whole leaves.
    """

    def __init__(self, leaves: Sequence[Sharded], variables: Sequence[Tensor]) -> None:
        self.placements = [leaf.placement for leaf in leaves]
        self.reading = self.placements[0].reading or Reading()
        self.held = [leaf.local.detach() for leaf in leaves]
        self.variables = list(variables)

    def gather(self) -> list[Tensor]:
        """Whole leaves, in the dtype that a loss reads them in."""
        cast = [local.to(self.reading.param_dtype or local.dtype) for local in self.held]
        sharded = [i for i, placement in enumerate(self.placements) if placement.sharded]
        if sharded:
            axis = self.placements[0].mesh.shards
            for i, vector in zip(sharded, all_gather([cast[i] for i in sharded], axis), strict=True):
                cast[i] = self.placements[i].unpad(vector)
        return cast

    def reduce(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Means over all ranks of gradients of whole leaves, as this rank keeps them."""
        mesh = self.placements[0].mesh
        out = [grad.to(self.reading.reduce_dtype or grad.dtype) for grad in grads]
        sharded = [
            i
            for i, placement in enumerate(self.placements)
            if placement.sharded or self.reading.gradient == "shard"
        ]
        padded = [self.placements[i].pad(out[i]) for i in sharded]
        for i, shard in zip(sharded, reduce_scatter(padded, mesh.shards), strict=True):
            out[i] = shard
        for axis in mesh.axes[:-1]:
            out = all_reduce(out, axis)
        others = [i for i in range(len(out)) if i not in set(sharded)]
        for i, total in zip(others, all_reduce([out[i] for i in others], mesh.shards), strict=True):
            out[i] = total
        return [
            (total / mesh.size).to(variable.dtype)
            for total, variable in zip(out, self.variables, strict=True)
        ]


class _Gather(torch.autograd.Function):
    """Shards to whole leaves; its transpose averages over the ranks."""

    @staticmethod
    def forward(ctx: Any, bucket: _Bucket, *variables: Tensor) -> tuple[Tensor, ...]:
        ctx.bucket = bucket
        return tuple(
            full.view_as(full) if full is held else full
            for full, held in zip(bucket.gather(), bucket.held, strict=True)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *ctx.bucket.reduce(grads)


class _Read:
    """The readers of one loss: which buckets are gathered now, and how saved tensors find back."""

    def __init__(self) -> None:
        self._gathered: dict[_Bucket, list[Tensor]] = {}  # in the order of use, the last one last
        self._again: dict[_Bucket, list[Tensor]] = {}

    def forward(self, bucket: _Bucket, position: int) -> Tensor:
        found = self._gathered.pop(bucket, None)
        if found is None:
            found = list(cast("tuple[Tensor, ...]", _Gather.apply(bucket, *bucket.variables)))
        self._gathered[bucket] = found
        _keep_the_last(self._gathered, _AT_ONCE)
        return found[position]

    def pack(self, tensor: Tensor) -> Any:
        """What autograd keeps of a tensor: of a gathered leaf, the way back to it."""
        key = (
            storage_key(tensor)
            if tensor.layout is torch.strided and not isinstance(tensor, (Sharded, Reader))
            else -1
        )
        for bucket, leaves in self._gathered.items():
            for position, leaf in enumerate(leaves):
                if (
                    bucket.reading.reshard
                    and bucket.placements[position].sharded
                    and storage_key(leaf) == key
                ):
                    return bucket, position, tensor.shape, tensor.stride(), tensor.storage_offset()
        return tensor

    def unpack(self, kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        bucket, position, shape, stride, offset = kept
        found = self._gathered.get(bucket) or self._again.get(bucket) or bucket.gather()
        self._gathered.clear()  # the forward is over
        self._again = {bucket: found}
        return torch.as_strided(found[position].detach(), shape, stride, offset)

    def close(self) -> None:
        self._gathered.clear()
        self._again.clear()


def _keep_the_last(gathered: dict[_Bucket, list[Tensor]], number: int) -> None:
    while len(gathered) > number:
        del gathered[next(iter(gathered))]


@contextlib.contextmanager
def readers(leaves: Sequence[Tensor], variables: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Stand-ins for leaves in a loss; plain leaves are their own variables.

    Args:
      leaves: Leaves of a tree, some of them sharded.
      variables: What gradients are taken with respect to, one per leaf.
    Yields:
      What the loss gets. Backward passes belong inside of the block.
    """
    read = _Read()
    handed = _handed(leaves, variables, read)
    if not any(isinstance(one, Reader) for one in handed):
        yield handed
        return
    try:
        with torch.autograd.graph.saved_tensors_hooks(read.pack, read.unpack):
            yield handed
    finally:
        read.close()


def gathered(leaves: Sequence[Tensor]) -> list[Tensor]:
    """Readers of leaves outside of a loss, without gradients."""
    held = [leaf.local if isinstance(leaf, Sharded) else leaf for leaf in leaves]
    return _handed(leaves, held, _Read())


def _handed(leaves: Sequence[Tensor], variables: Sequence[Tensor], read: _Read) -> list[Tensor]:
    buckets: dict[Any, list[int]] = {}
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Sharded):
            alone = Reading(bucket=-1 - position)
            buckets.setdefault((leaf.placement.mesh, leaf.placement.reading or alone), []).append(position)
    handed = list(variables)
    for (_, reading), members in buckets.items():
        bucket = _Bucket([cast("Sharded", leaves[i]) for i in members], [variables[i] for i in members])
        for number, i in enumerate(members):
            dtype = reading.param_dtype or variables[i].dtype
            handed[i] = Reader(variables[i], leaves[i].shape, dtype, partial(read.forward, bucket, number))
    return handed


def like_leaf(leaf: Tensor, grad: Tensor) -> Tensor:
    """A gradient as the caller sees it: of a leaf on a mesh, on that mesh too."""
    if not isinstance(leaf, Sharded):
        return grad
    old = leaf.placement
    reading = old.reading or Reading()
    return Sharded(grad, Placement(old.mesh, old.shape, old.sharded or reading.gradient == "shard", reading))
