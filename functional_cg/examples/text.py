"""Reads real text as bytes, holds out a part for validation, and cuts batches."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["Batch", "batches", "read_bytes", "split", "text_files", "unigram_entropy", "validation_batches"]

Batch = dict[str, Tensor]


def text_files(path: Path | None = None) -> list[Path]:
    """List the files to read, sorted, so that each run reads the same.

    Args:
      path: A file, or a directory of files, without hidden ones and ``__pycache__``. By default the standard library of
        the Python that runs this program.
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
    """Read and concatenate files, u8[n], up to ``limit_bytes`` in total.

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
    """Split text into a training part and the last tenth, which is held out.

    Raises:
      ValueError: If a part is too short for a block and the byte after it.
    """
    held_out = len(data) // 10
    if held_out <= block_size:
        need = 10 * (block_size + 1)
        raise ValueError(f"the text has {len(data)} bytes; blocks of {block_size} need at least {need}")
    return data[:-held_out], data[-held_out:]


def batches(
    data: Tensor, batch_size: int, block_size: int, seed: int, *, rank: int = 0, ranks: int = 1
) -> Iterator[Batch]:
    """Cut blocks at random places, endlessly: ``{"x": i64[batch, block], "y": the same, one byte later}``.

    With several ranks, each draws the places of all and cuts its own. Together they form the batch that a single rank
    would draw with ``batch_size`` multiplied by the number of ranks.
    """
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(data) - block_size, (ranks * batch_size,), generator=generator)
        yield _blocks(data, starts[rank * batch_size :][:batch_size], block_size)


def validation_batches(
    data: Tensor, batch_size: int, block_size: int, count: int, *, rank: int = 0, ranks: int = 1
) -> list[Batch]:
    """Cut ``count`` batches at places spread evenly over the text, the same at each call.

    With several ranks, each cuts its own, as in :func:`batches`.
    """
    last, places = len(data) - block_size - 1, count * ranks * batch_size
    starts = torch.arange(places) * last // max(places - 1, 1)
    parts = starts.split(ranks * batch_size)
    return [_blocks(data, part[rank * batch_size :][:batch_size], block_size) for part in parts]


def _blocks(data: Tensor, starts: Tensor, block_size: int) -> Batch:
    rows = data[starts[:, None] + torch.arange(block_size + 1)].long()
    return {"x": rows[:, :-1], "y": rows[:, 1:]}


def unigram_entropy(data: Tensor) -> float:
    """Compute the entropy of the byte frequencies in nats: the loss of the best model that ignores context.

    Example:
      >>> import torch
      >>> from functional_cg.examples.text import unigram_entropy
      >>> unigram_entropy(torch.tensor([7, 7, 9, 9], dtype=torch.uint8))
      0.6931471805599453
    """
    counts = data.bincount(minlength=256).double()
    frequencies = counts[counts > 0] / len(data)
    return -(frequencies * frequencies.log()).sum().item()
