"""Batches of many lengths: padded to a few sizes, with one capture per size; or packed into one row of one size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import tree as pytree
from .errors import LayoutError
from .state.arena import BufferSpec
from .state.leaf import as_tensor
from .tree import path_string

__all__ = ["Buckets", "bucket", "pack"]

_Number = int | float | bool


def bucket(
    loader: Iterable[Any],
    *,
    sizes: Iterable[int],
    dim: int = 1,
    pad: _Number | Mapping[Any, _Number] = 0,
    mask: str | None = "mask",
) -> Buckets:
    """Pad each batch of a loader to the next of a few sizes, and add a mask of what is not padding.

    A graph has fixed shapes, so a step needs one capture per size: ``graph_step(max_captures=len(sizes))``, and
    ``step.explain()`` lists the sizes captured so far. Padding is appended, on the device where the batch is, normally
    the host. The mask is True where the batch was: bool[batch, size] with ``dim=1``, bool[size] with ``dim=0``.

    A batch is a dict, a tuple or list, or a single tensor. Padded are all tensors and arrays in it that have dimension
    ``dim``, or with a mapping ``pad`` those named in it. They arrive as contiguous copies, pinned if they were; the
    rest passes through unchanged. In a dict, the mask is under its name; otherwise it is the last element of a tuple.

    A dict that has an entry of that name already, such as the ``attention_mask`` of a tokenizer, keeps it, padded with
    zeros. So calls compose: ``bucket(bucket(loader, sizes=lengths), sizes=[64], dim=0)`` also pads a short last batch.

    Args:
      loader: Any iterable of batches: a ``DataLoader``, a generator, a list.
      sizes: The lengths to pad to, in any order.
      dim: The dimension that is padded: 1 for sequences in a batch, 0 for a short last batch.
      pad: The value to pad with; or one for each entry that is padded, by key or position:
        ``{"tokens": 0, "labels": -100}``.
      mask: Name of the mask in a dict; None for no mask.
    Returns:
      An iterable of the padded batches, in order; it has a length if the loader has one. Its ``waste`` is the fraction
      of padding in all batches so far.
    Raises:
      LayoutError: In the loop, if a batch is longer than the largest size, lacks what is to be padded, or has
        tensors of different lengths.
      TypeError: If ``loader`` is not iterable or an argument is of the wrong type; in the loop, if a batch is of
        another type than above.
      ValueError: If ``sizes`` is empty or has a size below 1, or ``dim`` is negative; in the loop, if a dtype cannot
        hold the value to pad with, or ``pad`` names an entry that a batch lacks.

    Example:
      >>> import torch, functional_cg as fcg
      >>> batches = fcg.bucket([{"x": torch.ones(2, 3)}, {"x": torch.ones(2, 7)}], sizes=[4, 8])
      >>> for batch in batches:
      ...     print(batch["x"].shape, batch["mask"].sum(dim=1))
      torch.Size([2, 4]) tensor([3, 3])
      torch.Size([2, 8]) tensor([7, 7])
      >>> f"{batches.waste:.2f}"  # 4 of 24 elements
      '0.17'
    """
    if not isinstance(loader, Iterable):
        raise TypeError(
            f"bucket: expected an iterable of batches, got {type(loader).__name__}.\n"
            "To fix: `fcg.bucket(loader, sizes=...)`, with a `DataLoader`, or a list of batches."
        )
    chosen = sorted(set(sizes)) if isinstance(sizes, Iterable) else []
    if not chosen or any(type(size) is not int or size < 1 for size in chosen):
        raise ValueError(
            f"bucket: sizes must be positive integers, got {sizes!r}. To fix: `sizes=[64, 128]`."
        )
    if type(dim) is not int or dim < 0:
        raise ValueError(f"bucket: dim must be 0 or a positive integer, got {dim!r}")
    if not isinstance(pad, int | float | Mapping):
        raise TypeError(f"bucket: pad must be a number, or a number for each entry, got {pad!r}")
    if not isinstance(mask, str | None):
        raise TypeError(f"bucket: mask must be a name or None, got {mask!r}")
    return Buckets(loader, chosen, dim, pad, mask)


def pack(sequences: Iterable[Any], *, capacity: int, max_sequences: int, pad: int = 0) -> dict[str, Tensor]:
    """Pack token sequences of any lengths into one row of fixed length, for one capture and little padding.

    The shapes depend on ``capacity`` and ``max_sequences`` alone. The padding at the end counts as one more sequence,
    so attention over it is finite; its labels are -100, which ``cross_entropy`` ignores. To keep attention within each
    sequence, compare ``documents`` in the step, as below, or pass ``cu_seqlens`` to a kernel for variable lengths.

    To pack the batches of a ``DataLoader``: ``collate_fn=partial(fcg.pack, capacity=4096, max_sequences=32)``.

    Args:
      sequences: Tensors or arrays of integers, 1-dim, on one device.
      capacity: Length of the row, in tokens.
      max_sequences: The most sequences that a row may hold.
      pad: The token to pad with.
    Returns:
      A dict with ``tokens`` [1, capacity]; ``labels`` i64[1, capacity], the next token of the same sequence, or -100;
      ``positions`` i64[1, capacity], from 0 in each sequence; ``documents`` i64[1, capacity], the number of the
      sequence; and ``cu_seqlens`` i32[max_sequences + 2], where each begins, then ``capacity``.
    Raises:
      LayoutError: If the sequences do not fit.
      TypeError: If there are none, or one is not a 1-dim tensor or array of integers.
      ValueError: If ``capacity`` or ``max_sequences`` is not a positive integer, or the tokens cannot hold ``pad``.

    Example:
      >>> import torch, functional_cg as fcg
      >>> batch = fcg.pack([torch.tensor([5, 6, 7]), torch.tensor([8, 9])], capacity=6, max_sequences=3)
      >>> batch["tokens"], batch["labels"]
      (tensor([[5, 6, 7, 8, 9, 0]]), tensor([[   6,    7, -100,    9, -100, -100]]))
      >>> batch["positions"], batch["documents"], batch["cu_seqlens"].tolist()
      (tensor([[0, 1, 2, 0, 1, 0]]), tensor([[0, 0, 0, 1, 1, 2]]), [0, 3, 5, 6, 6])
      >>> same = batch["documents"][:, None, :, None] == batch["documents"][:, None, None, :]
      >>> q = k = v = torch.ones(1, 2, 6, 4)
      >>> torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=same.tril()).shape
      torch.Size([1, 2, 6, 4])
    """
    for name, number, least in (
        ("capacity", capacity, 1),
        ("max_sequences", max_sequences, 1),
        ("pad", pad, None),
    ):
        if type(number) is not int or (least is not None and number < least):
            kind = "an integer" if least is None else "a positive integer"
            raise ValueError(f"pack: {name} must be {kind}, got {number!r}. To fix: `{name}={least or 0}`.")
    tensors = [as_tensor(one) for one in sequences]
    if not tensors or not all(
        isinstance(one, Tensor) and one.dim() == 1 and _is_integral(one) for one in tensors
    ):
        kinds = ", ".join(
            str(BufferSpec.of(one)) if isinstance(one, Tensor) else type(one).__name__ for one in tensors[:5]
        )
        raise TypeError(
            f"pack: expected 1-dim tensors of integers, got {kinds or 'none'}. To fix: `fcg.pack(rows, ...)`, with "
            "a list of the tokens of each sequence, `[torch.tensor([5, 6, 7]), torch.tensor([8, 9])]`."
        )
    lengths = [len(one) for one in tensors]
    free = capacity - sum(lengths)
    if free < 0 or len(lengths) > max_sequences:
        raise LayoutError.of(
            "pack",
            "the sequences do not fit in one row.",
            rows=[
                f"tokens     expected at most {capacity}   got {sum(lengths)}",
                f"sequences  expected at most {max_sequences}   got {len(lengths)}",
            ],
            why="A captured graph has fixed shapes, and nothing is cut off silently.",
            fix="make the batches of the loader smaller; or "
            f"`capacity={max(capacity, sum(lengths))}, max_sequences={max(max_sequences, len(lengths))}`.",
        )
    first = tensors[0]
    tokens = torch.cat([*tensors, first.new_empty(free)])
    if not _holds(tokens.dtype, pad):
        raise ValueError(
            f"pack: the tokens are {BufferSpec.of(tokens)}, which cannot hold pad={pad}.\n"
            "To fix: `pad=0`; or convert them, `x.long()`."
        )
    tokens[capacity - free :] = pad
    counts = torch.tensor([0, *lengths, free, *[0] * (max_sequences - len(lengths))], device=first.device)
    starts = counts.cumsum(0)
    documents = torch.arange(max_sequences + 1, device=first.device).repeat_interleave(counts[1:])
    positions = torch.arange(capacity, device=first.device) - starts[documents]
    goes_on = (positions.roll(-1) > 0) & (documents < len(lengths))  # the row's first position is 0, too
    labels = torch.where(goes_on, tokens.roll(-1).long(), -100)
    rows = {"tokens": tokens, "labels": labels, "positions": positions, "documents": documents}
    return {name: row[None] for name, row in rows.items()} | {"cu_seqlens": starts.int()}


class Buckets(Iterable[Any]):
    """The batches of a loader, padded; see :func:`bucket`.

    Attributes:
      sizes: The lengths that are padded to, in ascending order.
      waste: Fraction of padding in all batches so far, 0.0 before the first.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        sizes: Sequence[int],
        dim: int,
        pad: _Number | Mapping[Any, _Number],
        mask: str | None,
    ) -> None:
        self.sizes = tuple(sizes)
        self._loader, self._dim, self._pad, self._mask = loader, dim, pad, mask
        self._elements = self._padding = 0

    @property
    def waste(self) -> float:
        return self._padding / self._elements if self._elements else 0.0

    def __len__(self) -> int:
        if not isinstance(self._loader, Sized):
            raise TypeError(f"bucket: a {type(self._loader).__name__} has no length")
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return map(self._padded, self._loader)

    def __repr__(self) -> str:
        return f"<bucket: sizes {', '.join(map(str, self.sizes))}; waste {self.waste:.0%}>"

    def _padded(self, batch: Any) -> Any:
        entries = _entries(batch)
        values = self._values(entries)
        flat, treedef = pytree.flatten(entries)
        found = self._found(treedef.paths(), flat, values)
        length = self._length(found)
        size = self._size(length, found)
        for leaf in found:
            flat[leaf.place] = _extended(leaf, self._dim, size, values[leaf.entry])
        first = flat[found[0].place]
        shape = first.shape[: self._dim + 1]
        self._elements += shape.numel()
        self._padding += shape.numel() // size * (size - length)
        padded = pytree.unflatten(treedef, flat)
        if self._mask is not None and self._mask not in padded:
            real = torch.arange(size, device=first.device) < length
            padded[self._mask] = real.expand(shape).contiguous()
        if isinstance(batch, Mapping):
            return padded
        parts = tuple(padded.values())
        return parts if len(parts) > 1 or isinstance(batch, tuple | list) else parts[0]

    def _values(self, entries: Mapping[Any, Any]) -> dict[Any, _Number]:
        """Return the value to pad with for each entry that is padded."""
        values = dict(self._pad) if isinstance(self._pad, Mapping) else dict.fromkeys(entries, self._pad)
        if missing := [name for name in values if name not in entries]:
            raise ValueError(
                f"bucket: `pad` names {missing[0]!r}, but a batch has {', '.join(map(repr, entries))}. "
                "To fix: name its entries by key, or by position in a tuple."
            )
        return values | {self._mask: 0} if self._mask in entries else values

    def _found(
        self, paths: Iterable[Any], flat: Iterable[Any], values: Mapping[Any, _Number]
    ) -> list[_Found]:
        """Return the tensors of a batch that are padded."""
        found = []
        for place, (path, leaf) in enumerate(zip(paths, flat, strict=True)):
            tensor = as_tensor(leaf)
            if path[0].key in values and isinstance(tensor, Tensor) and tensor.dim() > self._dim:
                found.append(_Found(place, path[0].key, path_string(path, "batch"), tensor))
        required = values if isinstance(self._pad, Mapping) or not found else {self._mask} & set(values)
        if lacking := [str(entry) for entry in required if entry not in {leaf.entry for leaf in found}]:
            raise self._nothing_in(f"`{lacking[0]}` of a batch")
        if not found:
            raise self._nothing_in("a batch")
        return found

    def _nothing_in(self, what: str) -> LayoutError:
        return LayoutError.of(
            "bucket",
            f"{what} has no tensor with dimension {self._dim} to pad.",
            fix="name the dimension, `dim=0`; what is padded, `pad={'tokens': 0}`; or another `mask`.",
        )

    def _length(self, found: Sequence[_Found]) -> int:
        """Return the length of a batch, the same for all that is padded."""
        lengths = [leaf.tensor.shape[self._dim] for leaf in found]
        if len(set(lengths)) > 1:
            raise LayoutError.of(
                "bucket",
                f"the tensors of a batch have different lengths along dimension {self._dim}.",
                rows=[str(leaf) for leaf in found],
                why="One mask has to fit them all.",
                fix=f"name those that are padded, `pad={{{found[0].entry!r}: 0}}`.",
            )
        return lengths[0]

    def _size(self, length: int, found: Sequence[_Found]) -> int:
        """Return the smallest size that a batch fits in."""
        for size in self.sizes:
            if length <= size:
                return size
        raise LayoutError.of(
            "bucket",
            f"a batch is longer than the largest size, {self.sizes[-1]}.",
            rows=[str(leaf) for leaf in found],
            why="Nothing is cut off silently.",
            fix=f"add a size, `sizes={[*self.sizes, length]}`; or shorten the batch in the loader.",
        )


