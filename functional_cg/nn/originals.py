"""Detects changes to modules after ``from_module`` copied them, which would have no effect.

A captured step never visits its modules again, so each call of it asks here. While a module is alive, its attributes
and items are compared by identity, in C; only if something differs are the contents examined. Modes, dtypes and other
tensors do not count as changes: the mode is an argument of the call, and tensor values were copied; but those of
tensors that plain objects hold do, since nobody would pass other values.
"""

from __future__ import annotations

import operator
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import BakedValueError
from ..tensors.aten import unwrapped
from ..tensors.fingerprint import as_now, seen
from .attributes import Held, Same, changed, held, walked
from .refusals import made_by_hooks

__all__ = ["Applied", "Met", "Original", "fixed_tensors", "meeting", "note", "note_tensors"]

_met: ContextVar[Met | None] = ContextVar("met", default=None)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# Run for every module of the process.
_ON_ALL = tuple(f"_global{name}" for name in _HOOKS)
_BY_NAME = ("_parameters", "_buffers")  # other tensors may take their places
_hooks_of = operator.attrgetter("_backward_hooks")
# What `torch.compile` and `torch.jit.script` put on a module.
_MARKS = frozenset({"_is_torch_compile", "__overloads__"})
_MANY = 256  # of what stands in longer containers, the number alone is compared at each call


class Original:
    """A copied module and its contents at the time.

    It references the module only weakly: a module that nobody else holds cannot be changed.
    """

    def __init__(self, module: nn.Module) -> None:
        self._name = type(module).__name__
        self._module = weakref.ref(module, self._gone)
        self._held = _compared(module)
        self._remember(module)

    def _remember(self, module: nn.Module) -> None:
        parts = [part for _, part in module.named_modules()]
        names = vars(nn.Module()).keys() - {"_modules"}  # under which torch keeps things in each module
        found = [value for path, value in walked(module) if path.rpartition(".")[2] not in names]
        stores = [store for value in found for store in _stores(value, names)]
        hooks = [getattr(part, name) for part in parts for name in _HOOKS]
        stores += [(registry, tuple(registry)) for registry in hooks if registry]
        entries = [entry for store, names in stores for entry in ((store, name) for name in names)]
        self._counted = [store for store, _ in stores]
        self._counts = list(map(len, self._counted))
        self._owners, self._names = [owner for owner, _ in entries], [name for _, name in entries]
        self._values = list(map(operator.getitem, self._owners, self._names))
        self._hooks = [registry for registry in hooks if not registry]
        self._parts = parts[1:]  # the module itself would keep itself alive
        self._class: type = type(module)
        self._classes = list(map(type, self._parts))
        self._registries = [getattr(part, name) for part in parts for name in _BY_NAME]
        self._tensors = list(self._registered())
        self._ids = list(map(id, self._tensors))
        self._parameters = list(module.parameters())
        self._grads = [one.requires_grad for one in self._parameters]
        self._on_all = _on_all()
        self._fixed = as_now(list(fixed_tensors(module).values()))

    def _registered(self) -> Iterator[Tensor | None]:
        return chain.from_iterable(map(dict.values, self._registries))

    @staticmethod
    def _nothing_changes() -> bool:
        return True

    def _gone(self, _: object) -> None:
        # What is left of the module goes with this. At the end of the process, names of modules are gone before.
        self._counted, self._owners, self._names, self._values = [], [], [], []
        self._hooks, self._parameters, self._counts, self._grads, self._held = [], [], [], [], {}
        self._class, self._fixed = None.__class__, self._nothing_changes
        self._parts, self._classes, self._registries, self._tensors, self._ids = [], [], [], [], []

    def __reduce__(self) -> Any:
        return _Unknown, ()  # a copy of the function is one of a copy: there is no module to change

    def unchanged(self) -> bool:
        """Whether the module is unchanged; usually a quick identity check."""
        try:
            if (
                not any(self._hooks)
                and list(map(len, self._counted)) == self._counts
                and all(map(operator.is_, map(operator.getitem, self._owners, self._names), self._values))
                and type(self._module()) is self._class
                and list(map(type, self._parts)) == self._classes
                and list(map(id, self._registered())) == self._ids  # `==` of tensors is no bool
                and [one.requires_grad for one in self._parameters] == self._grads
                and not any(map(_hooks_of, self._parameters))
                and _on_all() == self._on_all
                and self._fixed()
            ):
                return True
        except (KeyError, IndexError):  # one is gone
            pass
        return not self._changes()

    def _changes(self) -> list[str]:
        module = self._module()
        if module is None:
            return []
        paths = changed(self._held, _compared(module))
        if not paths:
            self._remember(module)  # a mode, or another tensor
        return paths

    def check(self, function: str = "") -> None:
        """Raise if the module changed after it was copied.

        Raises:
          BakedValueError: Names what changed.
        """
        paths = [] if self.unchanged() else self._changes()
        if paths:
            raise BakedValueError.of(
                function or self._name,
                f"{self._name} was changed after `from_module` copied it.",
                rows=[f"`{path}`" for path in paths],
                why="`apply` runs the copy: the change would have no effect.",
                fix="change the module before `apply, params, buffers = fcg.from_module(model)`, and make the step "
                "anew, `graph_step(fn)`.",
            )


