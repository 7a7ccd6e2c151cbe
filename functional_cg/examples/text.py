"""Bytes of real text: where they come from, a held-out part, and batches cut from them."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["Batch", "batches", "read_bytes", "split", "text_files", "unigram_entropy", "validation_batches"]

Batch = dict[str, Tensor]


def text_files(path: Path | None = None) -> list[Path]:
    """The files to read, sorted: the same list at each run.

    Args:
      path: A file, or a directory whose files are taken, hidden ones and ``__pycache__`` left out. By default the
        sources of the Python standard library that runs this program.
    Raises:
      FileNotFoundError: If there is nothing to read.
    """
    if path is None:
        path = Path(sysconfig.get_path("stdlib"))
        files = sorted(path.glob("*.py"))
    elif path.is_dir():
        names = sorted(path.rglob("*"))
        files = [file for file in names if file.is_file() and not _hidden(file.relative_to(path))]
    else:
        files = [path] if path.is_file() else []
    if not files:
        raise FileNotFoundError(f"no text found at {path}")
    return files


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in path.parts)


def read_bytes(files: Sequence[Path], limit_bytes: int) -> Tensor:
    """Read files one after the other, u8[n], up to ``limit_bytes`` in all.

    Raises:
      OSError: If a file cannot be read.
      ValueError: If all files are empty.
    """
    data = bytearray()
    for file in files:
        with file.open("rb") as stream:
            data += stream.read(limit_bytes - len(data))
        if len(data) == limit_bytes:
            break
    if not data:
        raise ValueError("the text is empty")
    return torch.frombuffer(data, dtype=torch.uint8)


def split(data: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Split text into a part to train on and the last tenth, held out.

    Raises:
      ValueError: If one of the parts is too short for a block and the byte after it.
    """
    held_out = len(data) // 10
    if held_out <= block_size:
        need = 10 * (block_size + 1)
        raise ValueError(f"the text has {len(data)} bytes; blocks of {block_size} need at least {need}")
    return data[:-held_out], data[-held_out:]


def batches(
    data: Tensor, batch_size: int, block_size: int, seed: int, *, rank: int = 0, ranks: int = 1
) -> Iterator[Batch]:
    """Cut blocks at random places, for ever: ``{"x": i64[batch, block], "y": the same, one byte later}``.

    Each of several ranks draws the places of all, and cuts its own: together they are at each step the batch that one
    rank would draw with a ``batch_size`` as many times as large.
    """
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(data) - block_size, (ranks * batch_size,), generator=generator)
        yield _blocks(data, starts[rank * batch_size :][:batch_size], block_size)


def validation_batches(
    data: Tensor, batch_size: int, block_size: int, count: int, *, rank: int = 0, ranks: int = 1
) -> list[Batch]:
    """Cut ``count`` batches at places that are evenly spread over the text: the same ones at each call.

    Each of several ranks cuts its own, as in :func:`batches`.
    """
    last, places = len(data) - block_size - 1, count * ranks * batch_size
    starts = torch.arange(places) * last // max(places - 1, 1)
    parts = starts.split(ranks * batch_size)
    return [_blocks(data, part[rank * batch_size :][:batch_size], block_size) for part in parts]


def _blocks(data: Tensor, starts: Tensor, block_size: int) -> Batch:
    rows = data[starts[:, None] + torch.arange(block_size + 1)].long()
    return {"x": rows[:, :-1], "y": rows[:, 1:]}


def unigram_entropy(data: Tensor) -> float:
    """Entropy in nats of the bytes' own frequencies: the loss of the best model that ignores context.

    Example:
      >>> unigram_entropy(torch.tensor([7, 7, 9, 9], dtype=torch.uint8))
      0.6931471805599453
    """
    counts = data.bincount(minlength=256).double()
    frequencies = counts[counts > 0] / len(data)
    return -(frequencies * frequencies.log()).sum().item()
