"""What builtins, methods of containers and a few functions of the standard library read of their arguments.

Each gives back what its result may stand for, so that ``dict(cfg)["lr"]`` is followed like ``cfg["lr"]``.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from types import (
    BuiltinFunctionType,
    FunctionType,
    MappingProxyType,
    MethodDescriptorType,
    WrapperDescriptorType,
)
from typing import Any, Protocol

import torch

from ..source import is_user_file
from .refs import Made, Ref, Refs, either
from .values import (
    CONTENTS,
    KIND,
    LENGTH,
    TRUTH,
    View,
    has_attribute,
    has_key,
    in_classes,
    is_array,
    is_container,
    is_value,
)

__all__ = ["Visitor", "attribute", "elements", "item", "known_call", "length"]

_Arguments = Sequence[Refs]
_WRITES = frozenset(
    "append appendleft extend extendleft insert remove discard clear update add sort reverse popitem popleft".split()
)
_ASKED = ("__getattr__", "__getattribute__")
_LOOKUPS = frozenset({"get", "setdefault", "pop", "__getitem__"})


class Visitor(Protocol):
    """What is told of the names and chains in a code object, and of what becomes of them."""

    def reach(self, ref: Ref, /) -> Ref:
        """A name or a chain leads to this."""

    def note(self, ref: Ref, view: View, /) -> None:
        """This part of the value is read."""

    def offer(self, refs: Refs, /) -> None:
        """This is handed on to something unknown, which may call it."""

    def use(self, refs: Refs, /) -> None:
        """This is handed on to something unknown, which may read all of it."""

    def enter(self, ref: Ref, args: _Arguments = (), kwargs: Mapping[str, Refs] = ..., /) -> Refs | None:
        """This is called; returns what the result stands for, or None if the callee is unknown."""


def attribute(visitor: Visitor, owners: Refs, name: str) -> Refs:
    """What ``owner.name`` stands for; getters of properties are scanned."""
    return either(*(_attribute(visitor, owner, name) for owner in owners))


def _attribute(visitor: Visitor, owner: Ref, name: str) -> Refs:
    found = owner.attribute(name)
    if found is not None and isinstance(found.value, property):
        return visitor.enter(found) or ()
    if found is not None:
        return (visitor.reach(found),)
    if is_array(owner.value):
        visitor.note(owner, CONTENTS)
    computes = owner.computes_attributes
    if computes is None:
        return ()
    if isinstance(computes.value, FunctionType):
        return visitor.enter(computes, [(Ref(name),)]) or ()
    return item(visitor, (owner,), (Ref(name),))


def item(visitor: Visitor, owners: Refs, keys: Refs) -> Refs:
    """What ``owner[key]`` stands for; by an unknown key it may be any value."""
    return either(*(_item(visitor, owner, keys) for owner in owners))


def _item(visitor: Visitor, owner: Ref, keys: Refs) -> Refs:
    value = owner.value
    getter = in_classes(type(value).__mro__, "__getitem__")
    match value:
        case Made():
            found = [value.parts.get(key.value) or value.all for key in keys if _is_key(key)]
            return either(*(found or [value.all]))
        case collections.ChainMap():
            return item(visitor, elements(visitor, attribute(visitor, (owner,), "maps")), keys)
        case torch.nn.ModuleDict():
            return item(visitor, attribute(visitor, (owner,), "_modules"), keys)
        case torch.nn.Module():
            return _submodule(visitor, owner, keys)
    if value is not os.environ and owner.storage is owner and isinstance(getter, FunctionType):
        return visitor.enter(Ref(getter, bound=owner), [keys]) or ()
    if keys and all(map(_is_key, keys)):
        return either(*(_constant_item(visitor, owner, key.value) for key in keys))
    visitor.note(owner, CONTENTS)
    return tuple(owner.values())


def _is_key(key: Ref) -> bool:
    return is_value(key.value) and not isinstance(key.value, slice)


def _constant_item(visitor: Visitor, owner: Ref, key: Any) -> Refs:
    found = owner.item(key)
    if found is not None:
        return (visitor.reach(found),)
    mapping = owner.value is os.environ or isinstance(owner.storage.value, dict | MappingProxyType)
    visitor.note(owner, has_key(key) if mapping else CONTENTS)
    return ()


def _submodule(visitor: Visitor, owner: Ref, keys: Refs) -> Refs:
    children = tuple(owner.elements())
    places = [key.value for key in keys if type(key.value) is int]
    found = [children[place] for place in places if -len(children) <= place < len(children)]
    return tuple(map(visitor.reach, found or children))


def elements(visitor: Visitor, owners: Refs) -> Refs:
    """What iterating yields."""
    return either(*(_elements(visitor, owner) for owner in owners))


def _elements(visitor: Visitor, owner: Ref) -> Refs:
    if isinstance(owner.value, Made):
        return owner.value.all
    own = in_classes(type(owner.value).__mro__, "__iter__")
    module = isinstance(owner.value, torch.nn.Module)
    if isinstance(own, FunctionType) and not module and owner.storage is owner:
        return elements(visitor, visitor.enter(Ref(own, bound=owner)) or ())
    visitor.note(owner, CONTENTS)
    found = tuple(owner.elements())
    return tuple(ref if is_value(ref.value) else visitor.reach(ref) for ref in found)


def length(visitor: Visitor, owner: Ref, view: View = LENGTH) -> None:
    """``len(owner)``, or its truth."""
    for way in ("__bool__", "__len__"):
        method = in_classes(type(owner.value).__mro__, way)
        if isinstance(method, FunctionType) and owner.storage is owner:
            visitor.enter(Ref(method, bound=owner))
            return
    visitor.note(owner, view if view.fits(owner.storage.value) else KIND)


def known_call(visitor: Visitor, ref: Ref, args: _Arguments, kwargs: Mapping[str, Refs]) -> Refs | None:
    """What a call of `ref` stands for, its arguments noted as far as it reads them; None if it is not known here."""
    value = ref.value
    if isinstance(value, operator.attrgetter | operator.itemgetter):
        return _get(visitor, value, args)
    if ref.bound is not None and _is_standard(value, ref.bound):
        return _method(visitor, ref.bound, value.__name__, args)
    handler = _KNOWN.get(value) if type(value) in (BuiltinFunctionType, FunctionType, type) else None
    return None if handler is None else handler(visitor, args, kwargs)


def _is_standard(method: object, owner: Ref) -> bool:
    """Whether it is a method of a builtin container, or of one of the standard library's."""
    if isinstance(owner.value, os._Environ | collections.ChainMap) or owner.storage is not owner:
        return isinstance(method, FunctionType) and not is_user_file(method.__code__.co_filename)
    known = isinstance(method, MethodDescriptorType | WrapperDescriptorType)
    return known and (is_container(owner.value) or isinstance(owner.value, Made))


