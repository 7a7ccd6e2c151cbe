"""Read leaves of a mesh in a loss: gather them where they are used, reduce gradients in the backward.

A loss gets a :class:`Reader` in place of each leaf. An op that reads it gets the whole leaf, gathered at that point. At
most two leaves stay gathered at a time. With ``reshard``, autograd saves how to gather a leaf again instead of the
gathered leaf, so no rank ever holds more than its shards and a few whole leaves. Here each leaf has a separate
collective; a trace groups them into buckets in the order of use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.function import once_differentiable

from ..errors import LayoutError, ReadOnlyError
from ..tensors.aten import is_in_place, map_tensors, tensors_in, written_arguments
from ..tensors.overlap import storage_key
from ..tree import Treedef, path_string
from .collectives import all_gather, all_reduce, from_one, reduce_scatter
from .placement import Placement, Reading
from .tensor import Sharded, title

__all__ = ["Reader", "Source", "all_of", "gathered", "like_leaf", "readers", "variable_of", "whole"]

_NO_HOOKS = "support saved tensor hooks"  # in the error of `torch.func` inside saved-tensor hooks
_AT_ONCE = 2  # leaves that stay gathered: consecutive ops read a weight, a bias, and the weight again
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
    """A leaf of a mesh as a loss sees it: any op that reads it gets the whole leaf.

    Gradients reach the leaf through the gathered tensor, or through the reader itself if it is passed to an autograd
    function or a ``vmap`` unread.
    """

    _read: Callable[[], Tensor]

    __slots__ = ("_read",)

    @staticmethod
    def __new__(
        cls, like: Tensor, shape: Sequence[int], dtype: torch.dtype, read: Callable[[], Tensor]
    ) -> Reader:
        reader = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=like.device)
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
        name = getattr(func, "__name__", "")
        for tensor in tensors_in(list(args[:1])):
            if isinstance(tensor, Reader) and is_in_place(name):
                raise _written(tensor)
        return _with_leaves(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in written_arguments(func, args, kwargs):
            if isinstance(tensor, Reader):
                raise _written(tensor)
        return _with_leaves(func, args, kwargs)  # an op called from C++, which bypasses `__torch_function__`

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Reader({self.dtype}, {list(self.shape)})"


def _written(leaf: Tensor) -> ReadOnlyError:
    return ReadOnlyError.of(
        "",
        f"writes in place into a leaf, {str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}.",
        why="The leaf was gathered for this reading; what is written there is lost.",
        fix="compute a new tensor, `w = w + 1`; return what is to stay in the new state.",
    )


def _with_leaves(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function with whole leaves in place of their readers, each read once."""
    seen: dict[int, Tensor] = {}

    def read(tensor: Tensor) -> Tensor:
        if id(tensor) not in seen:
            seen[id(tensor)] = whole(tensor)
        return seen[id(tensor)]

    return func(*map_tensors(read, args), **map_tensors(read, kwargs))


def whole(tensor: Tensor) -> Tensor:
    """Return the whole leaf of a reader; any other tensor as it is."""
    return tensor._read() if isinstance(tensor, Reader) else tensor


def variable_of(leaf: Tensor) -> Tensor:
    """Return the tensor to differentiate with respect to: whole or shard, like the gradient this rank keeps."""
    if not isinstance(leaf, Sharded):
        return leaf
    placement = leaf.placement
    whole = placement.sharded or placement.reading.gradient == "whole"
    return leaf.local if whole else placement.split.own(leaf.local)


