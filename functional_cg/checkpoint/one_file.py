"""One file: write a state to a safetensors file, all or nothing, and read it back."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import stat
from io import BufferedWriter
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..messages.tracebacks import entry
from ..state.arena import refuse_in_a_trace
from .disk import BLOCK, alone_in, lock, open_file, sync_directory
from .folder import found_in, values_in
from .hub import files_in, index, names_of_shards, shards
from .matching import Part, type_of
from .state_dicts import put, slots_of, state_dict, written

__all__ = ["load", "save"]

T = TypeVar("T")
_PAIRS = "pairs of real and imaginary parts"  # names of leaves, in the metadata
# In the metadata, too: of all that is in the file, with zeros in its own place. No bit belongs to both of its marks.
_CHECKSUM, _MARK = "functional_cg checksum", "functional_cg sha256:"
_AGAIN = "Nothing was loaded.\nTo fix: download or save the folder again, to its end."
_NONE = "0000000000000000000000000000000000000000000000000000000000000000"


@entry()
def save(path: str | os.PathLike[str], state: Any, *, shard_bytes: int | None = None) -> None:
    """Write the leaves of a state to a safetensors file, all or nothing.

    The data goes to a temporary file beside ``path``, which replaces it once everything is on disk: a crash,
    a full disk or Ctrl-C leaves the old file intact, and what a killed process left goes with the next save. The file
    holds a checksum of all of it. Takes twice the size of the state on the host.

    Args:
      path: The file. An existing file is replaced and keeps its mode; a symbolic link to it stays. Anything
        but a regular file (a pipe, a device, a directory) is refused, as is a file with a second hard link,
        which would keep the old data.
      state: What :func:`state_dict` takes.
      shard_bytes: If it holds more than that, several files are written beside ``path``, and an index that names them,
        as Hugging Face's libraries do: ``model-00001-of-00002.safetensors``, ``model.safetensors.index.json``.
    Raises:
      FileExistsError: With ``shard_bytes``, if the file or the index is there already, or by then: of two that save
        at the same time, one does.
      ImportError: If safetensors is not installed.
      OSError: If the file cannot be written.
      TypeError: If the file format cannot hold a leaf's dtype.
      ValueError: If two leaves have the same name, or one has the name that the format reserves.

    Example:
      >>> import tempfile, torch, functional_cg as fcg
      >>> state = fcg.place({"w": torch.ones(2), "n": 3})
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     fcg.save(f"{directory}/last.safetensors", state)
      ...     state = state.replace(n=4)
      ...     state = fcg.load(f"{directory}/last.safetensors", state)
      >>> state["n"].item()
      3
    """
    _checked_path(path, "fcg.save")
    try:
        target = Path(path).resolve(strict=False)
    except RuntimeError as error:  # a link to itself
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fspath(path)) from error
    tensors = state_dict(state)
    with contextlib.nullcontext() if shard_bytes is None else alone_in(target.parent):
        files, sums = shards(target, tensors, shard_bytes), {}
        _remove_left(target, whole=shard_bytes is not None)  # without an index
        for file, part in files.items():
            content, sums[file.name] = _serialized(part)
            _write(file, content)
        if len(files) > 1:
            _write(*index(target, files, sums))  # last: without it, the others are no checkpoint


@entry("state = fcg.load(path, state)")
def load(path: str | os.PathLike[str], state: T, *, part: Part = None, cast: bool = False) -> T:
    """Read what :func:`save` or :func:`checkpoints` has written into a state of the same layout; donates the handle.

    Without ``part``, the names must be those of the state, no more and no fewer. A part is as strict: each of its
    leaves needs a value, and each value of that name a leaf; the other leaves stay as they are. ``part="params"`` is
    the values named ``params.…``: they go to the leaves of that name or, if ``state`` has none (a tree of parameters, a
    module), to all of its leaves, under the rest of the name. ``part={"params": "ema"}`` takes other names, the state's
    first: ``""`` is all names, the longest one counts, of the state's and of the file's, and None leaves out.

    Checksums are verified, so that a flipped bit is found. Any other safetensors file with the right names works too,
    such as one from before version 0.2; it has none, and what has changed in it is not noticed.

    Args:
      path: A file; or the folder of :func:`checkpoints`, for the last one, or one of the folders in it; or a folder
        of Hugging Face: one safetensors file, or several with their index.
      state: A handle, a pytree of tensors, which is not written to, or a module, which is.
      part: Which leaves, and under which names: one, a list, or a dict of names here to names there.
      cast: Whether floating values of another floating dtype are converted to that of the leaf.
    Returns:
      The new handle, the new pytree, or the module.
    Raises:
      DonatedStateError: If the handle was donated.
      ImportError: If safetensors is not installed.
      LayoutError: If names, shapes or dtypes differ; names the differences, writes nothing.
      OSError: If a file cannot be read, or there is no complete checkpoint in the folder.
      TypeError: If ``state`` is part of a state, or ``part`` is none.
      ValueError: If it is not a complete safetensors file, or a file is damaged.

    Example:
      >>> import tempfile, torch, functional_cg as fcg
      >>> model = torch.nn.Linear(2, 1)
      >>> params = fcg.from_module(model)[1]
      >>> with tempfile.TemporaryDirectory() as folder, fcg.checkpoints(folder) as saved:
      ...     adam = fcg.TrainState.create(params=params, optimizer=fcg.optim.adam(1e-3))
      ...     saved.save(adam, step=7, wait=True)
      ...     sgd = fcg.TrainState.create(params=params, optimizer=fcg.optim.sgd(0.1))
      ...     sgd = fcg.load(folder, sgd, part="params")
      ...     params = fcg.load(folder, params, part="params")
      ...     model = fcg.load(folder, model.bfloat16(), part="params", cast=True)
    """
    refuse_in_a_trace()
    _checked_path(path, "fcg.load")
    place = Path(path)
    files: dict[Path, tuple[set[str], str | None] | None] = {place: None}
    if place.is_dir():
        try:
            found = found_in(place, "fcg.load")
        except FileNotFoundError as error:
            if not (files := files_in(place)):
                what = "Is a directory without a complete checkpoint"
                raise IsADirectoryError(errno.EISDIR, f"fcg.load: {what}", str(path)) from error
        else:
            slots, optional = slots_of(state, "fcg.load")
            values = values_in(found, slots, optional, "fcg.load", part, cast=cast)
            return put(state, slots, values, "fcg.load")
    values = {}
    for file, indexed in files.items():
        names, checksum = indexed or (None, None)
        held = _values_of(file, checksum)
        if names is not None and held.keys() != names:
            raise ValueError(
                f"fcg.load: {file} does not hold what its index says: {sorted(names ^ held.keys())[0]!r} is in one of "
                f"them only. {_AGAIN}"
            )
        values |= held
    return written(state, values, "fcg.load", f" in {os.fspath(path)}", part, cast=cast)


def _values_of(path: Path, checksum: str | None) -> dict[str, Tensor]:
    """Read a safetensors file; one with this checksum, if its index says so."""
    safetensors = _safetensors("fcg.load")
    if not stat.S_ISREG(os.stat(path).st_mode):  # such as a pipe, whose reader waits until somebody writes
        raise OSError(errno.EINVAL, "fcg.load: is no regular file", os.fspath(path))
    with open(path, "rb"):  # raises Python's own error for a bad path
        pass
    _refuse_damage(path, checksum)
    try:
        return _read(safetensors, path)
    except safetensors.SafetensorError as error:
        if _of_torch(path):
            raise ValueError(
                f"fcg.load: {path} was written by `torch.save`, and `fcg.load` reads what `fcg.save` has written.\n"
                "To fix: `values = torch.load(path)`; then, if it is the `state_dict` of a module, "
                "`module.load_state_dict(values)` before `fcg.from_module(module)`; if it is that of a state, "
                "`state = fcg.load_state_dict(state, values)`."
            ) from error
        raise ValueError(
            f"fcg.load: {path} is no safetensors file, or not a whole one: {error}.\n"
            "To fix: load a file that `fcg.save(path, state)` has written to its end."
        ) from error


def _write(target: Path, content: bytes) -> None:
    try:
        _replace_file(target, content, _replaceable(target))
    except OSError as error:  # name the target, not the temporary file
        raise OSError(error.errno, error.strerror, str(target)) from error


def _of_torch(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins as those of ``torch.save`` do: with an archive or, in older ones, with a pickle."""
    with open(path, "rb") as file:
        return file.read(4).startswith((b"PK\x03\x04", b"\x80\x02"))


