"""Checkpoints: save a state as a flat dict of host tensors or as a file, and load it into the same slots.

A checkpoint holds leaves under their dotted key paths, and nothing of the structure: the program that made
the state makes it again, and loads the values into it. So a file needs no pickle, stays readable when a class
is renamed, and can be read by other programs. By contrast, ``torch.save(fcg.snapshot(state), path)`` also
pickles the optimizer's classes and functions, which ``torch.load`` refuses by default (``weights_only``), and
fails on a schedule written as a lambda.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import tree as pytree
from .ambient.modes import ordinary, without_gradients
from .concurrency.turns import at_one_time
from .errors import LayoutError
from .messages.tracebacks import entry
from .shards.tensor import Sharded
from .state.arena import BufferSpec, refuse_unplaceable, unplaceable
from .state.handle import Handle
from .state.leaf import Leaf, as_tensor, key_name, owned, turns_of
from .tree import Treedef, path_string

__all__ = ["load", "load_state_dict", "names_of", "save", "state_dict"]

T = TypeVar("T")


@entry()
def state_dict(state: Any) -> dict[str, Tensor]:
    """Copy the leaves of a state, of part of a state, or of a plain pytree to the host, under dotted names.

    The tensors are contiguous and owned by the caller: ``torch.save`` them (``torch.load`` needs no
    ``weights_only=False``), or let :func:`save` write them. Parameters keep the names they have in their
    module, so ``module.load_state_dict(fcg.state_dict(state.params))`` loads them back into the module.

    Args:
      state: A handle or a pytree of tensors; Python numbers and numpy arrays become tensors.
    Returns:
      One CPU tensor per leaf, in flat order, with the leaf's shape and dtype.
    Raises:
      DonatedStateError: If the handle was donated.
      LayoutError: If a leaf is not a dense tensor, or is sharded.
      ValueError: If two leaves have the same name, as in ``{"a.b": x, "a": {"b": y}}``.

    Example:
      >>> import torch, functional_cg as fcg
      >>> module = torch.nn.Linear(2, 1)
      >>> params = dict(module.named_parameters())
      >>> state = fcg.TrainState.create(params=params, optimizer=fcg.optim.sgd(0.1))
      >>> list(fcg.state_dict(state))
      ['step', 'params.bias', 'params.weight', 'opt_state.count']
      >>> module.load_state_dict(fcg.state_dict(state.params))
      <All keys matched successfully>
    """
    leaves, treedef = _opened(state)
    names = names_of(treedef)
    return dict(zip(names, at_one_time(turns_of(leaves), partial(_all_on_host, names, leaves)), strict=True))


@entry("state = fcg.load_state_dict(state, values)")
def load_state_dict(state: T, d: Mapping[str, Any]) -> T:
    """Write a flat dict, as returned by :func:`state_dict`, into a state; donates the handle.

    The values go into the existing slots: steps keep their captures, and the slots keep their strides. A
    plain pytree is not written to; a copy is returned. To load only part of a state, such as the parameters
    of a pretrained module, use ``state.replace``.

    Args:
      state: A handle, or a pytree of tensors.
      d: One value per leaf, of the leaf's shape and dtype: tensors on any device, or numpy arrays.
    Returns:
      The new handle, or the new pytree.
    Raises:
      DonatedStateError: If the handle was donated.
      LayoutError: If names are missing or unexpected, or values do not fit; lists them all, writes nothing.
      TypeError: If ``d`` is not a mapping, or ``state`` is part of a state.

    Example:
      >>> import torch, functional_cg as fcg
      >>> module = torch.nn.Linear(2, 1)
      >>> params = dict(module.named_parameters())
      >>> state = fcg.TrainState.create(params=params, optimizer=fcg.optim.sgd(0.1))
      >>> kept = fcg.state_dict(state)
      >>> state = state.replace(step=7)
      >>> state = fcg.load_state_dict(state, kept)
      >>> int(state.step)
      0
      >>> pretrained = torch.nn.Linear(2, 1).state_dict()
      >>> state = state.replace(params={name: pretrained[name] for name in state.params})
    """
    return _loaded(state, d, "fcg.load_state_dict")


@entry()
def save(path: str | os.PathLike[str], state: Any) -> None:
    """Write the leaves of a state to a safetensors file, all or nothing.

    The data goes to a temporary file beside ``path``, which replaces it once everything is on disk: a crash,
    a full disk or Ctrl-C leaves the old file intact. Takes twice the size of the state on the host.

    Args:
      path: The file. An existing file is replaced and keeps its mode; a symbolic link to it stays. Anything
        but a regular file (a pipe, a device, a directory) is refused, as is a file with a second hard link,
        which would keep the old data.
      state: What :func:`state_dict` takes.
    Raises:
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
    content = _serialized(state_dict(state))
    try:
        _replace_file(target, content, _replaceable(target))
    except OSError as error:  # name the target, not the temporary file
        raise OSError(error.errno, error.strerror, str(target)) from error