def _method(visitor: Visitor, owner: Ref, name: str, args: _Arguments) -> Refs | None:
    if name in _WRITES:
        for arg in args:
            visitor.offer(arg)
        return ()
    if name in _LOOKUPS and args:
        return either(item(visitor, (owner,), args[0]), *args[1:])
    if name == "copy":
        return (owner,)
    visitor.note(owner, CONTENTS)
    match name:
        case "keys" | "__iter__":
            return Made.of(tuple(owner.elements()))
        case "values":
            return Made.of(tuple(owner.values()))
        case "items":
            return Made.of(Made.of(tuple(owner.elements()), tuple(owner.values())))
    return None


def _get(
    visitor: Visitor, getter: operator.attrgetter[Any] | operator.itemgetter[Any], args: _Arguments
) -> Refs:
    found = []
    for key in getter.__reduce__()[1]:
        place = args[0] if args else ()
        if isinstance(getter, operator.itemgetter):
            place = item(visitor, place, (Ref(key),))
        else:
            for name in key.split("."):
                place = attribute(visitor, place, name)
        found.append(place)
    return found[0] if len(found) == 1 else Made.of(*found)


def _attrgetter(visitor: Visitor, args: _Arguments, kwargs: Mapping[str, Refs]) -> Refs | None:
    return _getter(operator.attrgetter, args)


def _itemgetter(visitor: Visitor, args: _Arguments, kwargs: Mapping[str, Refs]) -> Refs | None:
    return _getter(operator.itemgetter, args)


def _getter(kind: Callable[..., Any], args: _Arguments) -> Refs | None:
    keys = [key.value for arg in args for key in arg if is_value(key.value)]
    return (Ref(kind(*keys)),) if keys and len(keys) == len(args) else None


def _getattr(visitor: Visitor, args: _Arguments, kwargs: Mapping[str, Refs]) -> Refs | None:
    if len(args) < 2:
        return None
    owners, names, *default = args
    found = []
    for name in (key.value for key in names if type(key.value) is str):
        found.append(attribute(visitor, owners, name))
        if not found[-1]:
            _hasattr(visitor, (owners, (Ref(name),)), {})
    return either(*found, *default)


def _hasattr(visitor: Visitor, args: _Arguments, kwargs: Mapping[str, Refs]) -> Refs | None:
    if len(args) != 2:
        return None
    for owner in args[0]:
        for name in (key.value for key in args[1] if type(key.value) is str):
            # Asking runs nothing of the user's then.
            ways = [in_classes(type(owner.value).__mro__, way) for way in (name, *_ASKED)]
            if not any(isinstance(way, FunctionType | property | functools.cached_property) for way in ways):
                visitor.note(owner, has_attribute(name))
    return ()


def _vars(visitor: Visitor, args: _Arguments, kwargs: Mapping[str, Refs]) -> Refs | None:
    return attribute(visitor, args[0], "__dict__") if args else None


