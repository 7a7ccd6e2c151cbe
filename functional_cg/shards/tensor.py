"""``Sharded``: a tensor of full logical shape of which this rank holds a shard.

Elementwise ops work on shards. Reductions of a whole leaf (``sum``, ``norm``, ``max``, ...) reduce over the mesh. Any
other op on a sharded leaf is refused, with an error that names ``sharding.gather``. A replicated leaf is held whole:
any op may read it, and in an op with a sharded leaf only this rank's shard of it is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Never

import torch
from torch import Tensor

from ..errors import LayoutError, ReadOnlyError
from ..tensors.aten import map_tensors, named_arguments, tensors_in, written_arguments
from ..tensors.op_table import row_of
from .placement import Placement
from .reductions import REDUCTIONS, norms

__all__ = ["Sharded", "placed", "refuse_at_rest", "shard_of", "title"]

aten = torch.ops.aten

_VIEWS = frozenset({"aten::view", "aten::_unsafe_view", "aten::unsqueeze", "aten::squeeze"})
_IN_WORDS = MappingProxyType(
    {"aten._local_scalar_dense.default": "a number of the host, by `.item()`, `float()` or `if`"}
)


class Sharded(Tensor):
    """A leaf on a mesh, with the shape of the whole leaf; it has no meaningful strides and no memory of its own."""

    local: Tensor
    placement: Placement

    __slots__ = ("local", "placement")
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, local: Tensor, placement: Placement) -> Sharded:
        if tuple(local.shape) != placement.local_shape:
            raise ValueError(f"a shard of {list(placement.local_shape)} is expected, got {list(local.shape)}")
        with torch.inference_mode(False):
            out = torch.Tensor._make_wrapper_subclass(
                cls, placement.shape, dtype=local.dtype, device=local.device, layout=torch.strided
            )
        torch._C._set_throw_on_mutable_data_ptr(out)  # else `to_dlpack` crashes the process
        out.local = local
        out.placement = placement
        return out

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        sources = [t for t in tensors_in([*args, *kwargs.values()]) if isinstance(t, Sharded)]
        name = func._schema.name
        if not any(source.placement.partial for source in sources):
            return _replicated(func, args, kwargs, sources)
        for tensor in written_arguments(func, args, kwargs):
            if not isinstance(tensor, Sharded) or not tensor.placement.partial:
                raise refused(sources[0], f"{func}, which writes it into a tensor that is whole")
        if name in REDUCTIONS or name.startswith("aten::_foreach_norm"):
            refuse_at_rest(sources, str(func))
            return _reduced(func, args, kwargs) if name in REDUCTIONS else _norms(func, args, kwargs)
        if name in _VIEWS:
            return _viewed(func, args, kwargs, sources[0])
        if not _same_elements(func):
            raise refused(sources[0], str(func))
        if row_of(func).lists:
            return _by_lists(func, args, kwargs)
        return _elementwise(func, args, kwargs, sources)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        numbers = "" if self.placement.partial else f"\n{self.local!r}"
        return f"{type(self).__name__}({title(self)}){numbers}"

    def __format__(self, spec: str) -> str:
        if self.placement.partial and not spec:
            return repr(self)
        return format(self._here(f"its number in the format {spec!r}"), spec)

    def tolist(self) -> Any:
        return self._here("tolist").tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self._here("numpy").numpy(force=force)

    def _here(self, what: str) -> Tensor:
        """Return the leaf if this rank holds all of it; refuse otherwise."""
        if self.placement.partial:
            raise refused(self, what)
        return self.local

    def untyped_storage(self) -> Never:
        raise refused(self, "the storage")

    def data_ptr(self) -> Never:
        raise refused(self, "the address")

    def __dlpack__(self, **options: Any) -> Never:
        raise refused(self, "DLPack")

    def __setitem__(self, key: Any, value: Any) -> Never:
        raise self._read_only()

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("local", "placement"):
            raise self._read_only(f"`.{name}`")
        super().__setattr__(name, value)

    def requires_grad_(self, requires_grad: bool = True) -> Sharded:  # noqa: FBT001, FBT002
        if requires_grad:
            raise self._read_only("`.requires_grad`")
        return self

    def _read_only(self, attribute: str = "") -> ReadOnlyError:
        return ReadOnlyError.of(
            "",
            f"{attribute}{' of ' * bool(attribute)}a sharded leaf was written to.",
            rows=[title(self)],
            why="A rank holds its shard only, and the state changes only by what a step returns.",
            fix="compute a new value, `torch.where(mask, new, leaf)`; outside of a step, "
            "`state = fcg.tree.at(lambda s: ..., state, value)`.",
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharded:
        return Sharded(self.local.detach().clone(), self.placement)

    def __reduce_ex__(self, protocol: Any) -> Never:
        raise TypeError(
            f"{title(self)} cannot be pickled: its mesh is one of running processes. "
            "To fix: `sharding.state_dict(state)`, or `sharding.local(leaf)` for this rank's shard."
        )


def placed(tensor: Any) -> Placement | None:
    """Return a tensor's placement; None if it is on no mesh."""
    return tensor.placement if isinstance(tensor, Sharded) else None