@entry("state = fcg.load(path, state)")
def load(path: str | os.PathLike[str], state: T) -> T:
    """Read a file written by :func:`save` into a state of the same layout; donates the handle.

    Any other safetensors file with the right names works too. For the weights of a pretrained model:
    ``state.replace(params=fcg.load(path, fcg.snapshot(state.params)))``.

    Args:
      path: The file.
      state: What :func:`load_state_dict` takes.
    Returns:
      The new handle, or the new pytree.
    Raises:
      DonatedStateError: If the handle was donated.
      ImportError: If safetensors is not installed.
      LayoutError: If it is the checkpoint of another model; names the differences, writes nothing.
      OSError: If the file cannot be read.
      ValueError: If it is not a complete safetensors file.
    """
    _checked_path(path, "fcg.load")
    safetensors = _safetensors("fcg.load")
    with open(path, "rb"):  # raises Python's own error for a bad path
        pass
    try:
        values = safetensors.torch.load_file(path)
    except safetensors.SafetensorError as error:
        if _of_torch(path):
            raise ValueError(
                f"fcg.load: {path} was written by `torch.save`, and `fcg.load` reads what `fcg.save` has written.\n"
                "To fix: `values = torch.load(path)`; then, if it is the `state_dict` of a module, "
                "`module.load_state_dict(values)` before `fcg.from_module(module)`; if it is that of a state, "
                "`state = fcg.load_state_dict(state, values)`."
            ) from error
        raise ValueError(f"fcg.load: {path} is no safetensors file, or not a whole one: {error}") from error
    return _loaded(state, values, "fcg.load", f" in {os.fspath(path)}")


