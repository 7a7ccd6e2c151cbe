"""A value of the host and the way to read it again: a root, then attributes and constant keys.

Following one runs nothing of the user's: only what instances, classes, modules and plain containers store is followed.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from types import FunctionType, MappingProxyType, MemberDescriptorType, ModuleType
from typing import Any

import torch

from ..source import is_user_file
from .values import LARGEST, View, in_classes, instance_dict, is_array, is_container, is_value, missing

__all__ = ["Made", "Ref", "Refs", "Step", "either", "is_installed", "is_user_module"]

_LONGEST_PATH = 32
_BUILTIN_ITEMS = (
    dict.__getitem__,
    list.__getitem__,
    tuple.__getitem__,
    MappingProxyType.__getitem__,
    collections.deque.__getitem__,
    bytearray.__getitem__,
)
# Libraries of which a function, named in the code, is one that the scan may know.
_STANDARD = frozenset({"builtins", "copy", "dataclasses", "functools", "itertools", "math", "operator", "os"})


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a path: an attribute, or an item by a constant key."""

    key: Any
    item: bool = False

    def read(self, value: Any) -> Any:
        return value[self.key] if self.item else getattr(value, self.key)

    def shown(self) -> str:
        if not self.item:
            return f".{self.key}"
        return f'["{self.key}"]' if type(self.key) is str else f"[{self.key!r}]"


@dataclass(frozen=True, slots=True)
class Ref:
    """A value and the way to read it again: `steps` from `root`. Without a root it is taken for constant.

    Attributes:
      name: How the user writes it, such as ``self.cfg["lr"]``.
      bound: For a method, its ``self``.
      view: The part that is compared, if it is not the value itself; `value` is that part then.
    """

    value: Any
    root: Any = None
    steps: tuple[Step, ...] = ()
    name: str = ""
    bound: Ref | None = None
    view: View | None = None

    @classmethod
    def to(cls, value: object, name: str) -> Ref:
        return cls(value, value, (), name)

    @property
    def place(self) -> tuple[object, ...]:
        """What tells it from others: the same for two that are read in the same way."""
        bound = None if self.bound is None else self.bound.place
        made = isinstance(self.value, Made)
        what = self.value.place if made else id(self.value if self.root is None else self.root)
        return what, self.steps, bound, self.view and self.view.text

    def follow(self, value: object, *steps: Step, name: str = "") -> Ref | None:
        if self.root is None:
            return Ref(value)
        if len(self.steps) + len(steps) > _LONGEST_PATH:
            return None
        return Ref(value, self.root, (*self.steps, *steps), name or self.name + steps[-1].shown())

    def seen(self, view: View) -> Ref:
        """A part of the value, as an entry of the watch."""
        name = view.text.format(self.name)
        return dataclasses.replace(self, value=view.read(self.value), view=view, name=name)

    def read(self) -> Any:
        """The value as it is now. Raises whatever reading it raises."""
        value = self.root
        for step in self.steps:
            value = step.read(value)
        return value if self.view is None else self.view.read(value)

    def attribute(self, name: str) -> Ref | None:
        """Follow an attribute that is stored, not computed; a method or a property comes with its ``self``."""
        owner: Any = self.value
        if isinstance(owner, torch.Tensor | Made) or (isinstance(owner, type) and name == "__dict__"):
            return None
        if isinstance(owner, ModuleType):
            return self._of_module(name)
        if isinstance(owner, super):
            return _inherited(owner, name, self.bound)
        if isinstance(owner, type):
            return self._of_class(owner, name)
        if name == "__dict__":
            return self.follow(held, Step(name)) if (held := instance_dict(owner)) else None
        return self._stored(name) or _member(type(owner).__mro__, name, self)

    def _of_module(self, name: str) -> Ref | None:
        owner: ModuleType = self.value
        found = vars(owner).get(name, missing)
        if found is os.environ:
            return Ref.to(found, "os.environ")
        # What libraries keep in their modules (torch.float32, math.pi) is taken for constant.
        if found is missing or not is_user_module(owner):
            known = owner.__name__ in _STANDARD and callable(found)
            return Ref(found) if known else None
        return self.follow(found, Step(name))

    def _of_class(self, owner: type, name: str) -> Ref | None:
        found = in_classes(owner.__mro__, name)
        if isinstance(owner, enum.EnumType):
            return Ref(found) if isinstance(found, owner) else None
        if isinstance(found, classmethod):
            return Ref(found.__func__, bound=self)
        found = found.__func__ if isinstance(found, staticmethod) else found
        return None if found is missing or _computes(found) else self.follow(found, Step(name))

    @property
    def computes_attributes(self) -> Ref | None:
        """The ``__getattr__`` that Python asks for an attribute that is not stored."""
        found = in_classes(type(self.value).__mro__, "__getattr__")
        known = isinstance(found, FunctionType) or found in (dict.__getitem__, dict.get)
        return Ref(found, bound=self) if known else None

    def _stored(self, name: str) -> Ref | None:
        """An attribute that the instance itself holds: in its dict, its slots, its registry of submodules."""
        owner, classes = self.value, type(self.value).__mro__
        in_class = in_classes(classes, name)
        if isinstance(in_classes(classes, "__getattribute__"), FunctionType):
            return None
        if isinstance(in_class, MemberDescriptorType) or (
            isinstance(owner, tuple) and name in _fields(owner)
        ):
            value = getattr(owner, name, missing)
            return None if value is missing else self.follow(value, Step(name))
        if hasattr(type(in_class), "__set__"):
            return None  # a property comes before the instance's dict
        storage = instance_dict(owner)
        if name in storage:
            return self.follow(storage[name], Step(name))
        for registry in ("_modules", "_parameters", "_buffers") if isinstance(owner, torch.nn.Module) else ():
            if name in storage.get(registry, ()):
                steps = Step(registry), Step(name, item=True)
                return self.follow(storage[registry][name], *steps, name=f"{self.name}.{name}")
        return None

    @property
    def storage(self) -> Ref:
        """The plain container in which one of the standard library's classes keeps what it holds; else itself."""
        if isinstance(self.value, collections.UserDict | collections.UserList):
            return self.attribute("data") or self
        return self

    def item(self, key: object) -> Ref | None:
        """Follow a constant key of a dict, a list, a tuple or an array."""
        owner = self.value
        if owner is os.environ:
            return self._variable(key)
        if owner is not self.storage.value:
            found = self.storage.item(key)
            return found and dataclasses.replace(found, name=self.name + Step(key, item=True).shown())
        getter = in_classes(type(owner).__mro__, "__getitem__")
        if not is_value(key) or (getter not in _BUILTIN_ITEMS and not is_array(owner)):
            return None
        try:
            # A default of the class's own would be made, and kept.
            if isinstance(owner, dict) and not dict.__contains__(owner, key):
                return None
            return self.follow(owner[key], Step(key, item=True))
        except (LookupError, TypeError):
            return None

    def _variable(self, key: object) -> Ref | None:
        name = f'os.environ["{key}"]'
        held = vars(os.environ)["_data"]
        code = os.environ.encodekey(key) if isinstance(key, str) else key
        return (
            self.follow(held[code], Step("_data"), Step(code, item=True), name=name) if code in held else None
        )

    def elements(self) -> Iterable[Ref]:
        """What iterating yields, of a container, a module or an array: the first of them, where they are many."""
        owner = self.storage.value
        if isinstance(owner, torch.nn.Module):
            registry = self.attribute("_modules")
            found = [registry.item(key) for key in owner._modules] if registry is not None else []
            return [ref for ref in found if ref is not None]
        if isinstance(owner, dict | MappingProxyType):
            return [Ref(key) for key in itertools.islice(owner, LARGEST)]
        if isinstance(owner, set | frozenset):
            return [Ref(part) for part in itertools.islice(owner, LARGEST)]
        if is_container(owner) and (not is_array(owner) or owner.ndim):
            found = [self.item(place) for place in range(min(len(owner), LARGEST))]
            return [ref for ref in found if ref is not None]
        return ()

    def values(self) -> Iterable[Ref]:
        """The values of a dict; the elements of another container."""
        owner = self.storage.value
        if not isinstance(owner, dict | MappingProxyType):
            return self.elements()
        found = [self.item(key) for key in itertools.islice(owner, LARGEST)]
        return [ref for ref in found if ref is not None]