class _Unknown:
    """Stands in for an original in another process, or for that of a copied function."""

    def unchanged(self) -> bool:
        """Always true: there is no module to change."""
        return True

    def check(self, function: str = "") -> None:
        """Never raises."""


@dataclass(frozen=True, slots=True, eq=False)
class Applied:
    """One call of an ``apply``, as recorded for a trace.

    Attributes:
      original: The module that was copied.
      name: Name of its class.
      by_mode: Whether, in training mode, it wrote buffers, or drew random numbers where it reads its mode.
      parts: Submodules whose buffers were written, with their class.
      written: New values of those buffers.
    """

    original: Original | _Unknown
    name: str
    by_mode: bool
    parts: tuple[str, ...]
    written: tuple[Tensor, ...]


@dataclass(slots=True)
class Met:
    """What calls of ``apply`` report to a trace.

    Attributes:
      applied: The calls that have ended.
      buffers: The buffers that any of them was given.
      fixed: By id, name and tensor of what the modules' plain objects hold, which never changes.
    """

    applied: list[Applied] = field(default_factory=list)
    buffers: list[Tensor] = field(default_factory=list)
    fixed: dict[int, tuple[str, Tensor]] = field(default_factory=dict)


def note_tensors(buffers: Iterable[Tensor], fixed: Mapping[str, Tensor]) -> None:
    """Report what an ``apply`` is given, and what its module holds besides, to the running trace, if any."""
    found = _met.get()
    if found is not None:
        found.buffers += map(unwrapped, buffers)
        found.fixed |= {id(tensor): (name, tensor) for name, tensor in fixed.items()}


def note(applied: Applied) -> None:
    """Report a call of an ``apply`` to the running trace, if any."""
    found = _met.get()
    if found is not None:
        found.applied.append(applied)


def _on_all() -> tuple[int, ...]:
    """How many hooks of each kind run for every module."""
    return tuple(map(len, map(vars(torch.nn.modules.module).__getitem__, _ON_ALL)))


def fixed_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return, by path, the tensors that plain objects of a module hold, such as a noise schedule."""
    made = made_by_hooks(module)
    known = {id(tensor) for tensor in (*module.parameters(), *module.buffers(), *made.values())}
    return {path: one for path, one in walked(module) if isinstance(one, Tensor) and id(one) not in known}


def _compared(module: nn.Module) -> Held:
    """Whatever must not change: all contents of a module except its modes and which registered tensors it holds."""
    found = {
        path: content
        for path, content in held(module).items()
        if path and path.rpartition(".")[2] not in {"training", *_MARKS} and "<" not in path
    }
    fixed = fixed_tensors(module)
    first: dict[int, str] = {}
    settings: Held = {"hooks of all modules": _on_all()}
    for name, param in module.named_parameters(remove_duplicate=False):
        settings[f"{name}.requires_grad"] = param.requires_grad
        settings[f"{name}._backward_hooks"] = bool(_hooks_of(param))
        settings[f"{name} is"] = first.setdefault(id(param), name)
    for name, tensor in fixed.items():
        count, memory, view = seen(tensor)
        settings[f"values of {name}"] = (count, Same(memory), view)
    settings |= {f"{name}.__class__".lstrip("."): type(part) for name, part in module.named_modules()}
    return {path: one for path, one in found.items() if path in fixed or not _is_tensor(one)} | settings


def _is_tensor(content: Any) -> bool:
    return isinstance(content, Same) and isinstance(content.value, Tensor)


def _stores(value: Any, of_torch: Set[str]) -> Iterator[tuple[Any, Sequence[Any]]]:
    """Yield the containers that store an object's state, with the names or keys to compare in each."""
    attributes = getattr(value, "__dict__", None)
    if isinstance(value, nn.Module):
        yield value._modules, tuple(value._modules)
        yield vars(value), tuple(vars(value).keys() - of_torch - {"_modules"})
    elif isinstance(attributes, dict) and not isinstance(value, Tensor):
        yield attributes, tuple(attributes)
    if isinstance(value, (dict, list, deque)):
        names = tuple(value) if isinstance(value, dict) else range(len(value))
        yield value, names if len(names) <= _MANY else ()
    elif isinstance(value, (set, bytearray)):
        yield value, ()


@contextmanager
def meeting(found: Met) -> Iterator[None]:
    """Collect what every ``apply`` in the block reports."""
    token = _met.set(found)
    try:
        yield
    finally:
        _met.reset(token)
