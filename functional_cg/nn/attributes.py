"""Records a module's contents by path, at any depth, and compares them before and after a call.

A forward must leave nothing on the private copy it runs on, which is gone after the call; and changes to the original
after it was copied do not reach the copy. Both show up as differences between contents before and after. Buffer values
may change; only which buffers exist is compared.
"""

from __future__ import annotations

import contextlib
import copyreg
import dis
import hashlib
import io
import pickle
import re
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from functools import cached_property, partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..ambient.running import running
from ..errors import ForeignTensorError, ReadOnlyError, SideEffectError
from ..pytree.sameness import same
from .storage import storage_of

__all__ = [
    "COMPILED",
    "Buffer",
    "Held",
    "Same",
    "changed",
    "copying",
    "held",
    "memory_of",
    "newly_known",
    "plain_tensor",
    "refuse_changed",
    "refuse_exchanged",
    "refuse_unmade",
    "variables",
    "walked",
]

Memory = tuple[Any, ...]

Held = dict[str, Any]  # by path: what stands there, in a form that can be compared later

# Compared by value, in the container that they stand in.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device)
_SEQUENCES = (list, tuple, deque)
_SETS = (set, frozenset)
# Ops belong to the process: they cannot be copied, and torch notes in them where their kernels are.
OPS = (torch._ops.OpOverloadPacket, torch._ops.OpOverload, torch._library.custom_ops.CustomOpDef)
_LEAVES = (Tensor, type, ModuleType, BuiltinFunctionType, *OPS)
_BY_ID = (*_LEAVES, nn.Module, FunctionType)
_OWN = "functional_cg"  # what watches the forward counts
COMPILED = "_compiled_call_impl"  # of `module.compile()`; a copy runs its forward without
_HOOKS = re.compile(r"(^|\.)_forward(_pre)?_hooks(_with_kwargs|_always_called)?(?P<inside>\[.*)?$")


class Same:
    """Wraps an object that is compared by identity, and keeps it alive."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    __hash__ = None  # type: ignore[assignment]


class Buffer(Same):
    """Wraps a buffer: its values may change, but not whether it is None."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Buffer) and (self.value is None) == (other.value is None)

    __hash__ = None


def held(module: nn.Module) -> Held:
    """Record the current contents of a module, its submodules and their classes."""
    with copying():
        buffers = {
            f"{path}.{name}".lstrip("."): Buffer(value)
            for path, part in module.named_modules()
            for name, value in part._buffers.items()  # `named_buffers` leaves out those that are None
        }
        return buffers | {path: _content(value) for path, value in walked(module)}