def _checked_path(path: Any, function: str) -> Any:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"{function}: expected a path, got {type(path).__name__}. To fix: `{function}(path, state)`, path first."
        )
    return path


def _serialized(tensors: dict[str, Tensor]) -> tuple[bytes, str]:
    """Return the content of a safetensors file, and its checksum."""
    safetensors = _safetensors("fcg.save")
    if "__metadata__" in tensors:
        raise ValueError(
            "fcg.save: a leaf is named '__metadata__', which safetensors files reserve. Rename it."
        )
    unknown = {tensor.dtype for tensor in tensors.values() if not _storable(safetensors, tensor.dtype)}
    pairs = [name for name, tensor in tensors.items() if tensor.dtype in unknown and tensor.is_complex()]
    tensors = tensors | {name: torch.view_as_real(tensors[name]) for name in pairs}
    for name, tensor in tensors.items():
        if tensor.dtype in unknown:
            raise TypeError(
                f"fcg.save: safetensors files cannot hold {type_of(tensor)}, as `{name}` is. To fix: "
                "`torch.save(fcg.state_dict(state), path)`."
            )
    metadata = {"format": "pt", _CHECKSUM: _MARK + _NONE} | ({_PAIRS: json.dumps(pairs)} if pairs else {})
    return _in_order(safetensors.torch.save(tensors, metadata))