class _Found(NamedTuple):
    """A tensor to pad: its place among the leaves, its entry of the batch, its key path."""

    place: int
    entry: Any
    path: str
    tensor: Tensor

    def __str__(self) -> str:
        return f"{self.path}  {BufferSpec.of(self.tensor)}"


def _entries(batch: Any) -> dict[Any, Any]:
    """Return what a batch consists of, by key or position."""
    if isinstance(batch, Mapping):
        return dict(batch)
    if type(batch) in (tuple, list):
        return dict(enumerate(batch))
    if isinstance(as_tensor(batch), Tensor):
        return {0: batch}
    raise TypeError(
        f"bucket: a batch has to be a dict, a tuple, a list or a tensor, got {type(batch).__name__}. "
        "To fix: make it a dict in the loader, `{'x': batch.x}`."
    )


def _extended(leaf: _Found, dim: int, size: int, value: _Number) -> Tensor:
    """Return a padded copy of a tensor; contiguous, since strides are part of a capture's layout."""
    tensor = leaf.tensor
    length = tensor.shape[dim]
    if length < size and not _holds(tensor.dtype, value):
        raise ValueError(
            f"bucket: {leaf.path} is {BufferSpec.of(tensor)}, which cannot hold {value}. "
            "To fix: pad with another value, `pad=0`; or convert it in the loader, `x.long()`."
        )
    shape = (*tensor.shape[:dim], size, *tensor.shape[dim + 1 :])
    padded = torch.empty(shape, dtype=tensor.dtype, device=tensor.device, pin_memory=tensor.is_pinned())
    padded.narrow(dim, 0, length).copy_(tensor)
    padded.narrow(dim, length, size - length).fill_(value if length < size else 0)
    return padded


def _is_integral(tensor: Tensor) -> bool:
    return not (tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype is torch.bool)


def _holds(dtype: torch.dtype, value: _Number) -> bool:
    """Whether a value keeps its meaning in a dtype; floating dtypes round it."""
    try:
        held = torch.full((), value, dtype=dtype, device="cpu").item()
    except RuntimeError:
        return False
    rounds = dtype.is_floating_point or dtype.is_complex
    return held == value or (rounds and (math.isfinite(abs(held)) == math.isfinite(value)))
