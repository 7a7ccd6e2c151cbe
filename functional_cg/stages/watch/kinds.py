"""Classify host values without running user code."""

from __future__ import annotations

import collections
import random
import sys
import types
import weakref
from dataclasses import dataclass
from queue import SimpleQueue
from types import CodeType, FunctionType, ModuleType, WrapperDescriptorType
from typing import Any

from ...messages.source import is_user_file
from .values import in_classes, instance_dict, is_value, missing

__all__ = [
    "BUILTINS",
    "UNKNOWN",
    "Stored",
    "advances",
    "computes",
    "definer_after",
    "generator_state",
    "has_key",
    "in_slot",
    "inside",
    "is_key",
    "is_slot",
    "is_user_class",
    "is_user_function",
    "is_user_module",
    "plain",
    "stores",
    "takes_arguments",
]

# Types of bound compiled methods; those of the second type receive their defining class.
BUILTINS: tuple[type, ...] = (types.BuiltinFunctionType, type(SimpleQueue().get))
_INSIDE = (
    (collections.ChainMap, "maps"),
    (weakref.WeakKeyDictionary, "data"),
    (weakref.WeakValueDictionary, "data"),
)
_LIBRARIES = ("functional_cg", "numpy", "torch")
_TAKES_ANY = 0x0C  # code flags of functions with ``*args`` or ``**kwargs``
UNKNOWN: Any = object()  # stands for a value that was not seen


def has_key(key: Any, container: Any) -> bool:
    """Whether a container has a key or an element."""
    return key in container


def is_key(key: Any) -> bool:
    """Whether a value is known, plain and hashable."""
    try:
        hash(key)
    except TypeError:
        return False
    return key is not UNKNOWN and is_value(key)


def in_slot(slot: Any, owner: Any) -> Any:
    """Return what an object has in a slot of its class; `missing` if nothing."""
    try:
        return slot.__get__(owner, type(owner))
    except AttributeError:
        return missing


def is_slot(found: Any) -> bool:
    """Whether a class attribute is a compiled descriptor that stores a value of each instance."""
    ways = (in_classes(type(found).__mro__, way) for way in ("__get__", "__set__"))
    return not issubclass(type(found), property) and all(type(way) is WrapperDescriptorType for way in ways)


def stores(name: str, owner: Any) -> bool:
    """Whether an object itself stores an attribute, or a class or one of its bases does."""
    if issubclass(type(owner), type):
        return in_classes(owner.__mro__, name) is not missing
    slot = in_classes(type(owner).__mro__, name)
    return name in instance_dict(owner) or (is_slot(slot) and in_slot(slot, owner) is not missing)


@dataclass(frozen=True, slots=True)
class Stored:
    """Reads an attribute as the object stores it, bypassing its class's ``__getattribute__``."""

    name: str

    def __call__(self, owner: Any) -> Any:
        return object.__getattribute__(owner, self.name)


def definer_after(cls: type, name: str, of: type) -> type | None:
    """Return the class that defines ``super(cls, self).name`` for a ``self`` of class ``of``, if any."""
    classes = of.__mro__[of.__mro__.index(cls) + 1 :]
    return next((one for one in classes if name in vars(one)), None)


def inside(value: Any) -> str | None:
    """Return which attribute of a ``ChainMap`` or weak dictionary is the plain container; None for anything else."""
    return next((name for kind, name in _INSIDE if issubclass(type(value), kind)), None)


def plain(found: Any) -> Any:
    """Return a class attribute that is read as it is stored; UNKNOWN if it is missing or a descriptor."""
    return UNKNOWN if found is missing or computes(found) else found


def computes(found: Any) -> bool:
    """Whether a class attribute is a descriptor, which computes the value on each read."""
    return hasattr(type(found), "__get__") and not issubclass(type(found), type)


def generator_state(value: Any) -> Any:
    """Return the state of a random generator of Python or numpy; None for anything else."""
    kind = type(value)
    if issubclass(kind, random.Random) and kind is not random.SystemRandom:
        return random.Random.getstate(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None and kind is numpy.random.Generator:
        return repr(value.bit_generator.state)
    if numpy is not None and kind is numpy.random.RandomState:
        return repr(value.get_state())
    return None


def advances(value: Any) -> bool:
    """Whether a value is a compiled iterator, which advances unseen."""
    kind = type(value)
    return (
        type(in_classes(kind.__mro__, "__next__")) is not FunctionType
        and in_classes(kind.__mro__, "__next__") is not missing
        and in_classes(kind.__mro__, "__iter__") is not missing
    )


def is_user_function(value: Any) -> bool:
    """Whether a value is a Python function of user code."""
    return type(value) is FunctionType and is_user_file(value.__code__.co_filename)


def is_user_class(cls: type) -> bool:
    """Whether a class is user code."""
    module = sys.modules.get(cls.__module__)
    return is_user_name(str(cls.__module__)) if module is None else is_user_module(module)


def is_user_module(module: ModuleType) -> bool:
    """Whether a module is user code."""
    where = vars(module).get("__file__") or next(iter(vars(module).get("__path__", ())), None)
    return is_user_name(module.__name__) if where is None else is_user_file(where)


def is_user_name(module: str) -> bool:
    """Whether a program has made a module without a file, by its name; others are compiled into Python or a library."""
    package = module.partition(".")[0]
    return package == "__main__" or package not in {*sys.stdlib_module_names, *_LIBRARIES}


def takes_arguments(code: CodeType) -> bool:
    """Whether a function takes arguments."""
    return bool(code.co_argcount or code.co_kwonlyargcount or code.co_flags & _TAKES_ANY)
