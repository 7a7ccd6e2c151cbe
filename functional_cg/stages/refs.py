"""A value of the host and the way to read it again: a root, then attributes and constant keys.

Following one runs nothing of the user's: only what instances, classes, modules and plain containers store is followed.
"""

from __future__ import annotations

import enum
import functools
import numbers
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import FunctionType, MappingProxyType, MemberDescriptorType, ModuleType
from typing import Any

import torch

from ..source import is_user_file

__all__ = ["Ref", "Step", "in_classes", "instance_dict", "is_user_module", "is_value"]

_LONGEST_PATH = 32
_LONGEST_TUPLE = 8
_SCALARS = (
    numbers.Number,
    str,
    type(None),
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
_GETITEM = (dict.__getitem__, list.__getitem__, tuple.__getitem__, MappingProxyType.__getitem__)
_MISSING = object()


def is_value(value: Any) -> bool:
    """Whether `value` is plain data that a graph bakes in: a number, a string, None, a dtype, ..., a tuple of them."""
    if type(value) in (tuple, torch.Size):
        return len(value) <= _LONGEST_TUPLE and all(map(is_value, value))
    return isinstance(value, _SCALARS)


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a path: an attribute, or an item by a constant key. Prints as Python."""

    key: Any
    item: bool = False

    def __str__(self) -> str:
        return f"[{self.key!r}]" if self.item else f".{self.key}"

    def shown(self) -> str:
        return f'["{self.key}"]' if self.item and isinstance(self.key, str) else str(self)


@dataclass(frozen=True, slots=True)
class Ref:
    """A value and the way to read it again: `steps` from `root`. Without a root it is taken for constant.

    Attributes:
      name: How the user writes it, such as ``self.cfg["lr"]``.
      bound: For a method, its ``self``.
    """

    value: Any
    root: Any = None
    steps: tuple[Step, ...] = ()
    name: str = ""
    bound: Ref | None = None

    @classmethod
    def to(cls, value: object, name: str) -> Ref:
        return cls(value, value, (), name)

    @property
    def place(self) -> tuple[int, tuple[Step, ...]]:
        return id(self.value if self.root is None else self.root), self.steps

    def follow(self, value: object, *steps: Step, name: str = "") -> Ref | None:
        if self.root is None:
            return Ref(value)
        if len(self.steps) + len(steps) > _LONGEST_PATH:
            return None
        return Ref(value, self.root, (*self.steps, *steps), name or self.name + steps[-1].shown())

    def attribute(self, name: str) -> Ref | None:
        """Follow an attribute that is stored, not computed; a method or a property comes with its ``self``."""
        owner: Any = self.value
        if isinstance(owner, torch.Tensor | enum.EnumType):
            return None
        if isinstance(owner, ModuleType):
            # What libraries keep in their modules (torch.float32, math.pi) is taken for constant.
            found = vars(owner).get(name, _MISSING) if is_user_module(owner) else _MISSING
            return None if found is _MISSING else self.follow(found, Step(name))
        if isinstance(owner, super):
            return _inherited(owner, name, self.bound)
        if isinstance(owner, type):
            found = in_classes(owner.__mro__, name)
            found = found.__func__ if isinstance(found, staticmethod | classmethod) else found
            return None if found is _MISSING or _computes(found) else self.follow(found, Step(name))
        if name == "get" and in_classes(type(owner).__mro__, name) is vars(dict)["get"]:
            return Ref(dict.get, bound=self)
        return self._stored(name) or _member(type(owner).__mro__, name, self)

    @property
    def computes_attributes(self) -> Ref | None:
        """The user's ``__getattr__``, which Python asks for an attribute that is not stored."""
        found = in_classes(type(self.value).__mro__, "__getattr__")
        return Ref(found, bound=self) if isinstance(found, FunctionType) else None

    def _stored(self, name: str) -> Ref | None:
        """An attribute that the instance itself holds: in its dict, its slots, its registry of submodules."""
        owner, classes = self.value, type(self.value).__mro__
        in_class = in_classes(classes, name)
        if isinstance(in_classes(classes, "__getattribute__"), FunctionType):
            return None
        if isinstance(in_class, MemberDescriptorType) or (
            isinstance(owner, tuple) and name in _fields(owner)
        ):
            value = getattr(owner, name, _MISSING)
            return None if value is _MISSING else self.follow(value, Step(name))
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

    def item(self, key: object) -> Ref | None:
        """Follow a constant key of a dict, a list or a tuple."""
        classes = type(self.value).__mro__
        if type(key) not in (str, int) or in_classes(classes, "__missing__") is not _MISSING:
            return None
        if in_classes(classes, "__getitem__") not in _GETITEM:
            return None
        try:
            return self.follow(self.value[key], Step(key, item=True))
        except (LookupError, TypeError):
            return None


def in_classes(classes: Iterable[type], name: str) -> Any:
    return next((vars(cls)[name] for cls in classes if name in vars(cls)), _MISSING)


def instance_dict(owner: object) -> dict[str, Any]:
    try:
        found = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}


def _fields(owner: tuple[Any, ...]) -> tuple[str, ...]:
    return getattr(type(owner), "_fields", ())


def _computes(found: Any) -> bool:
    return hasattr(type(found), "__get__") and not isinstance(found, FunctionType)


def _member(classes: Sequence[type], name: str, instance: Ref) -> Ref | None:
    """What the classes of an instance have under a name: a method, a property, or a plain value."""
    found = in_classes(classes, name)
    if found is _MISSING or isinstance(in_classes(classes, "__getattribute__"), FunctionType):
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
    return None if _computes(found) else instance.follow(found, Step(name))


def _inherited(parent: Any, name: str, instance: Ref | None) -> Ref | None:
    classes = parent.__self_class__.__mro__
    after = classes[classes.index(parent.__thisclass__) + 1 :]
    return _member(after, name, instance or Ref(parent.__self__))


def is_user_module(module: ModuleType) -> bool:
    where = vars(module).get("__file__") or next(iter(vars(module).get("__path__", ())), None)
    return module.__name__ == "__main__" if where is None else is_user_file(where)
