"""A folder as Hugging Face's libraries write it: one safetensors file, or several and an index of their names."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

__all__ = ["files_in", "index", "names_of_shards", "shards"]

_INDEX = ".safetensors.index.json"
_PART = re.compile(r"-\d{5}-of-(?!00001)\d{5}\.safetensors$")
_SUMS = "functional_cg checksums"  # in its metadata: so that files of two saves are not mixed


def files_in(folder: Path) -> dict[Path, tuple[set[str], str | None] | None]:
    """Return the files of a folder, with the names that each has to hold, and its checksum; None without an index.

    Raises:
      OSError: If the index cannot be read.
      ValueError: If several files could be meant, or the index is none.
    """
    there = [path for path in sorted(folder.iterdir()) if not path.name.startswith(".")]
    indices = [path for path in there if path.name.endswith(_INDEX)]
    files_there = [path for path in there if path.suffix == ".safetensors"]
    whole = [
        path for path in files_there if not _PART.search(path.name)
    ]  # the others count by an index alone
    if files_there and not (whole or indices):
        raise ValueError(
            f"fcg.load: {files_there[0]} is one of several files, and their index is missing: the save did not end.\n"
            "To fix: load another copy, or save anew."
        )
    if not indices and len(whole) < 2:
        return dict.fromkeys(whole)
    if len(indices) != 1 or indices[0] in map(_index_of, whole):
        names = ", ".join(path.name for path in [*indices, *whole][:5])
        raise ValueError(
            f"fcg.load: {folder} holds several safetensors files that could be meant: {names}.\n"
            "To fix: name one, `fcg.load(file, state)`; or delete what is left of another save."
        )
    try:
        said = json.loads(indices[0].read_bytes())
        weights: dict[str, str] = said["weight_map"]
        sums: dict[str, str] = dict(said.get("metadata", {}).get(_SUMS, {}))
        strange = [name for name in weights.values() if Path(name).name != name]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"fcg.load: {indices[0]} is no index of safetensors files.") from error
    if strange:
        raise ValueError(f"fcg.load: {indices[0]} names a file outside of its folder, {strange[0]!r}.")
    files: dict[Path, tuple[set[str], str | None] | None] = {}
    for file in dict.fromkeys(weights.values()):
        held = {name for name, other in weights.items() if other == file}
        files[folder / file] = held, sums.get(file)
    return files


def shards(target: Path, tensors: dict[str, Tensor], limit: int | None) -> dict[Path, dict[str, Tensor]]:
    """Return what each file holds: at most ``limit`` bytes, or one tensor; with an index if there are several.

    Raises:
      FileExistsError: If there is a file already that would be read instead, or be mixed with these.
      TypeError: If ``limit`` is no number of bytes.
    """
    if limit is None:
        return {target: tensors}
    if type(limit) is not int or limit < 1:
        raise TypeError(
            f"fcg.save: shard_bytes must be a positive number of bytes, got {limit!r}.\n"
            "To fix: `shard_bytes=5_000_000_000`."
        )
    there = [path for path in (target, _index_of(target)) if path.exists()]
    if there:
        what = "fcg.save: several files are not written over others, name another folder"
        raise FileExistsError(errno.EEXIST, what, str(there[0]))
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        size += tensor.nbytes
        if parts[-1] and size > limit:
            parts.append({})
            size = tensor.nbytes
        parts[-1][name] = tensor
    stem, count = target.name.removesuffix(".safetensors"), len(parts)
    names = [f"{stem}-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    files = [target.with_name(name) for name in names] if count > 1 else [target]
    return dict(zip(files, parts, strict=True))


def index(
    target: Path, files: Mapping[Path, dict[str, Tensor]], sums: Mapping[str, str]
) -> tuple[Path, bytes]:
    """Return where the index of several files lies, and its text, with the checksum of each."""
    weights = {name: file.name for file, part in files.items() for name in part}
    total = sum(tensor.nbytes for part in files.values() for tensor in part.values())
    metadata = {"total_size": total, _SUMS: sums}
    text = json.dumps({"metadata": metadata, "weight_map": weights}, indent=2)
    return _index_of(target), text.encode()


def names_of_shards(target: Path) -> str:
    """Return a pattern of the names that several files have in place of ``target``, and their index."""
    stem = re.escape(target.name.removesuffix(".safetensors"))
    return rf"{stem}(-\d{{5}}-of-\d{{5}}\.safetensors|{re.escape(_INDEX)})"


def _index_of(target: Path) -> Path:
    return target.with_name(target.name.removesuffix(".safetensors") + _INDEX)