Refs = tuple[Ref, ...]
"""What a place may stand for: one value, or one of several where branches join; nothing that is known, if empty."""


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """A tuple, a list, a dict or an iterator that the step makes: what it holds, by position or key."""

    parts: Mapping[Any, Refs]

    @classmethod
    def of(cls, *parts: Refs) -> Refs:
        return (Ref(cls(dict(enumerate(parts)))),)

    @property
    def place(self) -> tuple[object, ...]:
        return tuple((key, tuple(ref.place for ref in refs)) for key, refs in self.parts.items())

    @property
    def all(self) -> Refs:
        return either(*self.parts.values())


def either(*places: Iterable[Ref]) -> Refs:
    """What may stand where several places join."""
    refs = {ref.place: ref for place in places for ref in place}
    return tuple(itertools.islice(refs.values(), LARGEST))


def _fields(owner: tuple[Any, ...]) -> tuple[str, ...]:
    return getattr(type(owner), "_fields", ())


def _computes(found: Any) -> bool:
    return hasattr(type(found), "__get__") and not isinstance(found, FunctionType)


def _member(classes: Sequence[type], name: str, instance: Ref) -> Ref | None:
    """What the classes of an instance have under a name: a method, a property, or a plain value."""
    found = in_classes(classes, name)
    if found is missing or isinstance(in_classes(classes, "__getattribute__"), FunctionType):
        return None
    if isinstance(found, property | functools.cached_property):
        getter = found.fget if isinstance(found, property) else found.func
        return Ref(property(getter), bound=instance)
    if isinstance(found, staticmethod):
        return Ref(found.__func__)
    if isinstance(found, classmethod):
        return Ref(found.__func__, bound=Ref.to(type(instance.value), type(instance.value).__name__))
    if isinstance(found, FunctionType):
        return Ref(found, bound=instance)
    if _computes(found):
        # A method of a builtin container.
        return Ref(found, bound=instance) if callable(found) else None
    return instance.follow(found, Step(name))


def _inherited(parent: Any, name: str, instance: Ref | None) -> Ref | None:
    classes = parent.__self_class__.__mro__
    after = classes[classes.index(parent.__thisclass__) + 1 :]
    return _member(after, name, instance or Ref(parent.__self__))


def is_installed(namespace: Mapping[str, Any]) -> bool:
    """Whether code with these globals is of an installed package, rather than of the project that runs."""
    path = PurePath(str(namespace.get("__file__") or ""))
    return not {"site-packages", "dist-packages"}.isdisjoint(path.parts)


def is_user_module(module: ModuleType) -> bool:
    where = vars(module).get("__file__") or next(iter(vars(module).get("__path__", ())), None)
    return module.__name__ == "__main__" if where is None else is_user_file(where)
