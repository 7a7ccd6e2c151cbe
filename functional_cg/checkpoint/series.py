"""Checkpoints of a run: saved beside its training, the last ones kept, read by any number of ranks."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import torch.distributed as dist

from ..ambient.setting import inside_a_step
from ..errors import BusyError, CaptureError, RankError
from ..shards.mesh import Mesh
from ..shards.peers import among
from .disk import FolderLock
from .folder import found_in, position_in, values_in
from .matching import Part
from .naming import complete
from .positions import decode, encode
from .snapshot import Copy, Stage, mesh_of
from .state_dicts import names_of, opened, put, slots_of
from .writing import write

__all__ = ["Checkpoints", "checkpoints"]

T = TypeVar("T")


class Loader(Protocol):
    """A loader that knows its position."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


def checkpoints(folder: str | os.PathLike[str], *, keep: int | None = 3) -> Checkpoints:
    """Open a folder of checkpoints, for one process or all ranks of a mesh; it need not exist yet.

    ``save`` copies the state to host memory and returns; a thread writes the copy while training goes on. A checkpoint
    is there as a whole or not at all, whatever is killed at any moment. Each rank writes its part, and any number of
    ranks, at any ZeRO stage, reads what it needs.

    Args:
      folder: On a file system that all ranks share. One run at a time writes to it, from its first ``save`` until
        ``close``; a second one is refused.
      keep: How many of the last checkpoints stay; None keeps all.
    Raises:
      TypeError: If ``folder`` is no path.
      ValueError: If ``keep`` is not a positive integer or None.

    Example:
      >>> import tempfile, torch, functional_cg as fcg
      >>> step = fcg.graph_step(lambda state, x: ({"w": state["w"] + x, "step": state["step"] + 1}, {}))
      >>> state = fcg.place({"w": torch.zeros(2), "step": 0})
      >>> with tempfile.TemporaryDirectory() as folder, fcg.checkpoints(folder, keep=2) as saved:
      ...     for _ in range(4):
      ...         state, _ = step(state, torch.ones(2))
      ...         saved.save(state)
      ...     saved.wait()
      ...     state = saved.load(state, step=3)
      ...     print(saved.steps(), state["w"].tolist())
      [3, 4] [3.0, 3.0]
    """
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(
            f"checkpoints: expected a path, got {type(folder).__name__}.\n"
            'To fix: `saved = fcg.checkpoints("runs/first")`, and then `saved.save(state)`.'
        )
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise ValueError(f"checkpoints: keep must be a positive integer or None, got {keep!r}")
    return Checkpoints(Path(folder), keep)


