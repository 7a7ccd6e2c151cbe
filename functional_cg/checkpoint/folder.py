"""Read a checkpoint: any number of ranks, each what it holds."""

from __future__ import annotations

import errno
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from ..ambient.modes import ordinary, without_gradients
from ..shards.tensor import Sharded, placed
from ..state.arena import dtype_name
from .disk import BlockReader, damaged
from .index import INDEX, Index, Piece, file_name
from .matching import Part, check_range, matched
from .naming import complete

__all__ = ["found_in", "position_in", "values_in"]


def found_in(folder: Path, function: str, step: int | None = None) -> Path:
    """Return a checkpoint: the folder itself, or the last one in it, or the last one of a step.

    Raises:
      FileNotFoundError: If there is none.
    """
    if (folder / INDEX).is_file():
        return folder
    there = [path for found, path in complete(folder).values() if step in (None, found)]
    if not there:
        what = "no complete checkpoint" if step is None else f"no complete checkpoint of step {step}"
        raise FileNotFoundError(errno.ENOENT, f"{function}: {what} is in the folder", str(folder))
    return there[-1]


def values_in(
    folder: Path,
    slots: Mapping[str, Tensor],
    optional: Collection[str],
    function: str,
    part: Part,
    *,
    cast: bool,
) -> dict[str, Tensor]:
    """Read what this rank holds of leaves that are asked for, into host memory; the leaves are not written to.

    Raises:
      LayoutError: If it is the checkpoint of another model.
      OSError: If a file cannot be read.
      ValueError: Naming the file, if it is damaged.
    """
    index = Index.read(folder)
    found = matched(slots, index.types, function, f" in {folder}", part, cast=cast, optional=optional)
    dtypes = {dtype_name(one): one for one in vars(torch).values() if isinstance(one, torch.dtype)}
    values: dict[str, Tensor] = {}
    with _Files(folder, index) as files, ordinary():
        without_gradients()
        for name, source in found.items():
            slot, pieces = slots[name], index.pieces[source]
            dtype = dtypes[index.types[source].partition("[")[0]]
            _check_cover(folder, source, math.prod(slot.shape), pieces)
            placement = placed(slot)
            if placement is not None and placement.partial:
                start, count, length = placement.start, placement.elements, placement.length
            else:
                placement, start, count, length = None, 0, slot.numel(), slot.numel()
            flat = torch.zeros(length, dtype=dtype, device="cpu")
            raw, size = flat.view(torch.uint8), dtype.itemsize
            for piece in pieces:
                first = max(start, piece.start)
                last = min(start + count, piece.start + piece.count)
                if first < last:
                    place = piece.offset + (first - piece.start) * size
                    files.read(piece.file, place, raw[(first - start) * size : (last - start) * size])
            values[name] = (
                flat.view(slot.shape)
                if placement is None
                else Sharded(flat.view(placement.local_shape), placement)
            )
        check_range(slots, values, function)
    return values


def position_in(folder: Path, rank: int, ranks: int) -> bytes:
    """Read the position of a rank's loader.

    Raises:
      ValueError: If there is none, or it is one of another number of ranks.
    """
    index = Index.read(folder)
    if not any(file.position for file in index.files):
        raise ValueError(
            f"checkpoints: {folder} holds no position of a loader. To fix: `save(state, loader=loader)`; or load the "
            "state alone, `load(state)`, and begin the epoch again."
        )
    if len(index.files) != ranks:
        raise ValueError(
            f"checkpoints: {folder} holds the positions of {len(index.files)} loaders, one per rank, and this run has "
            f"{ranks}. To fix: load the state alone, `load(state)`, and begin the epoch again; or start as many ranks."
        )
    file = index.files[rank]
    with _Files(folder, index) as files:
        files.open(rank)  # the file has the size that the index says, before memory is taken for a part of it
        text = torch.zeros(file.position, dtype=torch.uint8)
        files.read(rank, file.size - file.position, text)
    return bytes(text.tolist())


def _check_cover(folder: Path, name: str, numel: int, pieces: Sequence[Piece]) -> None:
    end = 0
    for piece in pieces:
        if piece.start != end:
            break
        end += piece.count
    else:
        if end == numel:
            return
    raise damaged(folder / INDEX, f"contradicts itself (elements of {name!r})")


class _Files:
    """The files of a checkpoint, opened when something in them is read."""

    def __init__(self, folder: Path, index: Index) -> None:
        self._folder, self._index = folder, index
        self._open: dict[int, BlockReader] = {}
        self._stack = ExitStack()

    def open(self, number: int) -> BlockReader:
        if number not in self._open:
            stored, path = self._index.files[number], self._folder / file_name(number)
            reader = BlockReader(path, stored.size, self._index.block, stored.checksums)
            self._stack.callback(reader.close)
            self._open[number] = reader
        return self._open[number]

    def read(self, number: int, start: int, out: Tensor) -> None:
        if start + len(out) > self._index.files[number].size:
            raise damaged(self._folder / INDEX, "contradicts itself (sizes)")
        self.open(number).read(start, out)

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()
