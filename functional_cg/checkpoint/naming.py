"""A folder of checkpoints: which ones are complete, and how they are named."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from .index import INDEX

__all__ = ["complete", "next_name", "temporary", "temporary_name"]

_NAME = re.compile(r"(\d{6,})-step-(\d+)")
_TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.tmp")


def complete(folder: Path) -> dict[int, tuple[int, Path]]:
    """Return the complete checkpoints: (step, folder) by number, which counts up with each one written."""
    return {
        number: (step, path)
        for number, step, path in _named(folder)
        if (path / INDEX).is_file() and not path.is_symlink()
    }


def next_name(folder: Path, step: int) -> str:
    """Return the name of the next checkpoint."""
    return f"{max((number for number, _, _ in _named(folder)), default=0) + 1:06}-step-{step}"


def temporary_name() -> str:
    """Return a new name for a folder that is no checkpoint yet, or not any more."""
    return f".{secrets.token_hex(8)}.tmp"


def temporary(folder: Path) -> list[Path]:
    """Return the folders that were being written or deleted when a run was killed."""
    there = [path for path in folder.iterdir() if _TEMPORARY.fullmatch(path.name)]
    return [path for path in there if path.is_dir() and not path.is_symlink()]


def _named(folder: Path) -> list[tuple[int, int, Path]]:
    """Return (number, step, path) of what is named as a checkpoint, in order."""
    there = [(_NAME.fullmatch(path.name), path) for path in (folder.iterdir() if folder.is_dir() else ())]
    return sorted((int(match[1]), int(match[2]), path) for match, path in there if match)