def _of_torch(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins as those of ``torch.save`` do: with an archive or, in older ones, with a pickle."""
    with open(path, "rb") as file:
        return file.read(4).startswith((b"PK\x03\x04", b"\x80\x02"))


def _part_fix(slots: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    """Return the fix for values that are those of a field, such as the parameters; "" for others."""
    fields = dict.fromkeys(name.partition(".")[0] for name in slots if "." in name)
    for field in fields:
        if set(values) == {name.partition(".")[2] for name in slots if name.startswith(f"{field}.")}:
            return f"these are the names of one field: `state = state.replace({field}=dict(values))`."
    return ""


def _loaded(state: T, d: Mapping[str, Any], function: str, where: str = "") -> T:
    if not isinstance(d, Mapping):
        raise TypeError(
            f"{function}: expected a dict of names and tensors, got {type(d).__name__}.\n"
            f"To fix: `state = {function}(state, values)`, the state first."
        )
    _refuse_part(state, function)
    leaves, treedef = _opened(state)
    values = {name: owned(as_tensor(value)) for name, value in d.items()}
    slots = dict(zip(names_of(treedef), leaves, strict=True))
    rows = _differences(slots, values)
    if rows:
        raise LayoutError.of(
            "",
            f"{function}: the values{where} do not fit `state`, which is unchanged.",
            rows=rows,
            why="Each name has one slot, of a fixed shape and dtype.",
            fix=_part_fix(slots, values)
            or "create the state as it was when the values were saved (model, optimizer, fields), or rename and "
            "convert the values first; nothing is broadcast and nothing is cast.",
        )
    ordered = [values[name] for name in slots]
    if isinstance(state, Handle):
        return state._write(dict(enumerate(ordered)), function, [])  # type: ignore[return-value]
    with ordinary():
        without_gradients()
        copies = [torch.empty_like(leaf).copy_(value) for leaf, value in zip(leaves, ordered, strict=True)]
    return pytree.unflatten(treedef, copies)  # type: ignore[no-any-return]


def _refuse_part(state: Any, function: str) -> None:
    if isinstance(state, Handle) and state._owner is not None:
        path = state._part.path
        raise TypeError(
            f"{function}: `{path}` is a part of a state; write through the whole: "
            f"`state = state.replace(params=fcg.load_state_dict(fcg.snapshot({path}), d))`, for example"
        )


def _opened(state: Any) -> tuple[list[Tensor], Treedef]:
    """Return the leaves of a state as tensors, and its structure."""
    flat, treedef = pytree.flatten(state)
    leaves = [as_tensor(leaf) for leaf in flat]
    plain = [
        (path, leaf)
        for path, leaf in zip(treedef.paths(), leaves, strict=True)
        if not isinstance(leaf, Leaf | Sharded)
    ]
    refuse_unplaceable([path for path, _ in plain], [leaf for _, leaf in plain], [None] * len(plain), "state")
    return leaves, treedef


def names_of(treedef: Treedef, function: str = "fcg.state_dict", root: str = "state") -> list[str]:
    """Return the dotted names of all leaves, in flat order.

    Dots inside a key stay as they are, because a module's own names contain them.

    Raises:
      ValueError: If two leaves would get the same name.
    """
    paths: dict[str, Any] = {}
    for path in treedef.paths():
        name = ".".join(str(key_name(key)) for key in path)
        if name in paths:
            raise ValueError(
                f"{function}: `{path_string(paths[name], root)}` and `{path_string(path, root)}` have the same name, "
                f"{name!r}. To fix: rename one of the keys."
            )
        paths[name] = path
    return list(paths)


def _all_on_host(names: Sequence[str], leaves: Sequence[Tensor]) -> list[Tensor]:
    with ordinary():
        without_gradients()
        return [_on_host(name, leaf) for name, leaf in zip(names, leaves, strict=True)]


def _on_host(name: str, leaf: Tensor) -> Tensor:
    if isinstance(leaf, Sharded):
        raise LayoutError.of(
            "",
            "fcg.state_dict: the state is sharded.",
            rows=[f"{name}  {BufferSpec.of(leaf)}"],
            why="This rank holds its shards only.",
            fix="`fcg.sharding.state_dict(state)`, on all ranks; rank 0 gets all of it.",
        )
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu").copy_(leaf)


def _differences(slots: Mapping[str, Tensor], values: Mapping[str, Any]) -> list[str]:
    """Return one row for each name that is missing, unexpected, or has a value of another shape or dtype."""
    rows = []
    for name in [*slots, *(name for name in values if name not in slots)]:
        expected = _type(slots[name]) if name in slots else "nothing"
        got = _type(values[name]) if name in values else "nothing"
        if got != expected:
            rows.append(f"{name}  expected {expected}   got {got}")
    return rows


def _type(value: Any) -> str:
    """Return dtype and shape as text, without the device, which may differ."""
    problem = "" if isinstance(value, Leaf | Sharded) else unplaceable(value)
    return problem or str(BufferSpec.of(value)).partition("@")[0]


def _checked_path(path: Any, function: str) -> Any:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"{function}: expected a path, got {type(path).__name__}. To fix: `{function}(path, state)`, path first."
        )
    return path


def _serialized(tensors: dict[str, Tensor]) -> bytes:
    """Return the content of a safetensors file."""
    safetensors = _safetensors("fcg.save")
    if "__metadata__" in tensors:
        raise ValueError(
            "fcg.save: a leaf is named '__metadata__', which safetensors files reserve. Rename it."
        )
    unknown = {tensor.dtype for tensor in tensors.values() if not _storable(safetensors, tensor.dtype)}
    for name, tensor in tensors.items():
        if tensor.dtype in unknown:
            raise TypeError(
                f"fcg.save: safetensors files cannot hold {_type(tensor)}, as `{name}` is. To fix: keep it as two real "
                "tensors (`torch.view_as_real` of a complex one); or `torch.save(fcg.state_dict(state), path)`."
            )
    return safetensors.torch.save(tensors, {"format": "pt"})  # type: ignore[no-any-return]


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
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    # Never readable by more users than the file that it replaces, not even while being written.
    file = os.fdopen(
        os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else mode), "wb"
    )
    try:
        with file:
            if mode is not None:
                os.chmod(temporary, mode)  # regardless of the umask
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_directory(target.parent)


def _sync_directory(directory: Path) -> None:
    """Make a rename survive a power cut; does nothing where directories cannot be opened (Windows)."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
