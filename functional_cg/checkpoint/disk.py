"""Files of a checkpoint: written and read in blocks that each have a checksum; and who may write in their folder."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket
import stat
import weakref
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import BusyError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = [
    "BLOCK",
    "BlockReader",
    "BlockWriter",
    "FolderLock",
    "alone_in",
    "checksum",
    "damaged",
    "lock",
    "open_file",
    "sync_directory",
    "write_whole",
]

_LOCK = ".writer"
BLOCK = 1 << 22  # bytes: a reader of a few shards reads and checks little more than those


def checksum(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def damaged(path: Path, what: str) -> ValueError:
    """Return the error for a file that is not what was written."""
    return ValueError(
        f"{path} {what}: it is damaged, or belongs to another checkpoint. Nothing was loaded. "
        "To fix: load an earlier one, `load(state, step=...)`; `steps()` lists them."
    )


def sync_directory(directory: Path) -> None:
    """Make a rename survive a power cut; does nothing where directories cannot be opened (Windows)."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_file(path: Path) -> FileIO:
    """Open a regular file; a link is not followed, and a pipe is not waited for.

    Raises:
      OSError: If it is anything else.
    """
    flags = (
        os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    )
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is no regular file", str(path))
    return os.fdopen(descriptor, "rb", buffering=0)


def write_whole(path: Path, content: bytes) -> None:
    """Write a new file to disk."""
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def lock(file: int, *, wait: bool = False) -> bool:
    """Lock an open file; whether that was done: not if another process or thread has, or there are no locks."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Wait until no one else is in this block with the folder; does nothing where there are no such locks."""
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        lock(descriptor, wait=True)
        yield
    finally:
        os.close(descriptor)


class FolderLock:
    """The right of one process to write into a folder, from its first :meth:`take` until :meth:`release`.

    It ends with the process, however that ends; a fork does not inherit it. Within a process, several of them share
    it. Does nothing where there are no such locks, on Windows and on some file systems.
    """

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._close: Any = None

    def take(self, folder: Path) -> None:
        """Take the lock, or make sure that it is still there.

        Raises:
          BusyError: If another process has it.
        """
        if fcntl is None:
            return
        if self._descriptor is None:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            self._descriptor = os.open(folder / _LOCK, flags, 0o666)
            self._close = weakref.finalize(self, os.close, self._descriptor)
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(self._descriptor, 200, 0).decode(errors="replace")
            self.release()
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                return  # this file system has no locks
            raise BusyError.of(
                "",
                f"checkpoints: another process saves in {folder}; nothing was written.",
                rows=[owner or "one that has not said its name"],
                why="Each would count and delete the other's checkpoints.",
                fix="a folder for each run, `fcg.checkpoints(other_folder)`; or end that process first, or let it "
                "`close()` its `checkpoints`. To read them needs no waiting.",
            ) from None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)

    def release(self) -> None:
        """Let others write."""
        if self._descriptor is not None:
            self._close()
            self._descriptor = None


class BlockWriter:
    """Writes bytes one after the other, through a buffer of one block.

    Attributes:
      size: Bytes written so far.
      checksums: One per block.
    """

    def __init__(self, path: Path) -> None:
        self.size = 0
        self.checksums: list[str] = []
        self._block = bytearray(BLOCK)
        self._view = torch.frombuffer(self._block, dtype=torch.uint8)
        self._filled = 0
        self._file = open(path, "xb", buffering=0)

    def write(self, data: Tensor) -> int:
        """Append u8[n] of host memory; return where it begins."""
        start = self.size
        for part in data.split(BLOCK):
            head = part[: BLOCK - self._filled]
            self._append(head)
            self._append(part[len(head) :])
        return start

    def _append(self, part: Tensor) -> None:
        end = self._filled + len(part)
        self._view[self._filled : end].copy_(part)
        self._filled, self.size = end, self.size + len(part)
        if end == BLOCK:
            self._flush()

    def _flush(self) -> None:
        left = memoryview(self._block)[: self._filled]
        if left:
            self.checksums.append(checksum(left))
        while left:
            left = left[self._file.write(left) :]
        self._filled = 0

    def close(self, *, sync: bool) -> None:
        """Write what is left; with ``sync``, all of it is on disk afterwards."""
        with self._file:
            if sync:
                self._flush()
                os.fsync(self._file.fileno())


class BlockReader:
    """Reads ranges of a file, and checks the blocks that they lie in.

    Raises:
      OSError: If the file cannot be read.
      ValueError: Naming the file, if it has another size, or a block another checksum.
    """

    def __init__(self, path: Path, size: int, block: int, checksums: Sequence[str]) -> None:
        self._path, self._size, self._length, self._checksums = path, size, block, checksums
        self._number, self._view = -1, torch.empty(0, dtype=torch.uint8)
        self._file = open_file(path)
        there = os.fstat(self._file.fileno()).st_size
        if there != size:
            self._file.close()
            raise damaged(path, f"has {there:,} bytes, expected {size:,}")

    def read(self, start: int, out: Tensor) -> None:
        """Fill u8[n] with the bytes from ``start`` on."""
        done = 0
        while done < len(out):
            number, begin = divmod(start + done, self._length)
            self._load(number)
            part = self._view[begin : begin + len(out) - done]
            out[done : done + len(part)].copy_(part)
            done += len(part)

    def _load(self, number: int) -> None:
        if number == self._number:
            return
        self._file.seek(number * self._length)
        block = bytearray(min(self._length, self._size - number * self._length))
        left = memoryview(block)
        while left:
            count = self._file.readinto(left)
            if not count:
                break
            left = left[count:]
        if left or checksum(block) != self._checksums[number]:
            raise damaged(self._path, f"is not what was written, from byte {number * self._length:,} on")
        self._number, self._view = number, torch.frombuffer(block, dtype=torch.uint8)

    def close(self) -> None:
        self._file.close()