def refused(leaf: Sharded, what: str) -> LayoutError:
    """Return the error for a request that a shard alone cannot answer."""
    return LayoutError.of(
        "",
        f"asks a sharded leaf for {_IN_WORDS.get(what, what)}.",
        rows=[title(leaf)],
        why="A rank holds a shard: elementwise ops work on it, and `sum`, `mean`, `norm`, `max`, `min` of all of it.",
        fix="`sharding.gather(leaf)` on all ranks, for all of it; `sharding.local(leaf)` for this rank's shard.",
    )


def refuse_at_rest(leaves: Sequence[Any], what: str) -> None:
    """Refuse an op that needs all ranks outside a step, where the other ranks may not run it.

    Raises:
      LayoutError: If one of the leaves is outside a step, on a mesh of several ranks.
    """
    for leaf in leaves:
        if isinstance(leaf, Sharded) and leaf.placement.at_rest and leaf.placement.mesh.everyone > 1:
            raise LayoutError.of(
                "",
                f"asks a leaf of {leaf.placement.mesh.everyone} ranks for {what} outside of the step that got it.",
                rows=[title(leaf)],
                why="The answer is a collective, and a rank that asks alone would wait for ever.",
                fix="return it in the metrics of a step; or `sharding.gather(leaf)` on all ranks, for all of it; "
                "`sharding.local(leaf)` for this rank's shard.",
            )


def title(leaf: Sharded) -> str:
    """Describe a leaf in one line: ``state.params['w']  float32[5, 7] sharded over data=2``."""
    dtype = str(leaf.dtype).removeprefix("torch.")
    path = f"{leaf.local._path}  " if hasattr(leaf.local, "_path") else ""  # a slot of a state
    return f"{path}{dtype}{list(leaf.placement.shape)} {leaf.placement.describe()}"


def _whole(tensor: Tensor) -> Tensor:
    return tensor.local if isinstance(tensor, Sharded) else tensor


def shard_of(tensor: Tensor, like: Placement) -> Tensor:
    """Return this rank's elements of a tensor used in an op with a sharded leaf; a single number stays one.

    A single number keeps whether it has dimensions, since that affects the dtype of the result.

    Raises:
      LayoutError: If the tensor has another shape: a shard cannot be broadcast.
    """
    placement = placed(tensor)
    shape = tuple(tensor.shape)
    if placement is not None and placement.partial:
        if (placement.mesh, shape, placement.holders, placement.stacked) == (
            like.mesh,
            like.shape,
            like.holders,
            like.stacked,
        ):
            local: Tensor = tensor.local  # type: ignore[attr-defined]
            if placement.sharded == like.sharded:
                return local
            if like.sharded:  # whole on the ranks that hold it
                return like.own(local)
    elif shape == like.shape and (shape or placement is not None):
        return like.own(_whole(tensor))
    elif tensor.numel() == 1 and len(shape) <= len(like.shape):
        return _whole(tensor).reshape((1,) if shape else ())
    other = placement is not None and placement.mesh != like.mesh and shape == like.shape
    raise LayoutError.of(
        "",
        f"combines a sharded leaf with {'one of another mesh' if other else 'a tensor of another shape'}.",
        rows=[
            f"{list(like.shape)} {like.describe()}   with {list(shape)} {placement.describe() if placement else ''}"
        ],
        why="A shard is a range of the flattened leaf; other shapes cannot be broadcast over it.",
        fix="expand the other to the leaf's shape, or `sharding.gather(leaf)`.",
    )


def _elementwise(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], sources: Sequence[Sharded]
) -> Any:
    partial = [source.placement for source in sources if source.placement.partial]
    home = next((placement for placement in partial if placement.sharded), partial[0])
    by_local = {id(source.local): source for source in sources}  # an in-place op returns its argument

    def own(t: Tensor) -> Tensor:
        mine = shard_of(t, home)
        # A shard of a 0-dim leaf has a dimension. A number used with it gets one too, so that both have equal weight
        # in type promotion.
        return mine if home.shape or mine.dim() else mine.reshape(1)

    out = func(*map_tensors(own, args), **map_tensors(own, kwargs))
    return map_tensors(lambda t: by_local[id(t)] if id(t) in by_local else Sharded(t, home), out)


