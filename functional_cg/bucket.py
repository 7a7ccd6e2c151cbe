"""Bucket: pad batches of any length to one of a few sizes, so that a step captures one graph per size."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from . import tree as pytree
from .errors import LayoutError

__all__ = ["Buckets", "bucket"]

B = TypeVar("B")


def bucket(
    loader: Iterable[B],
    *,
    sizes: Sequence[int],
    axis: int = 1,
    pad: float | Mapping[str, float] = 0,
    mask: str = "mask",
    lengths: str | None = None,
) -> Buckets[B]:
    """Iterate over the batches of a loader, padded on the host to the next of ``sizes``.

    A graph has fixed shapes: with ``graph_step(max_captures=len(sizes))`` a step captures one for each size, and
    ``step.explain()`` lists them. Every tensor or array that has ``axis`` is padded at its end and arrives as a tensor;
    the others, such as labels of one number per row, pass through unchanged. All padded leaves agree in length.

    Which elements are data is a bool tensor: in a batch that is a dict, under the name ``mask``; any other batch
    arrives as the pair ``(batch, mask)``. Weight the loss with it: ``(loss * mask).sum() / mask.sum()``.

    Args:
      loader: Any iterable of batches (trees of tensors and arrays): a ``DataLoader``, a list.
      sizes: Lengths to pad to. A batch takes the smallest that fits.
      axis: Axis that is padded: 1 for sequences of shape (rows, length, ...), 0 for a short last batch.
      pad: Number to pad with, or numbers by key, such as ``{"labels": -100}``; keys that are left out get 0.
      mask: Key of the mask in a batch that is a dict.
      lengths: Key of the lengths of the rows, i64[rows], if the batch is padded to its longest row already.
    Returns:
      An iterable over the padded batches, as often as the loader is one. Its mask has shape (size,) for axis 0,
      else (rows, size). ``counts`` has the batches of each size so far, and ``waste`` the fraction of padding.
    Raises:
      ValueError: If ``sizes`` are not positive integers, or ``axis`` is negative; in the loop, if the batch has
        the key ``mask`` already.
      LayoutError: In the loop, if a batch is longer than every size, leaves disagree in length, or none has ``axis``.

    Example:
      >>> import torch, functional_cg as fcg
      >>> loader = [{"x": torch.ones(2, length), "y": torch.ones(2)} for length in (3, 8, 5)]
      >>> batches = fcg.bucket(loader, sizes=(4, 8))
      >>> [tuple(batch["x"].shape) for batch in batches]
      [(2, 4), (2, 8), (2, 8)]
      >>> batches.counts, round(batches.waste, 2)
      ({4: 1, 8: 2}, 0.2)
    """
    if not sizes or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
        raise ValueError(f"bucket: sizes must be positive integers, got {sizes!r}")
    if axis < 0:
        raise ValueError(f"bucket: axis must not be negative, got {axis}. To fix: count it from the front.")
    return Buckets(loader, tuple(sorted(set(sizes))), axis, pad, mask, lengths)


class Buckets(Generic[B]):
    """What :func:`bucket` returns: an iterable over padded batches.

    Attributes:
      counts: Number of batches so far, by size.
    """

    def __init__(
        self,
        loader: Iterable[B],
        sizes: tuple[int, ...],
        axis: int,
        pad: float | Mapping[str, float],
        mask: str,
        lengths: str | None,
    ) -> None:
        self._loader, self._sizes, self._axis = loader, sizes, axis
        self._pad, self._mask, self._lengths = pad, mask, lengths
        self.counts = dict.fromkeys(sizes, 0)
        self._data = self._all = 0

    @property
    def waste(self) -> float:
        """Fraction of elements along the padded axis that were padding, over all batches so far."""
        return 1 - self._data / self._all if self._all else 0.0

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self._loader):
            yield self._padded(batch, number)

    def _padded(self, batch: B, number: int) -> Any:
        flat, treedef = pytree.flatten_with_path(batch)
        paths = [pytree.path_string(path, "batch") for path, _ in flat]
        leaves = [leaf for _, leaf in flat]
        found = [i for i, leaf in enumerate(leaves) if getattr(leaf, "ndim", 0) > self._axis]
        length = self._length([(paths[i], leaves[i].shape[self._axis]) for i in found], number)
        size = self._sizes[bisect_left(self._sizes, length)]
        real = self._real(batch, leaves[found[0]].shape[: self._axis][:1], length, size)
        for i in found:
            leaves[i] = self._filled(leaves[i], size - length, self._number(flat[i][0]))
        self.counts[size] += 1
        self._data += int(real.sum())
        self._all += real.numel()
        padded = pytree.unflatten(treedef, leaves)
        if not isinstance(batch, Mapping):
            return padded, real
        if self._mask in batch:
            raise ValueError(
                f"bucket: batch {number} has a {self._mask!r} already. To fix: name the other, `mask='padding'`."
            )
        return {**padded, self._mask: real}

    def _length(self, lengths: Sequence[tuple[str, int]], number: int) -> int:
        """Return the length that all leaves have."""
        if not lengths:
            raise LayoutError.of(
                "",
                f"bucket: batch {number} has no tensor or array with axis {self._axis}.",
                fix="pass `axis=0` to pad rows, or collate the samples, `DataLoader(..., collate_fn=...)`.",
            )
        first, length = lengths[0]
        for path, other in lengths[1:]:
            if other != length:
                raise LayoutError.of(
                    "",
                    f"bucket: the leaves of batch {number} differ in length along axis {self._axis}.",
                    rows=[f"{first}  {length}", f"{path}  {other}"],
                    why="One mask tells data from padding in all of them.",
                    fix=f"pad them to one length, or take `{path}` out of the batch.",
                )
        if length > self._sizes[-1]:
            raise LayoutError.of(
                "",
                f"bucket: batch {number} is longer than every size; nothing is cut off.",
                rows=[f"{first}  expected at most {self._sizes[-1]}   got {length}"],
                fix=f"add a size, `sizes={(*self._sizes, length)}`, or shorten the batch.",
            )
        return length

    def _real(self, batch: Any, rows: Sequence[int], length: int, size: int) -> Tensor:
        """Return which elements are data: of shape (size,) for axis 0, else (rows, size)."""
        positions = torch.arange(size)
        if self._lengths is None or self._axis == 0:
            return (positions < length).expand(*rows, size).clone()
        each = torch.as_tensor(batch[self._lengths]).cpu()
        if int(each.max()) > length:
            raise LayoutError.of(
                "",
                "bucket: a row is longer than its batch.",
                rows=[f"batch[{self._lengths!r}]  expected at most {length}   got {int(each.max())}"],
                why="The mask would take padding for data.",
                fix=f"count what the batch holds along axis {self._axis}.",
            )
        return positions < each[:, None]

    def _number(self, path: pytree.KeyPath) -> float:
        if not isinstance(self._pad, Mapping):
            return self._pad
        keys = [getattr(entry, "key", getattr(entry, "name", None)) for entry in path]
        return next((self._pad[key] for key in reversed(keys) if key in self._pad), 0)

    def _filled(self, leaf: Any, missing: int, number: float) -> Tensor:
        tensor = torch.as_tensor(leaf)
        shape = [*tensor.shape[: self._axis], missing, *tensor.shape[self._axis + 1 :]]
        return torch.cat([tensor, tensor.new_full(shape, number)], dim=self._axis) if missing else tensor