def _copy(visitor: Visitor, args: _Arguments, kwargs: Mapping[str, Refs]) -> Refs | None:
    """What is read of a copy is read of the original."""
    return args[0] if args else None


def _dict(visitor: Visitor, args: _Arguments, kwargs: Mapping[str, Refs]) -> Refs | None:
    if args and not kwargs:
        return args[0]
    return None if args else (Ref(Made(dict(kwargs))),)


def _list(visitor: Visitor, args: _Arguments, kwargs: Mapping[str, Refs]) -> Refs | None:
    return Made.of(elements(visitor, args[0])) if args else ()


def _zip(visitor: Visitor, args: _Arguments, kwargs: Mapping[str, Refs]) -> Refs | None:
    return Made.of(Made.of(*(elements(visitor, arg) for arg in args)))


def _enumerate(visitor: Visitor, args: _Arguments, kwargs: Mapping[str, Refs]) -> Refs | None:
    return Made.of(Made.of((), elements(visitor, args[0]))) if args else ()


def _map(visitor: Visitor, args: _Arguments, kwargs: Mapping[str, Refs]) -> Refs | None:
    if not args:
        return None
    given = [elements(visitor, arg) for arg in args[1:]]
    return Made.of(either(*((visitor.enter(function, given) or ()) for function in args[0])))


def _next(visitor: Visitor, args: _Arguments, kwargs: Mapping[str, Refs]) -> Refs | None:
    return either(elements(visitor, args[0]), *args[1:]) if args else None


def _len(visitor: Visitor, args: _Arguments, kwargs: Mapping[str, Refs]) -> Refs | None:
    for owner in args[0] if args else ():
        length(visitor, owner)
    return ()


def _bool(visitor: Visitor, args: _Arguments, kwargs: Mapping[str, Refs]) -> Refs | None:
    for owner in args[0] if args else ():
        length(visitor, owner, TRUTH)
    return ()


def _kind(visitor: Visitor, args: _Arguments, kwargs: Mapping[str, Refs]) -> Refs | None:
    for owner in args[0] if args else ():
        visitor.note(owner, KIND)
    return ()


def _each(visitor: Visitor, args: _Arguments, kwargs: Mapping[str, Refs]) -> Refs | None:
    for arg in args:
        elements(visitor, arg)
    return None


def _nothing(visitor: Visitor, args: _Arguments, kwargs: Mapping[str, Refs]) -> Refs | None:
    return ()


def _asdict(visitor: Visitor, args: _Arguments, kwargs: Mapping[str, Refs]) -> Refs | None:
    return tuple(Ref(Made(_fields(visitor, owner))) for owner in (args[0] if args else ()))


def _astuple(visitor: Visitor, args: _Arguments, kwargs: Mapping[str, Refs]) -> Refs | None:
    made = [Made.of(*_fields(visitor, owner).values()) for owner in (args[0] if args else ())]
    return either(*made)


def _fields(visitor: Visitor, owner: Ref) -> dict[str, Refs]:
    fields = dataclasses.fields(owner.value) if dataclasses.is_dataclass(owner.value) else ()
    return {field.name: attribute(visitor, (owner,), field.name) for field in fields}


def _getenv(visitor: Visitor, args: _Arguments, kwargs: Mapping[str, Refs]) -> Refs | None:
    return either(item(visitor, (Ref.to(os.environ, "os.environ"),), args[0]), *args[1:]) if args else None


def _number(visitor: Visitor, args: _Arguments, kwargs: Mapping[str, Refs]) -> Refs | None:
    for owner in args[0] if args else ():
        for name in ("__float__", "__int__", "__index__"):
            method = in_classes(type(owner.value).__mro__, name)
            if isinstance(method, FunctionType):
                visitor.enter(Ref(method, bound=owner))
    return None


_KNOWN: Mapping[Any, Callable[..., Refs | None]] = MappingProxyType(
    {
        getattr: _getattr,
        hasattr: _hasattr,
        vars: _vars,
        len: _len,
        bool: _bool,
        isinstance: _kind,
        type: _kind,
        id: _nothing,
        callable: _kind,
        print: _nothing,
        sum: _each,
        max: _each,
        min: _each,
        dict: _dict,
        collections.OrderedDict: _dict,
        list: _list,
        tuple: _list,
        set: _list,
        frozenset: _list,
        sorted: _list,
        reversed: _list,
        iter: _list,
        next: _next,
        zip: _zip,
        enumerate: _enumerate,
        map: _map,
        float: _number,
        int: _number,
        copy.copy: _copy,
        copy.deepcopy: _copy,
        dataclasses.asdict: _asdict,
        dataclasses.astuple: _astuple,
        dataclasses.replace: _copy,
        os.getenv: _getenv,
        operator.attrgetter: _attrgetter,
        operator.itemgetter: _itemgetter,
    }
)