class Checkpoints:
    """The checkpoints of a run, made by :func:`checkpoints`; as a context manager, it waits for the last one.

    Attributes:
      folder: Where they are.
      keep: How many of the last ones stay; None for all.
    """

    def __init__(self, folder: Path, keep: int | None) -> None:
        self.folder, self.keep = folder.absolute(), keep
        self._stage, self._lock = Stage(), FolderLock()
        self._writer: ThreadPoolExecutor | None = None
        self._pending: list[Future[None]] = []
        # One thread at a time. A signal handler in the middle of a save may save as well: it gets another stage.
        self._turn = threading.RLock()
        self._group: Any = None
        self._process = os.getpid()

    def save(
        self, state: Any, step: int | None = None, *, loader: Loader | None = None, wait: bool = False
    ) -> None:
        """Copy a state and write it in the background; on a mesh, all ranks call it at the same step.

        Returns once the copy is made, or on a GPU queued: the state may be donated at once. If the previous checkpoint
        is still being written, it waits for that first. The copy stays in host memory for the next one. Threads that
        save at one time do so one after the other.

        Args:
          state: A handle, or a pytree of tensors.
          step: Number of the step; by default the leaf ``state.step``.
          loader: Its position is saved too, each rank's own: :func:`functional_cg.prefetch` of a loader that has
            ``state_dict``, or the loader itself.
          wait: Return only when the checkpoint is complete.
        Raises:
          BusyError: As an OSError below, if another process saves in the folder.
          CaptureError: In a step.
          DonatedStateError: If the handle was donated.
          LayoutError: If a leaf is not a dense tensor.
          OSError: If the previous checkpoint, or this one with ``wait``, cannot be written.
          RankError: The same, if another rank is lost, or saves another step.
          TypeError: If the loader has no position, or one that is not plain data.
          ValueError: If there is no step, or two leaves have the same name.
        """
        if inside_a_step():
            raise CaptureError.of(
                "",
                "checkpoints: `save` was called in a step.",
                why="It writes files, and a graph repeats what is done on the device.",
                fix="call it between steps, on the state that one has returned.",
            )
        self._refuse_fork()
        with self._turn:
            self.wait()
            self._copied(state, step, loader)
            if wait:
                self.wait()

    def _copied(self, state: Any, step: int | None, loader: Loader | None) -> None:
        """Copy a state, and let the thread write it."""
        leaves, treedef = opened(state)
        names = names_of(treedef, "checkpoints")
        _check_step(step, dict(zip(names, leaves, strict=True)).get("step"))
        position = b"" if loader is None else encode(_method(loader, "state_dict")())
        mesh = mesh_of(leaves)
        if mesh is not None and self._group is None:
            self._group = dist.new_group(backend="gloo")  # its own: the thread uses it beside the steps
        if self._writer is None:
            self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        stage, self._stage = self._stage, Stage()
        copy = stage.take(names, leaves)
        self._pending.append(self._writer.submit(self._write, copy, step, position, mesh))
        self._stage = stage

    def _write(self, copy: Copy, step: int | None, position: bytes, mesh: Mesh | None) -> None:
        """Runs in the thread."""
        copy.ready()
        number = int(copy.step) if step is None and copy.step is not None else int(step or 0)
        with among(mesh, "checkpoints.save"):
            group = None if mesh is None else self._group
            write(self.folder, number, copy, position, group, self.keep, self._lock)

    def wait(self) -> None:
        """Wait until the last checkpoint is complete, on all ranks; raises what writing it has raised."""
        self._refuse_fork()
        with self._turn:
            errors: list[BaseException | None] = []
            while self._pending:  # each stays there until it is done, for whoever interrupts this
                errors.append((first := self._pending[0]).exception())
                if first in self._pending:
                    self._pending.remove(first)
        for error in filter(None, errors):
            raise error

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, in the order in which they were written."""
        there = [step for step, _ in complete(self.folder).values()]
        return list(reversed(dict.fromkeys(reversed(there))))

    def latest(self) -> int | None:
        """Return the step of the checkpoint that was written last; None if there is none."""
        return next(reversed(self.steps()), None)

    def load(
        self,
        state: T,
        step: int | None = None,
        *,
        loader: Loader | None = None,
        part: Part = None,
        cast: bool = False,
    ) -> T:
        """Read a checkpoint into a state of the same layout; donates the handle. On a mesh, all ranks call it.

        Checksums are verified. If anything fails, on any rank, nothing is written on any.

        Args:
          state: A handle, on any mesh or on none, a pytree of tensors, or a module.
          step: Which checkpoint; by default the one written last.
          loader: Its position is set too. The number of ranks must be that of the run that saved.
          part: Which leaves, if not all, and under which names: see :func:`functional_cg.load`.
          cast: Whether floating values of another floating dtype are converted to that of the leaf.
        Returns:
          The new handle, or the new pytree.
        Raises:
          DonatedStateError: If the handle was donated.
          FileNotFoundError: If there is no complete checkpoint, or none of that step.
          LayoutError: If it is the checkpoint of another model.
          OSError: If a file cannot be read.
          RankError: If it failed on another rank.
          ValueError: Naming the file, if it is damaged; or if it has no position for the loader.
        """
        self.wait()
        slots, optional = slots_of(state, "checkpoints")
        mesh = mesh_of(list(slots.values()))
        set_position = None if loader is None else _method(loader, "load_state_dict")
        rank, ranks = (0, 1) if mesh is None else (mesh.number, mesh.everyone)
        try:
            path = self._agreed(step, mesh)
            values = values_in(path, slots, optional, "checkpoints", part, cast=cast)
            position = None if set_position is None else decode(position_in(path, rank, ranks))
        except (OSError, ValueError) as error:  # a LayoutError is a ValueError
            _share(mesh, str(error))
            raise
        _share(mesh, "")
        if set_position is not None:
            set_position(position)
        return put(state, slots, values, "checkpoints")

    def _agreed(self, step: int | None, mesh: Mesh | None) -> Path:
        """Return the folder of a checkpoint, the same on all ranks: that which rank 0 sees."""
        if mesh is None or mesh.ranks is None:
            return found_in(self.folder, "checkpoints", step)
        try:
            said = found_in(self.folder, "checkpoints", step).name if mesh.number == 0 else ""
        except FileNotFoundError:
            said = ""
        name = mesh.ranks.shared("checkpoints.load", f"load a checkpoint\n{said}")[0].partition("\n")[2]
        return self.folder / name if name else found_in(self.folder / "none", "checkpoints", step)

    def close(self) -> None:
        """Wait for the last checkpoint, end the thread, and let another process save in the folder."""
        self._refuse_fork()
        with self._turn:
            try:
                self.wait()
            finally:
                if self._writer is not None:
                    self._writer.shutdown()
                self._writer, self._stage = None, Stage()
                self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except Exception as late:
            if error is None:
                raise
            error.add_note(f"and the last checkpoint was not written: {late}")

    def __repr__(self) -> str:
        return f"checkpoints({str(self.folder)!r}, keep={self.keep}), steps {self.steps()}"

    def _refuse_fork(self) -> None:
        if os.getpid() != self._process:
            raise BusyError.of(
                "",
                "checkpoints: used in a process that was forked from the one that made it.",
                why="The thread that writes is not there.",
                fix="make another one here, `fcg.checkpoints(folder)`.",
            )


def _check_step(step: Any, leaf: Any) -> None:
    if step is None:
        if leaf is None or leaf.numel() != 1 or leaf.is_floating_point() or leaf.is_complex():
            has = "no leaf `step`" if leaf is None else f"a leaf `step` of {leaf.dtype} {list(leaf.shape)}"
            raise ValueError(
                f"checkpoints: the state has {has}, and not a number that counts. To fix: `save(state, step=n)`."
            )
    elif isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ValueError(f"checkpoints: step must be a number from 0 on, got {step!r}")


def _method(loader: Any, name: str) -> Any:
    method = getattr(loader, name, None)
    if not callable(method):
        raise TypeError(
            f"checkpoints: {type(loader).__name__} has no `{name}`, and so no position. To fix: "
            "`torchdata.stateful_dataloader.StatefulDataLoader` (`pip install torchdata`), which takes what a "
            "`DataLoader` takes."
        )
    return method


def _share(mesh: Mesh | None, failure: str) -> None:
    """Tell all ranks whether this one has read its part.

    Raises:
      RankError: If another one has not.
    """
    if mesh is None or mesh.ranks is None:
        return
    line = failure.partition("\n")[0]
    said = mesh.ranks.shared("checkpoints.load", f"write a checkpoint into the state\n{line}")
    rows = [f"rank {rank}  {words}" for rank, text in enumerate(said) if (words := text.partition("\n")[2])]
    if rows and not failure:
        raise RankError.of(
            "",
            "checkpoints: other ranks cannot read the checkpoint; `state` is unchanged.",
            rows=rows,
            why="All ranks go on from the same step.",
            fix="load an earlier one, `load(state, step=...)`; `steps()` lists them.",
        )
