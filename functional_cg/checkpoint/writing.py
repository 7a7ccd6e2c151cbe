"""Write a checkpoint: one file per rank into a temporary folder, which rank 0 gives its index and its name."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..errors import RankError
from .disk import BlockWriter, FolderLock, checksum, sync_directory, write_whole
from .index import INDEX, Index, Piece, StoredFile, file_name
from .naming import complete, next_name, temporary, temporary_name
from .snapshot import Copy

__all__ = ["write"]

T = TypeVar("T")
_Written = tuple[StoredFile, dict[str, Piece]]


def write(
    folder: Path, step: int, copy: Copy, position: bytes, group: Any, keep: int | None, lock: FolderLock
) -> None:
    """Write a checkpoint into a folder, with all ranks of a group; on return it is complete.

    Args:
      folder: That of all checkpoints.
      step: Of training.
      copy: What this rank writes.
      position: Of this rank's loader, or empty.
      group: The process group; None for a single process.
      keep: How many of the last checkpoints stay.
      lock: Taken by rank 0.
    Raises:
      BusyError: If another process writes into the folder.
      Exception: On all ranks, that of the first one that failed; nothing is left in the folder.
      RankError: If ranks save different things.
    """
    rank = 0 if group is None else dist.get_rank(group)
    leaves = checksum(repr(sorted(copy.types.items())).encode())
    _refuse_unlike(_on_each(group, lambda: (step, leaves)))
    name = temporary_name()
    try:
        name = _on_each(group, lambda: _prepared(folder, name, lock) if rank == 0 else "")[0]
        written = _on_each(group, lambda: _written(folder / name, rank, copy, position))
        _on_each(group, lambda: None if rank else _complete(folder / name, step, copy, written, keep))
    finally:
        if rank == 0:  # after a failure; what is complete has another name
            shutil.rmtree(folder / name, ignore_errors=True)


def _on_each(group: Any, act: Callable[[], T]) -> list[T]:
    """Act on each rank of a group, and return what each has returned; or raise on all what the first one raised."""
    own: list[Any] = [None, None]
    try:
        own[0] = act()
    except Exception as error:
        own[1] = error if group is None else _sendable(error)
    said = [own]
    if group is not None:
        said = [own] * dist.get_world_size(group)
        dist.all_gather_object(said, own, group)
    for rank, (_, failure) in enumerate(said):
        if failure is not None:
            if group is not None:
                failure.add_note(f"The checkpoint was not written: this happened on rank {rank}.")
            raise failure
    return [found for found, _ in said]


def _sendable(error: Exception) -> Exception:
    """Return an error as other ranks get it; one that cannot be pickled would leave them waiting."""
    try:
        return pickle.loads(pickle.dumps(error))  # type: ignore[no-any-return]
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


def _refuse_unlike(said: list[tuple[int, str]]) -> None:
    rows = [f"rank {rank}  step {step}" for rank, (step, _) in enumerate(said)]
    if len(set(said)) > 1:
        raise RankError.of(
            "",
            "checkpoints: ranks are about to save different things; nothing was written.",
            rows=rows if len({step for step, _ in said}) > 1 else ["their leaves have other names or types"],
            why="The shards of two steps are no state.",
            fix="call `save` on all ranks, at the same step.",
        )


def _prepared(folder: Path, name: str, lock: FolderLock) -> str:
    """Take the folder, remove what a run that was killed has left, and make a temporary folder; return its name."""
    folder.mkdir(parents=True, exist_ok=True)
    lock.take(folder)
    for left in temporary(folder):
        shutil.rmtree(left)
    (folder / name).mkdir()
    return name


def _written(folder: Path, rank: int, copy: Copy, position: bytes) -> _Written:
    """Write a rank's file; return what is in it."""
    try:
        blocks = BlockWriter(folder / file_name(rank))
    except FileNotFoundError:
        _refuse_lost(folder)
        raise
    done, pieces = False, {}
    try:
        for name, part in copy.parts.items():
            offset = blocks.write(part.data.view(torch.uint8))
            pieces[name] = Piece(part.start, len(part.data), rank, offset)
        if position:
            blocks.write(torch.frombuffer(bytearray(position), dtype=torch.uint8))
        done = True
    finally:
        blocks.close(sync=done)
    return StoredFile(blocks.size, tuple(blocks.checksums), len(position)), pieces


def _complete(folder: Path, step: int, copy: Copy, written: list[_Written], keep: int | None) -> None:
    """Write the index, give the temporary folder its name, and remove checkpoints that are too many."""
    _refuse_lost(folder)
    for rank, (file, _) in enumerate(written):
        path = folder / file_name(rank)
        if not path.exists() or path.stat().st_size != file.size:
            raise OSError(
                f"checkpoints: rank 0 does not see {path}, which rank {rank} has written. "
                "To fix: a folder on a file system that all machines share."
            )
    every = {name: [pieces[name] for _, pieces in written if name in pieces] for name in copy.types}
    ordered = {name: sorted(pieces, key=lambda piece: piece.start) for name, pieces in every.items()}
    index = Index(step, copy.types, ordered, [file for file, _ in written])
    write_whole(folder / INDEX, index.dump())
    sync_directory(folder)
    home = folder.parent
    there = complete(home)
    os.rename(folder, home / next_name(home, step))
    sync_directory(home)
    if keep is not None:
        for old in sorted(there)[: max(len(there) + 1 - keep, 0)]:
            gone = home / temporary_name()
            os.rename(there[old][1], gone)  # at once: what is half deleted is no checkpoint
            shutil.rmtree(gone)


def _refuse_lost(folder: Path) -> None:
    if not folder.is_dir():
        raise OSError(
            f"checkpoints: what was being written in {folder.parent} is gone: someone else saves there, too, and has "
            "removed it as the remains of a run that was killed. The last complete checkpoint is whole.\n"
            "To fix: one `fcg.checkpoints` for each folder; another run saves in a folder of its own."
        )
