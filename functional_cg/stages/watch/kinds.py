"""Classify host values without running user code."""

from __future__ import annotations

import collections
import functools
import random
import sys
import types
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from queue import SimpleQueue
from types import CodeType, FunctionType, MethodType, ModuleType, WrapperDescriptorType
from typing import Any

from ...messages.source import is_user_file
from .values import in_classes, instance_dict, is_value, missing

__all__ = [
    "BUILTINS",
    "UNKNOWN",
    "Stored",
    "advances",
    "after",
    "bound",
    "computes",
    "definer_after",
    "generator_state",
    "has_key",
    "holds",
    "inside",
    "is_installed",
    "is_key",
    "is_slot",
    "is_user_class",
    "is_user_module",
    "parameters_with_defaults",
    "stored_in_class",
    "stores",
    "takes_arguments",
]

# Types of bound compiled methods; those of the second type receive their defining class.
BUILTINS: tuple[type, ...] = (types.BuiltinFunctionType, type(SimpleQueue().get))
_LIBRARIES = ("functional_cg", "numpy", "torch")
_TAKES_ANY = 0x0C  # code flags of functions with ``*args`` or ``**kwargs``
UNKNOWN: Any = object()  # stands for a value that was not seen


def has_key(key: Any) -> Any:
    """Return a function that tells whether a container has a key or an element."""
    return functools.partial(_has_key, key)


def _has_key(key: Any, container: Any) -> bool:
    return key in container


def is_key(key: Any) -> bool:
    """Whether a value is known, plain and hashable."""
    try:
        hash(key)
    except TypeError:
        return False
    return key is not UNKNOWN and is_value(key)


def holds(slot: Any, owner: Any) -> bool:
    """Whether an object has a value in a slot of its class."""
    try:
        slot.__get__(owner, type(owner))
    except AttributeError:
        return False
    return True


def is_slot(found: Any) -> bool:
    """Whether a class attribute is a compiled descriptor that stores a value of each instance."""
    ways = (in_classes(type(found).__mro__, way) for way in ("__get__", "__set__"))
    return not issubclass(type(found), property) and all(type(way) is WrapperDescriptorType for way in ways)


def stores(name: str, owner: Any) -> bool:
    """Whether an object itself stores an attribute, or a class or one of its bases does."""
    if issubclass(type(owner), type):
        return in_classes(owner.__mro__, name) is not missing
    slot = in_classes(type(owner).__mro__, name)
    return name in instance_dict(owner) or (is_slot(slot) and holds(slot, owner))


@dataclass(frozen=True, slots=True)
class Stored:
    """Reads an attribute as the object stores it, bypassing its class's ``__getattribute__``."""

    name: str

    def __call__(self, owner: Any) -> Any:
        return object.__getattribute__(owner, self.name)


def stored_in_class(name: str, cls: type) -> Any:
    """Return what a class or the first of its bases stores under a name, unbound."""
    return in_classes(cls.__mro__, name)


def after(parent: Any) -> tuple[type, ...]:
    """Return the classes that a ``super()`` object searches."""
    classes = parent.__self_class__.__mro__
    return tuple(classes[classes.index(parent.__thisclass__) + 1 :])


def definer_after(cls: type, name: str, of: type) -> type | None:
    """Return the class that defines ``super(cls, self).name`` for a ``self`` of class ``of``, if any."""
    classes = of.__mro__[of.__mro__.index(cls) + 1 :]
    return next((one for one in classes if name in vars(one)), None)


def inside(value: Any) -> Any:
    """Return the plain container inside a ``ChainMap`` or weak dictionary; None for anything else."""
    if issubclass(type(value), collections.ChainMap):
        return value.maps
    if issubclass(type(value), weakref.WeakKeyDictionary | weakref.WeakValueDictionary):
        return value.data
    return None


def bound(found: Any, owner: Any) -> Any:
    """Return a class attribute as read through an instance; UNKNOWN if it is missing or computed."""
    if type(found) in (FunctionType, functools._lru_cache_wrapper):
        return MethodType(found, owner)
    if type(found) is staticmethod:
        return found.__func__
    if type(found) is classmethod:
        return MethodType(found.__func__, owner if issubclass(type(owner), type) else type(owner))
    if type(found) in (types.MethodDescriptorType, types.WrapperDescriptorType):
        return found.__get__(owner, type(owner))
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


def is_installed(namespace: Mapping[str, Any]) -> bool:
    """Whether code with these globals belongs to an installed package rather than to the running project."""
    path = PurePath(str(namespace.get("__file__") or ""))
    return not {"site-packages", "dist-packages"}.isdisjoint(path.parts)


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


def parameters_with_defaults(function: FunctionType) -> list[str]:
    """Return the names of the parameters that have a default, except keyword-only ones."""
    code, defaults = function.__code__, function.__defaults__ or ()
    return list(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount])


def takes_arguments(code: CodeType) -> bool:
    """Whether a function takes arguments."""
    return bool(code.co_argcount or code.co_kwonlyargcount or code.co_flags & _TAKES_ANY)
