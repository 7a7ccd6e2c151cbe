"""The engine: ``torch.distributed.checkpoint`` plans who writes and reads what; these classes map our leaves to it.

To the engine each leaf is a vector, the leaf flattened, and what a rank writes of it is a shard along dimension 0.
Imported with the first checkpoint: the engine takes longer to import than the rest of the package.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ..errors import RankError
from .disk import BlockWriter, FolderLock, checksum, sync_directory, write_whole
from .index import INDEX, Index, Piece, StoredFile, file_name
from .naming import complete, next_name, temporary, temporary_name
from .snapshot import Copy, Part

__all__ = ["overlaps", "write"]

_Results = Sequence[Sequence[WriteResult]]


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
      CheckpointException: With the exceptions of each rank; nothing is left in the folder. A single process raises its
        own.
    """
    planner, writer = _Planner(step, copy), _Writer(folder, step, copy.types, position, keep, lock)
    try:
        if group is not None:
            save({}, storage_writer=writer, planner=planner, process_group=group)
            return
        # What `save` does without a group, where it warns that there is none.
        planner.set_up_planner({}, is_coordinator=True)
        (plan,), metadata = planner.create_global_plan([planner.create_local_plan()])
        (plan,) = writer.prepare_global_plan([plan])
        writer.finish(metadata, [writer.write_data(planner.finish_plan(plan), planner).wait()])
    finally:
        writer.clean_up()


def overlaps(
    name: str, start: int, count: int, dtype: torch.dtype, pieces: Sequence[Piece]
) -> Iterator[tuple[Piece, int, int, int]]:
    """Yield (piece, first element in it, first element of ours, count) for each piece that our elements lie in."""
    chunks = [ChunkStorageMetadata(torch.Size([piece.start]), torch.Size([piece.count])) for piece in pieces]
    numel = pieces[-1].start + pieces[-1].count if pieces else 0
    stored = TensorStorageMetadata(TensorProperties(dtype), torch.Size([numel]), chunks)
    ours = ChunkStorageMetadata(torch.Size([start]), torch.Size([count]))
    for item in create_read_items_for_chunk_list(name, stored, [ours]) if count else ():
        piece = pieces[item.storage_index.index or 0]
        yield piece, item.storage_offsets[0], item.dest_offsets[0], item.lengths[0]


class _Planner(DefaultSavePlanner):
    """Plans the parts of a copy; all ranks must have copied the same step of the same state."""

    def __init__(self, step: int, copy: Copy) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts = copy.parts
        self._said = (step, checksum(repr(sorted(copy.types.items())).encode()))

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(
            [_item(name, part) for name, part in self._parts.items()], planner_data=self._said
        )
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        said = [plan.planner_data for plan in all_plans]
        rows = [f"rank {rank}  step {step}" for rank, (step, _) in enumerate(said)]
        if len(set(said)) > 1:
            raise RankError.of(
                "",
                "checkpoints: ranks are about to save different things; nothing was written.",
                rows=rows
                if len({step for step, _ in said}) > 1
                else ["their leaves have other names or types"],
                why="The shards of two steps are no state.",
                fix="call `save` on all ranks, at the same step.",
            )
        return super().create_global_plan(all_plans)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._parts[index.fqn].data


def _item(name: str, part: Part) -> WriteItem:
    place = torch.Size([part.start])
    chunk = ChunkStorageMetadata(place, part.data.shape)
    data = TensorWriteData(chunk, TensorProperties(part.data.dtype), torch.Size([part.numel]))
    return WriteItem(MetadataIndex(name, place), WriteItemType.SHARD, tensor_data=data)


class _Writer(StorageWriter):
    """Writes one file per rank into a temporary folder. Rank 0 writes the index and renames the folder."""

    def __init__(
        self,
        folder: Path,
        step: int,
        types: Mapping[str, str],
        position: bytes,
        keep: int | None,
        lock: FolderLock,
    ) -> None:
        self._folder, self._step, self._types = folder, step, types
        self._position, self._keep, self._lock = position, keep, lock
        self._temporary: Path | None = None

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock.take(self._folder)
        for left in temporary(self._folder):  # by a run that was killed
            shutil.rmtree(left)
        self._temporary = self._folder / temporary_name()
        self._temporary.mkdir()
        return [replace(plan, storage_data=(self._temporary.name, rank)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name, rank = plan.storage_data
        try:
            blocks = BlockWriter(self._folder / name / file_name(rank))
        except FileNotFoundError:
            self._refuse_lost(name)
            raise
        done = False
        try:
            results = []
            for item in plan.items:
                data = planner.resolve_data(item)
                raw = data.view(torch.uint8)  # type: ignore[union-attr]
                results.append(WriteResult(item.index, len(raw), blocks.write(raw)))
            if self._position:
                blocks.write(torch.frombuffer(bytearray(self._position), dtype=torch.uint8))
            done = True
        finally:
            blocks.close(sync=done)
        stored = StoredFile(blocks.size, tuple(blocks.checksums), len(self._position))
        future: Future[list[WriteResult]] = Future()
        future.set_result([*results, WriteResult(MetadataIndex(""), blocks.size, stored)])
        return future

    def finish(self, metadata: Metadata, results: _Results) -> None:
        if self._temporary is None:
            raise RuntimeError("finish comes after prepare_global_plan")
        self._refuse_lost(self._temporary.name)
        files = [of_rank[-1].storage_data for of_rank in results]
        for rank, file in enumerate(files):
            path = self._temporary / file_name(rank)
            if not path.exists() or path.stat().st_size != file.size:
                raise OSError(
                    f"checkpoints: rank 0 does not see {path}, which rank {rank} has written. "
                    "To fix: a folder on a file system that all machines share."
                )
        index = Index(self._step, self._types, self._pieces(metadata, results), files)
        write_whole(self._temporary / INDEX, index.dump())
        sync_directory(self._temporary)
        there = complete(self._folder)
        os.rename(self._temporary, self._folder / next_name(self._folder, self._step))
        sync_directory(self._folder)
        if self._keep is not None:
            for old in sorted(there)[: max(len(there) + 1 - self._keep, 0)]:
                gone = self._folder / temporary_name()
                os.rename(there[old][1], gone)  # at once: what is half deleted is no checkpoint
                shutil.rmtree(gone)

    def _refuse_lost(self, name: str) -> None:
        if not (self._folder / name).is_dir():
            raise OSError(
                f"checkpoints: what was being written in {self._folder} is gone: someone else saves there, too, and "
                "has removed it as the remains of a run that was killed. The last complete checkpoint is whole.\n"
                "To fix: one `fcg.checkpoints` for each folder; another run saves in a folder of its own."
            )

    def _pieces(self, metadata: Metadata, results: _Results) -> dict[str, list[Piece]]:
        pieces: dict[str, list[Piece]] = {name: [] for name in self._types}
        for rank, of_rank in enumerate(results):
            for result in of_rank[:-1]:
                name, place = result.index.fqn, result.index.offset or (0,)
                stored = metadata.state_dict_metadata[name]
                itemsize = stored.properties.dtype.itemsize  # type: ignore[union-attr]
                count = result.size_in_bytes // itemsize
                pieces[name].append(Piece(place[0], count, rank, result.storage_data))
        return {name: sorted(found, key=lambda piece: piece.start) for name, found in pieces.items()}

    def clean_up(self) -> None:
        """Remove what a failure has left."""
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...  # noqa: FBT001

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True
