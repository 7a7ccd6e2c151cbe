"""The index of a checkpoint: what its files hold, as JSON. A folder without one is no checkpoint.

No path is in it: files are named by number, so none can lie outside the folder. And nothing in it is executed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .disk import BLOCK, checksum, damaged, open_file

__all__ = ["INDEX", "Index", "Piece", "StoredFile", "file_name"]

INDEX = "index.json"
_FORMAT = 1


def file_name(number: int) -> str:
    return f"rank-{number:05}.bin"


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements of a flattened leaf in a file.

    Attributes:
      start: The first element, in the whole leaf.
      count: How many.
      file: Number of the file.
      offset: Where they begin, in bytes.
    """

    start: int
    count: int
    file: int
    offset: int


@dataclass(frozen=True, slots=True)
class StoredFile:
    """What one rank has written.

    Attributes:
      size: In bytes.
      checksums: Of each block.
      position: Bytes of the position of the rank's loader, at the end of the file.
    """

    size: int
    checksums: tuple[str, ...]
    position: int


@dataclass(frozen=True, slots=True)
class Index:
    """The content of a checkpoint.

    Attributes:
      step: Of training.
      types: Shape and dtype of each leaf, by name: ``f32[8,4]``.
      pieces: Where the elements of each leaf are, in order.
      files: One per rank.
      block: Bytes that one checksum is for.
    """

    step: int
    types: Mapping[str, str]
    pieces: Mapping[str, Sequence[Piece]]
    files: Sequence[StoredFile]
    block: int = BLOCK

    def dump(self) -> bytes:
        """Return the index as JSON that carries its own checksum."""
        content = {
            "format": _FORMAT,
            "step": self.step,
            "block": self.block,
            "leaves": {
                name: {
                    "type": kind,
                    "pieces": [[p.start, p.count, p.file, p.offset] for p in self.pieces[name]],
                }
                for name, kind in self.types.items()
            },
            "files": [asdict(file) for file in self.files],
        }
        return json.dumps({"checksum": checksum(_canonical(content)), "content": content}).encode()

    @classmethod
    def read(cls, folder: Path) -> Index:
        """Read the index of a checkpoint.

        Raises:
          OSError: If there is none.
          ValueError: Naming the file, if it is not what was written.
        """
        path = folder / INDEX
        with open_file(path) as file:
            text = file.readall()
        try:
            outer = json.loads(text)
            content = outer["content"]
            whole = outer["checksum"] == checksum(_canonical(content))
            version = content["format"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise damaged(path, "is no index of a checkpoint") from error
        if not whole:
            raise damaged(path, "is not what was written")
        if version != _FORMAT:
            raise ValueError(f"{path} has format {version!r}, written by another version of functional_cg.")
        try:
            return cls._parsed(content)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise damaged(path, f"contradicts itself ({error})") from error

    @classmethod
    def _parsed(cls, content: Any) -> Index:
        block = _count(content["block"])
        files = [
            StoredFile(_count(f["size"]), tuple(map(str, f["checksums"])), _count(f["position"]))
            for f in content["files"]
        ]
        if not block or any(len(f.checksums) != -(-f.size // block) or f.position > f.size for f in files):
            raise ValueError("sizes of files")
        types: dict[str, str] = {}
        pieces: dict[str, list[Piece]] = {}
        for name, leaf in content["leaves"].items():
            types[name] = str(leaf["type"])
            pieces[name] = [Piece(*map(_count, piece)) for piece in leaf["pieces"]]
            if any(piece.file >= len(files) for piece in pieces[name]):
                raise ValueError("numbers of files")
        return cls(_count(content["step"]), types, pieces, files, block)


def _canonical(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value