class Source:
    """Where a reader gets its leaf from; gathers at each request.

    Args:
      leaf: The leaf.
      variable: The tensor to differentiate with respect to: a shard or the whole leaf.
    """

    def __init__(self, leaf: Sharded, variable: Tensor) -> None:
        self.placement = leaf.placement
        self.reading = leaf.placement.reading
        self.held = leaf.local.detach()
        self.variable = variable

    def gather(self) -> Tensor:
        """Return the whole leaf, in the dtype that a loss reads it in."""
        placement, holders = self.placement, self.placement.holders
        if holders is None:
            return self.read_here()
        dtype = self.reading.param_dtype or self.held.dtype
        full = self.read_here() if placement.here else self.held.new_zeros(placement.shape, dtype=dtype)
        return from_one(full, holders.stages, here=holders.first)

    def read_here(self) -> Tensor:
        """Return the whole leaf on the ranks of a pipeline that hold it; they alone may ask."""
        read, placement = self.held.to(self.reading.param_dtype or self.held.dtype), self.placement
        if placement.sharded:
            read = all_gather(read.flatten(), placement.mesh.shards)
        return placement.unpad(read) if placement.partial else read

    def reduce(self, grad: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Average a gradient of the whole leaf over all ranks; return the part that this rank keeps, in a dtype."""
        if isinstance(grad, Sharded) and grad.placement.sharded:
            raise LayoutError.of(
                "",
                "computes with a leaf and, beside it, with a sharded leaf that it did not get as an argument.",
                rows=[f"{list(grad.shape)} {grad.placement.describe()}"],
                why="A loss gets whole leaves; a leaf from elsewhere, such as `state.ema`, is this rank's shard.",
                fix="`sharding.gather(leaf)` in place of that leaf.",
            )
        grad = grad.local if isinstance(grad, Sharded) else grad
        mesh, out = self.placement.mesh, grad.to(self.reading.reduce_dtype or grad.dtype)
        if self.placement.sharded or self.reading.gradient == "shard":
            out = reduce_scatter(self.placement.split.pad(out), mesh.shards)
        else:
            out = all_reduce(out.reshape(-1) if self.placement.partial else out, mesh.shards)
        for axis in mesh.axes[:-1]:
            out = all_reduce(out, axis)
        return (out / mesh.size).to(dtype or self.variable.dtype)


class _Gather(torch.autograd.Function):
    """Maps a shard to the whole leaf or to its reader; the backward averages the gradient over the ranks."""

    @staticmethod
    def forward(ctx: Any, source: Source, variable: Tensor, make: Callable[[], Tensor]) -> Tensor:
        ctx.source = source
        full = make()
        return full.view_as(full) if full is source.held else full

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, ctx.source.reduce(grad), None


class _Read:
    """The readers of one loss: tracks which leaves are gathered, and restores saved tensors."""

    def __init__(self) -> None:
        self._gathered: dict[Source, Tensor] = {}  # in order of use, the latest last
        self._versions: dict[Source, int] = {}

    def forward(self, source: Source) -> Tensor:
        found = self._gathered.pop(source, None)
        if found is None or (source.variable.requires_grad and not found.requires_grad):
            make = source.gather if found is None else found.detach
            # The first read may be under `no_grad` or a transform; later reads must get gradients nevertheless.
            with torch.enable_grad(), _outside_of_transforms():
                found = cast("Tensor", _Gather.apply(source, source.variable, make))
        self._keep(source, found)
        return found

    def pack(self, tensor: Tensor) -> Any:
        """Return what autograd saves for a tensor: for a gathered leaf, how to gather it again."""
        if tensor.layout is not torch.strided or isinstance(tensor, (Sharded, Reader)):
            return tensor
        key = storage_key(tensor)
        for source, leaf in self._gathered.items():
            kept_again = _let_go_after_use(source.placement) and storage_key(leaf) == key
            if kept_again and _same_numbers(tensor, leaf):
                return source, tensor.shape, tensor.stride(), tensor.storage_offset()
        # An op may save its own result, whose graph holds the saved tensor: a cycle that only a backward would break.
        return tensor if tensor.grad_fn is None else tensor.detach()

    def unpack(self, kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        source, shape, stride, offset = kept
        found = self._gathered.pop(source, None)
        found = source.gather() if found is None else found
        self._keep(source, found)
        return torch.as_strided(found.detach(), shape, stride, offset)

    def _keep(self, source: Source, found: Tensor) -> None:
        self._gathered[source] = found
        if self._versions.setdefault(source, found._version) != found._version:
            raise _written(found)  # through a view of it
        while len(self._gathered) > _AT_ONCE:
            self._let_go(next(iter(self._gathered)))

    def _let_go(self, source: Source) -> None:
        found = self._gathered.pop(source)
        if self._versions.pop(source) != found._version:
            raise _written(found)

    def close(self) -> None:
        for source in list(self._gathered):
            self._let_go(source)


def _same_numbers(view: Tensor, leaf: Tensor) -> bool:
    """Whether a view interprets its leaf's memory as the leaf does: same dtype, conjugation and negation."""
    return (view.dtype, view.is_conj(), view.is_neg()) == (leaf.dtype, leaf.is_conj(), leaf.is_neg())


def _outside_of_transforms() -> contextlib.AbstractContextManager[Any]:
    """Leave `torch.func` transforms while gathering: a leaf is the same for all elements of a ``vmap``."""
    inside = torch._C._functorch.peek_interpreter_stack() is not None
    return temporarily_clear_interpreter_stack() if inside else contextlib.nullcontext()


@contextlib.contextmanager
def readers(
    leaves: Sequence[Tensor], variables: Sequence[Tensor], treedef: Treedef
) -> Iterator[list[Tensor]]:
    """Provide stand-ins for leaves in a loss; a leaf on no mesh is replaced by its variable.

    Args:
      leaves: Leaves of a tree, some of them on a mesh.
      variables: The tensors to differentiate with respect to, one per leaf.
      treedef: Structure of the tree, for messages.
    Yields:
      The leaves to pass to the loss. Backward passes must run inside the block.
    """
    _refuse_held(leaves, treedef)
    read = _Read()
    handed = _handed(leaves, variables, read)
    let_go = {
        i: leaf
        for i, leaf in enumerate(leaves)
        if isinstance(leaf, Sharded) and _let_go_after_use(leaf.placement)
    }
    with _gathering_again(let_go, treedef, read) if let_go else contextlib.nullcontext():
        yield handed
    read.close()


def _refuse_held(leaves: Sequence[Tensor], treedef: Treedef) -> None:
    """Refuse to differentiate with respect to leaves that only some stages of a pipeline hold."""
    rows = [
        f"{path_string(path, 'params')}  {title(leaf)}"
        for path, leaf in zip(treedef.paths(), leaves, strict=True)
        if isinstance(leaf, Sharded) and leaf.placement.holders is not None
    ]
    if rows:
        raise LayoutError.of(
            "",
            "differentiates with respect to leaves of a pipeline, which this rank may not hold.",
            rows=rows,
            why="Each rank computes its own stages, and gradients go from stage to stage.",
            fix="`loss, grads = pipe.value_and_grad(loss_fn)(state.params, batch)`.",
        )


@contextlib.contextmanager
def _gathering_again(leaves: Mapping[int, Sharded], treedef: Treedef, read: _Read) -> Iterator[None]:
    """Run a block in which autograd saves how to gather leaves again instead of the gathered leaves.

    Raises:
      LayoutError: If `torch.func` differentiates inside, which does not support saved-tensor hooks.
    """
    try:
        with torch.autograd.graph.saved_tensors_hooks(read.pack, read.unpack):
            yield
    except RuntimeError as error:
        if _NO_HOOKS not in str(error):
            raise
        paths = treedef.paths()
        refusal = LayoutError.of(
            "",
            "differentiates with `torch.func` in a loss whose leaves are gathered again in the backward.",
            rows=[f"{path_string(paths[i], 'params')}  {title(leaf)}" for i, leaf in leaves.items()],
            why="`torch.func.grad`, `vjp`, `jacrev` and `hessian` keep whole leaves; nothing can gather those again.",
            fix="`fcg.grad` in place of `torch.func.grad`; or let whole leaves stay until the backward, "
            "`sharding.zero(mesh, reshard=False)`, also for per-sample gradients under `vmap`.",
        )
        raise refusal.with_traceback(error.__traceback__) from error


def _let_go_after_use(placement: Placement) -> bool:
    return placement.partial and placement.reading.reshard


def gathered(leaves: Sequence[Tensor]) -> list[Tensor]:
    """Return readers of leaves for use outside a loss, without gradients."""
    held = [leaf.local if isinstance(leaf, Sharded) else leaf for leaf in leaves]
    return _handed(leaves, held, _Read())


def all_of(leaf: Sharded) -> Tensor:
    """Gather one leaf by itself, immediately, in its own dtype and without gradients."""
    with torch.no_grad():
        return whole(gathered([Sharded(leaf.local, replace(leaf.placement, reading=Reading()))])[0])


def _handed(leaves: Sequence[Tensor], variables: Sequence[Tensor], read: _Read) -> list[Tensor]:
    return [
        _reader(leaf, variable, read) if isinstance(leaf, Sharded) else variable
        for leaf, variable in zip(leaves, variables, strict=True)
    ]


def _reader(leaf: Sharded, variable: Tensor, read: _Read) -> Reader:
    source = Source(leaf, variable)
    dtype = source.reading.param_dtype or variable.dtype
    make = partial(Reader, variable, leaf.shape, dtype, partial(read.forward, source))
    return cast("Reader", _Gather.apply(source, variable, make))


def like_leaf(leaf: Tensor, grad: Tensor) -> Tensor:
    """Return a gradient as the caller sees it: placed on the mesh of its leaf, if it has one."""
    if not isinstance(leaf, Sharded):
        return grad
    old = leaf.placement
    split = old.sharded or old.reading.gradient == "shard"
    return Sharded(grad, Placement(old.mesh, old.shape, split, old.reading, holders=old.holders))