def _in_order(file: bytes) -> tuple[bytes, str]:
    """Return a safetensors file with its checksum, and its metadata sorted: the library changes their order."""
    end = 8 + int.from_bytes(file[:8], "little")
    header = json.loads(file[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    head, data = len(text).to_bytes(8, "little") + text, memoryview(file)[end:]
    found = hashlib.sha256(head)
    found.update(data)
    checksum = found.hexdigest()
    return b"".join([head.replace((_MARK + _NONE).encode(), (_MARK + checksum).encode()), data]), checksum


def _refuse_damage(path: str | os.PathLike[str], wanted: str | None) -> None:
    """Raise if a file has a checksum, and another content, or not the one wanted; a file without is not checked.

    Raises:
      ValueError: Then.
    """
    with open(path, "rb") as file:
        start, head = _head(file)
        kept = re.search(_MARK.encode() + b"([0-9a-f]{%d})" % len(_NONE), head)
        if wanted is not None and (kept is None or kept[1].decode() != wanted):
            raise ValueError(f"fcg.load: {path} is of another save than its index. {_AGAIN}")
        if kept is None and json.dumps(_CHECKSUM).encode() not in head:
            return
        found = hashlib.sha256(start)
        if kept is not None:
            found.update(head[: kept.start(1)] + _NONE.encode() + head[kept.end(1) :])
        while block := file.read(BLOCK):
            found.update(block)
    if kept is None or kept[1].decode() != found.hexdigest():
        raise ValueError(
            f"fcg.load: {path} is not what was written: it is damaged. Nothing was loaded.\n"
            "To fix: load another copy, `fcg.load(other_path, state)`; `fcg.checkpoints(folder)` keeps several."
        )


def _read(safetensors: Any, path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file."""
    values: dict[str, Tensor] = safetensors.torch.load_file(path)
    with safetensors.safe_open(path, "pt") as file:
        pairs = json.loads((file.metadata() or {}).get(_PAIRS, "[]"))
    # A copy: a file has its numbers at multiples of 8 bytes, and torch reads complex ones at multiples of their size.
    return values | {name: torch.view_as_complex(values[name].clone()) for name in pairs}


def _storable(safetensors: Any, dtype: torch.dtype) -> bool:
    """Whether the file format has the dtype; tested by writing an empty tensor, for lack of a public list."""
    try:
        safetensors.torch.save({"": torch.empty(0, dtype=dtype)})
    except KeyError:
        return False
    return True


def _safetensors(function: str) -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            f"{function} needs safetensors. To fix: `pip install safetensors`; without it, "
            "`torch.save(fcg.state_dict(state), path)` and `fcg.load_state_dict(state, torch.load(path))`."
        ) from error
    return safetensors


def _replaceable(target: Path) -> int | None:
    """Return the mode of the file to be replaced; None if there is none yet.

    Raises:
      OSError: If it is not a regular file, or has a second hard link.
    """
    try:
        there = target.lstat()
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(there.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
    if stat.S_ISLNK(there.st_mode):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(target))
    if not stat.S_ISREG(there.st_mode):
        raise OSError(errno.EINVAL, "fcg.save: is no regular file, and would be replaced by one", str(target))
    if there.st_nlink > 1:
        text = "fcg.save: has a second name (a hard link), which would keep the old data; delete one of them"
        raise OSError(errno.EMLINK, text, str(target))
    return stat.S_IMODE(there.st_mode)


def _replace_file(target: Path, content: bytes, mode: int | None) -> None:
    """Write a file beside ``target`` to disk, then move it into place."""
    temporary, file = _temporary(target, mode)
    try:
        with contextlib.ExitStack() as held:
            with file:
                held.callback(os.close, os.dup(file.fileno()))  # is locked until it has its name
                if mode is not None:
                    os.chmod(temporary, mode)  # regardless of the umask
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(target.parent)


def _temporary(target: Path, mode: int | None) -> tuple[Path, BufferedWriter]:
    """Create a file beside ``target``, and lock it where there are locks."""
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    # Never readable by more users than the file that it replaces, not even while being written.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    file = os.fdopen(os.open(temporary, flags, 0o666 if mode is None else mode), "wb")
    lock(file.fileno(), wait=True)
    if temporary.exists():
        return temporary, file
    file.close()  # another process has taken it for one that was left
    return _temporary(target, mode)


def _remove_left(target: Path, *, whole: bool) -> None:
    """Remove what killed saves to ``target`` left: temporary files and, with ``whole``, finished ones of several.

    Files of other libraries, which have no checksum of ours, stay.
    """
    parts, there = names_of_shards(target), list[Path]()
    with contextlib.suppress(OSError):  # writing says why
        there += target.parent.iterdir()
    temporary = re.compile(rf"\.({re.escape(target.name)}|{parts})\.[0-9a-f]{{8}}\.tmp")
    for left in there:
        with contextlib.suppress(OSError):  # it has its name by now, or is another user's
            if temporary.fullmatch(left.name):
                file = os.open(left, os.O_WRONLY | os.O_NOFOLLOW)
                try:
                    if lock(file):  # whoever writes it lives otherwise
                        left.unlink()
                finally:
                    os.close(file)
            elif whole and re.fullmatch(parts, left.name):
                with open_file(left) as content:
                    ours = json.dumps(_CHECKSUM).encode() in _head(content)[1]
                if ours:
                    left.unlink()


def _head(file: Any) -> tuple[bytes, bytes]:
    """Read the length of a safetensors file's header, and the header."""
    start = file.read(8)
    return start, file.read(min(int.from_bytes(start, "little"), os.fstat(file.fileno()).st_size))
