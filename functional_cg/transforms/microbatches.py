"""Micro-batches: a gradient function runs over equal slices of a batch, and its results are averaged."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import wraps
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, cast

import torch
from einops import rearrange
from torch import Tensor

from .. import tree as pytree
from ..errors import CaptureError, LayoutError
from ..messages.tracebacks import entry
from ..pytree.trees import no_tensors
from ..random import fold_in
from ..random.arguments import used_keys
from ..state.arena import BufferSpec
from ..tensors.aten import adds_up
from ..tree import path_string

__all__ = ["microbatches", "refuse_objects", "refuse_whole_numbers", "shared_key", "sliced"]

P = ParamSpec("P")
Params = TypeVar("Params")
Out = TypeVar("Out")


@entry()
def microbatches(
    k: int,
    *,
    carry: str | None = None,
    dtype: torch.dtype | None = None,
    reduce: Literal["mean", "sum"] = "mean",
) -> Callable[[Callable[Concatenate[Params, P], Out]], Callable[Concatenate[Params, P], Out]]:
    """Run a gradient function over ``k`` equal slices of the batch and average the results, or sum them.

    Wrap the result of :func:`value_and_grad`: activations of one slice are freed before the next starts. The second
    argument (the batch) is cut along dimension 0; what all slices share goes by keyword. A keyword argument ``key`` is
    folded with the slice's number, so that slices draw differently; a key that the function closes over is refused.
    Leaves of the result are averaged, in order, and have to be floating or complex: a count as ``hits.float()``.

    Where slices count differently, as they do by their numbers of tokens, the mean of their means is not that of the
    batch. Return the sum of the losses and the count, and divide once (on a mesh, by ``fcg.sharding.mean(count)``).

    Buffers that each slice updates, such as those of batch norm, must not be averaged: pass them as a keyword argument,
    return the new ones in the auxiliary tree under the same name, and give that name as ``carry``.

    Args:
      k: Number of slices, at least 1.
      carry: Name of a keyword argument passed from slice to slice: each slice gets what the previous one returned under
        that name, and the result has the value of the last.
      dtype: Dtype in which floating leaves are summed and returned, such as ``torch.float32`` for gradients in
        bfloat16, whose sums would lose small terms; None for their own. The values of ``carry`` keep their own dtype.
      reduce: ``"mean"``; or ``"sum"``, of whole numbers, too.
    Raises:
      ValueError: If ``k`` is not an integer of 1 or more, or ``reduce`` is another word.
      TypeError: If ``dtype`` is not a floating dtype of 16 bits or more, or the argument named by ``carry`` is missing.
      CaptureError: If two slices draw from the same key.
      LayoutError: If a leaf of the batch cannot be cut into ``k`` equal slices, a further positional argument has as
        many rows as the batch, a leaf of the result has no mean, or it has no value with the structure of the argument
        under the name ``carry``.

    Example:
      >>> import torch, functional_cg as fcg
      >>> loss = lambda w, x: (w * x).mean()
      >>> fcg.microbatches(2)(fcg.value_and_grad(loss))(torch.tensor(2.0), torch.arange(4.0))
      (tensor(3.), tensor(1.5000))

      Over tokens, of which slices have different numbers:

      >>> def loss(w, batch):
      ...     x, mask = batch
      ...     return (w * x * mask).sum(), mask.sum()
      >>> batch = torch.arange(4.0), torch.tensor([1, 1, 1, 0])
      >>> grads_of = fcg.microbatches(2, reduce="sum")(fcg.value_and_grad(loss, has_aux=True))
      >>> (total, count), grads = grads_of(torch.tensor(2.0), batch)
      >>> total / count, grads / count
      (tensor(2.), tensor(1.))

      With batch norm, as one slice after the other would update it:

      >>> apply, params, buffers = fcg.from_module(torch.nn.BatchNorm1d(3))
      >>> def loss(params, x, *, buffers):
      ...     out, buffers = apply(params, buffers, x)
      ...     return out.square().mean(), {"buffers": buffers}
      >>> grads_of = fcg.microbatches(2, carry="buffers")(fcg.value_and_grad(loss, has_aux=True))
      >>> (value, aux), grads = grads_of(params, torch.randn(8, 3), buffers=buffers)
      >>> aux["buffers"]["num_batches_tracked"]
      tensor(2)
    """
    if type(k) is not int or k < 1:
        raise ValueError(f"microbatches: expected a positive int, got {k!r}")
    if reduce not in ("mean", "sum"):
        raise ValueError(
            f"microbatches: reduce must be 'mean' or 'sum', got {reduce!r}.\nTo fix: by counts, `reduce=\"sum\"`, and "
            "divide the gradients by the sum of the counts."
        )
    if dtype is not None and not adds_up(dtype):
        raise TypeError(
            f"microbatches: dtype must be a floating dtype of 16 bits or more, such as torch.float32, got {dtype!r}"
        )

    def transform(fn: Callable[Concatenate[Params, P], Out]) -> Callable[Concatenate[Params, P], Out]:
        name = getattr(fn, "__name__", type(fn).__name__)

        @wraps(fn)
        def wrapped(params: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            slices, treedef = sliced(name, batch, k, args)
            key = kwargs.get("key")
            total: Any = None
            sums: Any = None
            handed: list[int] = []
            drawn: list[tuple[Tensor, Any]] = []
            for i in range(k):
                if key is not None:
                    kwargs["key"] = fold_in(key, i)
                part = pytree.unflatten(treedef, [leaf[i] for leaf in slices])
                with used_keys() as used:
                    out = cast("Callable[..., Any]", fn)(params, part, *args, **kwargs)
                _refuse_shared(name, drawn, used)
                drawn = used
                if total is None:
                    refuse_objects(name, out)
                if carry is not None:
                    handed, kwargs[carry] = _handed_on(name, carry, kwargs, out)
                if total is None and reduce == "mean":
                    refuse_whole_numbers(name, out, handed, carry)
                total = (
                    out if total is None else pytree.map(lambda _, new: new, total, out)
                )  # of one structure
                leaves, out_def = pytree.flatten(total)
                if reduce == "sum":  # a sum of flags or of small numbers is a count
                    leaves = [
                        leaf if i in handed or leaf.is_floating_point() or leaf.is_complex() else leaf.long()
                        for i, leaf in enumerate(leaves)
                    ]
                if dtype is not None:
                    leaves = [
                        leaf.to(dtype) if leaf.is_floating_point() and i not in handed else leaf
                        for i, leaf in enumerate(leaves)
                    ]
                sums = (
                    leaves
                    if sums is None
                    else [
                        new if i in handed else old + new
                        for i, (old, new) in enumerate(zip(sums, leaves, strict=True))
                    ]
                )
            return pytree.unflatten(
                out_def, [one if i in handed or reduce == "sum" else one / k for i, one in enumerate(sums)]
            )

        return cast("Callable[Concatenate[Params, P], Out]", wrapped)

    return transform


def sliced(name: str, batch: Any, k: int, others: Sequence[Any] = ()) -> tuple[list[Tensor], pytree.Treedef]:
    """Return the leaves of a batch [k * b, ...] as [k, b, ...], and its structure.

    Args:
      name: Name of the function.
      batch: The batch.
      k: Number of slices.
      others: Further positional arguments, which all slices share.
    Raises:
      LayoutError: If a leaf has no first dimension that divides by ``k``, or one of another argument has as many rows.
    """
    flat, treedef = pytree.flatten(batch)
    _refuse_uneven(name, treedef, flat, k)
    if k > 1:
        _refuse_second_batch(name, {len(leaf) for leaf in flat}, others)
    return [rearrange(leaf, "(k b) ... -> k b ...", k=k) for leaf in flat], treedef


def _refuse_shared(
    name: str, drawn: Sequence[tuple[Tensor, Any]], used: Sequence[tuple[Tensor, Any]]
) -> None:
    """Raise if a slice draws from a key that the one before has drawn from, with the same number folded in."""
    for key, folded in used:
        for other, number in drawn:
            if _place(key) == _place(other) and (
                folded is number or (type(folded) is int and folded == number)
            ):
                raise shared_key(name)


def shared_key(name: str) -> CaptureError:
    """Return the error for a loss whose micro-batches draw from one key."""
    return CaptureError.of(
        name,
        "draws from one key in several micro-batches.",
        why="The key is not one of the slice's own: all slices would draw the same numbers, such as the same dropout "
        "masks.",
        fix="take it as a keyword argument, `def loss_fn(params, batch, *, key):`, and pass it, "
        "`grads_of(params, batch, key=key)`: each slice gets another. What all slices share, draw before.",
    )


def _place(key: Tensor) -> tuple[int, int]:
    """Tell keys apart: views of one tensor are the same if they begin at the same element."""
    return id(key if key._base is None else key._base), int(key.storage_offset())


def _handed_on(name: str, carry: str, kwargs: dict[str, Any], out: Any) -> tuple[list[int], Any]:
    """Return the positions in the result of an argument's next value, and that value in the argument's structure."""
    if carry not in kwargs:
        raise TypeError(
            f"microbatches: `carry={carry!r}`, but `{name}` is called without a keyword argument `{carry}`.\n"
            f"To fix: `grads_of(params, batch, {carry}=...)`."
        )
    known = pytree.flatten(kwargs[carry])[1]
    found = [
        (path_string(path[depth + 1 :], carry), position, leaf)
        for position, (path, leaf) in enumerate(pytree.flatten_with_path(out)[0])
        for depth, key in enumerate(path)
        if str(key) in (f"[{carry!r}]", f".{carry}")
    ]
    paths = [path_string(path, carry) for path in known.paths()]
    at = {path: (position, leaf) for path, position, leaf in found}
    if sorted(path for path, _, _ in found) != sorted(paths):
        raise LayoutError.of(
            name,
            f"does not hand on `{carry}` from one micro-batch to the next.",
            rows=[
                f"{path}  expected one   got {sum(path == other for other, _, _ in found)}" for path in paths
            ]
            + [f"{path}  expected nothing" for path in at if path not in paths],
            fix=f'return the new ones in the auxiliary tree, `return loss, {{"{carry}": {carry}}}`.',
        )
    return [at[path][0] for path in paths], pytree.unflatten(known, [at[path][1] for path in paths])


def _refuse_uneven(name: str, treedef: pytree.Treedef, flat: Sequence[Any], k: int) -> None:
    rows = [
        f"{path_string(path, 'batch')}  expected a tensor whose first dimension divides by {k}   got "
        + (str(BufferSpec.of(leaf)) if isinstance(leaf, Tensor) else type(leaf).__name__)
        for path, leaf in zip(treedef.paths(), flat, strict=True)
        if not isinstance(leaf, Tensor) or leaf.dim() == 0 or leaf.shape[0] % k
    ]
    if rows:
        raise LayoutError.of(
            name,
            f"the batch cannot be cut into {k} equal micro-batches.",
            rows=rows,
            why="The batch is the second argument, cut along dimension 0.",
            fix=_divisor(flat, k)
            + "pad or drop the rest, or pass what has no batch dimension as a further argument.",
        )


def _refuse_second_batch(name: str, sizes: Collection[int], others: Sequence[Any]) -> None:
    """Raise if another positional argument has as many rows as the batch, of which each slice would see all."""
    flat, treedef = pytree.flatten(list(others))
    rows = [
        f"{path_string(path, 'args')}  {BufferSpec.of(leaf)}"
        for path, leaf in zip(treedef.paths(), flat, strict=True)
        if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) in sizes
    ]
    if rows:
        raise LayoutError.of(
            name,
            "gets another argument with as many rows as the batch, which would not be cut.",
            rows=rows,
            why="One argument is the batch; all slices share the others.",
            fix="pass one batch, `(x, y)`; what all slices share, pass by keyword.",
        )


def _divisor(flat: Sequence[Any], k: int) -> str:
    sizes = {leaf.shape[0] for leaf in flat if isinstance(leaf, Tensor) and leaf.dim()}
    fits = next((n for n in range(k - 1, 1, -1) if sizes and not any(size % n for size in sizes)), 0)
    return f"`microbatches({fits})`; or " if fits else ""


def refuse_objects(name: str, out: Any) -> None:
    """Raise if a result has leaves that are no tensors."""
    rows = no_tensors(out, "result")
    if rows:
        raise LayoutError.of(
            name,
            "returns leaves that cannot be averaged over micro-batches.",
            rows=rows,
            fix="return tensors, and keep other objects outside of the function.",
        )


def refuse_whole_numbers(name: str, out: Any, handed: Sequence[int] = (), carry: str | None = "") -> None:
    """Raise if a result has integers or truth values, which have no mean.

    Args:
      name: Name of the function.
      out: Its result.
      handed: Positions of leaves that are handed on.
      carry: Their name; None if nothing is handed on and something could be.
    """
    rows = [
        f"{path_string(path, 'result')}  expected floating numbers   got {BufferSpec.of(leaf)}"
        for position, (path, leaf) in enumerate(pytree.flatten_with_path(out)[0])
        if position not in handed and not (leaf.is_floating_point() or leaf.is_complex())
    ]
    if rows:
        kept = (
            'buffers as a keyword argument, `microbatches(k, carry="buffers")`, `grads_of(params, batch, '
            'buffers=buffers)`, and in the function `return loss, {"buffers": new_buffers}`; '
            if carry is None
            else ""
        )
        raise LayoutError.of(
            name,
            "returns whole numbers, which cannot be averaged over micro-batches.",
            rows=rows,
            why="A sum would be right for what a slice counts, and wrong for what it counts up, as batch norm does.",
            fix=f"{kept}{'or ' if kept else ''}a count as `n.float()`, whose mean times the number of slices is its "
            'sum; or sum all of it, `microbatches(k, reduce="sum")`.',
        )