def _same_elements(func: Any) -> bool:
    """Whether an op is elementwise."""
    row = row_of(func)
    named_so = torch.Tag.pointwise in func.tags or row.by_place or row.lists
    # On a shard, a sum or a comparison of all elements would cover this rank's only.
    return named_so and not (row.asks or row.multiplies or row.kind == "reduction")


def _replicated(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], sources: Sequence[Sharded]) -> Any:
    """Run an op on leaves that this rank holds whole; results of elementwise ops are replicated leaves again.

    So a loss that reads ``p + scale * g`` gets its gradient averaged, just as if the two were sharded.
    """
    by_local = {id(source.local): source for source in sources}
    homes = {source.placement.shape: source.placement for source in sources}
    out = func(*map_tensors(_whole, args), **map_tensors(_whole, kwargs))
    if not _same_elements(func):
        return out

    def placed_again(t: Tensor) -> Tensor:
        home = homes.get(tuple(t.shape))
        return by_local[id(t)] if id(t) in by_local else t if home is None else Sharded(t, home)

    return map_tensors(placed_again, out)


def _viewed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], source: Sharded) -> Sharded:
    if func is aten.view.dtype or source.placement.stacked:
        raise refused(source, f"{func}, its memory in another form")
    shape = func(torch.empty(source.shape, device="meta"), *args[1:], **kwargs).shape
    old = source.placement
    return Sharded(source.local, replace(old, shape=tuple(shape)))


def _by_lists(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an op on lists of leaves; each row of the lists may be sharded or not."""
    named = named_arguments(func, args, kwargs)
    rows = max(len(value) for value in named.values() if isinstance(value, (list, tuple)))
    homes = [
        next(
            (
                p
                for finest in (True, False)
                for column in _columns(named, rows)
                if (p := placed(column[i])) is not None and (p.sharded if finest else p.partial)
            ),
            None,
        )
        for i in range(rows)
    ]

    def own(value: Any) -> Any:
        if isinstance(value, Tensor):
            return _whole(value)
        if (
            isinstance(value, (list, tuple))
            and len(value) == rows
            and all(isinstance(t, Tensor) for t in value)
        ):
            return [
                _whole(t) if home is None else shard_of(t, home) for t, home in zip(value, homes, strict=True)
            ]
        return value

    def wrapped(column: Any) -> Any:
        if isinstance(column, tuple) or (column and isinstance(column[0], (list, tuple))):
            return type(column)(map(wrapped, column))
        if not column:  # the op returns nothing, or a list that this optimizer does not use
            return column
        return [
            t if home is None or tuple(t.shape) != home.local_shape else Sharded(t, home)
            for t, home in zip(column, homes, strict=True)
        ]

    out = func(*map(own, args), **{name: own(value) for name, value in kwargs.items()})
    return wrapped(out)


def _columns(named: Mapping[str, Any], rows: int) -> list[Sequence[Any]]:
    return [value for value in named.values() if isinstance(value, (list, tuple)) and len(value) == rows]


def _reduced(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Reduce a whole leaf: over this rank's elements, then over the ranks."""
    named = named_arguments(func, args, kwargs)
    leaf = args[0]
    dims = named.get("dim")
    everything = dims is None or len(dims if isinstance(dims, (list, tuple)) else [dims]) in (0, leaf.dim())
    pair = len(func._schema.returns) > 1  # `max` along a dimension also returns indices
    if not isinstance(leaf, Sharded) or not everything or pair or named.get("keepdim"):
        raise refused(
            next(t for t in tensors_in(list(args)) if isinstance(t, Sharded)), f"{func} along a dimension"
        )
    _refuse_order(leaf, named.get("ord", named.get("p")))
    return REDUCTIONS[func._schema.name](leaf.local, leaf.placement, named)


def _refuse_order(leaf: Sharded, order: float | None) -> None:
    """Refuse orders that are not positive: only for positive ones do norms of shards combine to the leaf's norm."""
    if order is not None and not order > 0:
        raise refused(leaf, f"its norm of order {order:g}")


def _norms(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Run ``_foreach_norm`` with one collective for all leaves."""
    named = named_arguments(func, args, kwargs)
    _refuse_order(next(t for t in named["self"] if isinstance(t, Sharded)), named["ord"])
    leaves = [(_whole(t), p if (p := placed(t)) is not None and p.partial else None) for t in named["self"]]
    return norms(leaves, named["ord"], named.get("dtype"))