def walked(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield a module's contents with their paths, each object once; plain values wherever they stand."""
    seen: dict[int, Any] = {}  # keeps the values alive, so that no id is taken again
    left: list[tuple[str, Any]] = [("", module)]
    while left:
        path, value = left.pop()
        if id(value) not in seen:
            seen[id(value)] = value
            left.extend((path + name, below) for name, below in _below(value))
        elif not isinstance(value, _PLAIN):
            continue
        yield path.removeprefix("."), value


def _below(value: Any) -> list[tuple[str, Any]]:
    """List an object's children with their path suffixes; plain values in containers belong to the container."""
    if isinstance(value, (*_LEAVES, *_PLAIN)) or type(value).__module__.startswith(_OWN):
        return []
    if isinstance(value, nn.Module):
        return [*_of_module(value), *_of_class(type(value))]
    if isinstance(value, (dict, *_SEQUENCES, *_SETS)):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        inner = [(f"[{key!r}]", item) for key, item in pairs if not isinstance(item, _PLAIN)]
        return [*inner, *_attributes(value)]
    if isinstance(value, MethodType):
        return [("", value.__self__)]
    if isinstance(value, partial):
        return [("", value.func), ("", value.args), ("", value.keywords), *_attributes(value)]
    if isinstance(value, FunctionType):  # torch keeps things of its own on its functions
        if str(value.__module__).partition(".")[0] == "torch":
            return []
        return [*_attributes(value), *((f".{name}", one) for name, one in variables(value) if _is_data(one))]
    return _attributes(value)


def _of_module(module: nn.Module) -> list[tuple[str, Any]]:
    """List attributes by name, with submodules and parameters as if they were attributes; buffers go elsewhere."""
    found: list[tuple[str, Any]] = []
    for name, value in vars(module).items():
        if name in ("_modules", "_parameters"):
            found += [(f".{key}", item) for key, item in value.items()]
        elif name not in ("_buffers", COMPILED):
            found.append((f".{name}", value))
    return found


def _of_class(cls: type) -> list[tuple[str, Any]]:
    """List data on user-defined classes, which all modules of the class share, copied or not."""
    return [
        (f".{owner.__name__}.{name}", value)
        for owner in cls.__mro__
        if owner.__module__.partition(".")[0] not in ("torch", "builtins")
        for name, value in vars(owner).items()
        if not name.startswith("__") and not isinstance(value, (FunctionType, property)) and _is_data(value)
    ]


def _is_data(value: Any) -> bool:
    return isinstance(value, (*_PLAIN, *_SEQUENCES, *_SETS, dict))


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """List an object's attributes, except cached properties, which would be recomputed."""
    cls = type(value)
    slots = copyreg._slotnames(cls)  # type: ignore[attr-defined]
    found = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    found |= getattr(value, "__dict__", {})
    return [
        (f".{name}", item)
        for name, item in found.items()
        if not isinstance(getattr(cls, str(name), None), cached_property)
    ]


@contextlib.contextmanager
def copying() -> Iterator[None]:
    """Copy iterators without a warning: Python 3.12 and 3.13 say that 3.14 will not."""
    with running().copying(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Pickle, copy, and deepcopy support", DeprecationWarning)
        yield


def _array(value: Any) -> bool:
    return isinstance(value, (bytearray, memoryview)) or (
        type(value).__module__.partition(".")[0] == "numpy" and hasattr(value, "tobytes")
    )


def _content(value: Any) -> Any:
    """An object's own content, without children that have separate paths."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, dict):
        return type(value), tuple(value), tuple(map(_inline, value.values()))
    if isinstance(value, _SEQUENCES):
        return type(value), tuple(map(_inline, value))
    if isinstance(value, _SETS):
        return type(value), frozenset((type(item), item) for item in value)
    if _array(value):
        shape = getattr(value, "shape", None), str(getattr(value, "dtype", ""))
        return (
            type(value),
            shape,
            hashlib.blake2b(value.tobytes() if hasattr(value, "tobytes") else value).digest(),
        )
    return _pickled(value) or Same(value)


def _pickled(value: Any) -> Any:
    """Return the state that an object keeps in C, such as an iterator's position; None if it says nothing of it."""
    cls, written = type(value), io.BytesIO()
    if isinstance(value, (*_BY_ID, MethodType, partial)):
        return None
    if not any(vars(owner).keys() & {"__reduce__", "__reduce_ex__"} for owner in cls.__mro__[:-1]):
        return None
    try:
        _Pickler(written).dump(value)
    except Exception:  # an object that cannot be copied: the module's own copy shares it
        return None
    return cls, written.getvalue()


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> int | None:
        return id(value) if isinstance(value, _BY_ID) else None


def _inline(item: Any) -> Any:
    if isinstance(item, Tensor):
        return Same(item)
    return item if isinstance(item, _PLAIN) else ...  # what stands at a path of its own


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """List the paths whose contents differ, without those below another such path."""
    paths = [path for path in {**before, **after} if not _equal(before, after, path)]
    return [path for path in paths if not any(path != one and _is_below(path, one) for one in paths)]


def newly_known(before: Held, after: Held) -> dict[str, Any] | None:
    """Return what stands by path where None or nothing stood, ``Tensor`` for any; None if anything else differs.

    Hooks on the forward may be added: they count by what they do.
    """
    found = {}
    for path in {**before, **after}:
        old, new = before.get(path), after.get(path)
        if _equal(before, after, path) or _adds_hooks(path, old, new):
            continue
        if isinstance(old, Buffer):
            old = old.value
        is_tensor = isinstance(new, Same) and isinstance(new.value, Tensor)
        if old is not None or new is None or not (is_tensor or isinstance(new, _PLAIN)):
            return None
        found[path] = Tensor if is_tensor else new
    return found or None


def _adds_hooks(path: str, old: Any, new: Any) -> bool:
    """Whether a difference is that of a registry of hooks which has the same ones and more, or inside of a new one."""
    found = _HOOKS.search(path)
    if found is None or new is None:
        return False
    return old is None or (found["inside"] is None and old[1] == new[1][: len(old[1])])


def _is_below(path: str, other: str) -> bool:
    return path.startswith(other) and path[len(other) :][:1] in (".", "[")


def _equal(before: Mapping[str, Any], after: Mapping[str, Any], path: str) -> bool:
    if path not in before or path not in after:
        return False
    old, new = before[path], after[path]
    return bool(old == new) if isinstance(old, Same) else same(new, old)


def refuse_changed(name: str, before: Held, after: Held) -> None:
    """Raise for the differences between a module's contents before its forward and after it.

    Raises:
      SideEffectError: Names each buffer that came or went; else each attribute, element or key.
    """
    paths = changed(before, after)
    buffers = [path for path in paths if isinstance(before.get(path, after.get(path)), Buffer)]
    if buffers:
        raise _buffers_changed(name, {path: (before.get(path), after.get(path)) for path in buffers})
    if paths:
        raise SideEffectError.of(
            name,
            f"its forward changes {len(paths)} attribute{'s' * (len(paths) > 1)} of the module.",
            rows=[f"`{path}`" for path in paths],
            why="`apply` is a pure function: what the forward leaves on the module is gone after the call.",
            fix="return it; or, to look at it, `fcg.tap(name, x)`; or make it a tensor and register it, "
            "`self.register_buffer(...)`: then it is returned in `new_buffers`. If only the first forward changes it, "
            "run that before `from_module`, `model(x)`.",
        )


def _buffers_changed(name: str, found: Mapping[str, tuple[Any, Any]]) -> SideEffectError:
    path, (before, _) = next(iter(found.items()))
    attribute = path.rpartition(".")[2]
    fix = f"register it with its first value, `self.register_buffer({attribute!r}, value)`, in `__init__`."
    if isinstance(before, Buffer) and before.value is not None:
        fix = f"keep it a tensor, `self.{attribute} = torch.zeros_like(self.{attribute})`."
    return SideEffectError.of(
        name,
        "its forward changes which buffers the module has.",
        rows=[f"`{path}`  before {_shown(old)}   after {_shown(new)}" for path, (old, new) in found.items()],
        why="`new_buffers` has the names of `buffers`: another one would be gone after the call.",
        fix=fix,
    )


def _shown(buffer: Any) -> str:
    if not isinstance(buffer, Buffer):
        return "not registered"
    return "None" if buffer.value is None else "a tensor"


def refuse_unmade(name: str, module: nn.Module, made: Iterable[str]) -> None:
    """Raise if a hook has not set an attribute of the module that held a tensor when it was copied.

    Raises:
      ForeignTensorError: Names the attribute.
    """
    for path in made:
        where, _, attribute = path.rpartition(".")
        tensor = getattr(module.get_submodule(where), attribute, None)
        if isinstance(tensor, Tensor) and tensor.is_meta:
            raise plain_tensor(name, path)


def plain_tensor(name: str, path: str) -> ForeignTensorError:
    """Return the error for an attribute that holds a tensor and is not registered."""
    attribute = path.rpartition(".")[2]
    return ForeignTensorError.of(
        name,
        f"`{path}` is a tensor, but neither a parameter nor a buffer.",
        why="It would not be a part of the state, and never be updated.",
        fix=f'register it, `self.register_buffer("{attribute}", value)`; if an earlier call has left it there, '
        "delete it.",
    )


def refuse_exchanged(name: str, root: str, before: Mapping[str, Memory], held: Mapping[str, Tensor]) -> None:
    """Raise if tensors that the module held now have other memory than before the forward.

    Raises:
      ReadOnlyError: Names each of them.
    """
    exchanged = [
        key for key in before if storage_of(held[key]) is not None and memory_of(held[key]) != before[key]
    ]
    if not exchanged:
        return
    attribute = exchanged[0].rpartition(".")[2]
    fix = f"write its values, `self.{attribute}.copy_(...)`: they are returned in `new_buffers`."
    if root == "params":
        fix = f"give the new value a name of its own, `{attribute} = ...`, and compute with that."
    raise ReadOnlyError.of(
        name,
        f"its forward exchanges the memory of {len(exchanged)} tensor{'s' * (len(exchanged) > 1)} "
        "(`.data = ...`, `swap_tensors`).",
        rows=[f"{root}[{key!r}]" for key in exchanged],
        why="`apply` is a pure function: what becomes of the tensors that it holds is gone after the call.",
        fix=fix,
    )


def memory_of(tensor: Tensor) -> Memory:
    """Return where a tensor's elements are, to be compared while something holds that memory."""
    return storage_of(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()


def variables(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the variables around a function that it reads, by name: of its closure, and of its module."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not yet assigned
            yield name, cell.cell_contents
    codes, known = [function.__code__], function.__globals__
    for code in codes:  # and the functions inside of it
        codes += [one for one in code.co_consts if isinstance(one, CodeType)]
    steps = (step for code in codes for step in dis.get_instructions(code))
    names = {step.argval for step in steps if step.opname == "LOAD_GLOBAL"}
    yield from ((name, known[name]) for name in sorted(names & known.keys()))
