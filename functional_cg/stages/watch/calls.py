"""What a call reads of its arguments, where what is called is not written in Python."""

from __future__ import annotations

import contextvars
import functools
import operator
import weakref
from collections.abc import Callable, Mapping
from types import (
    BuiltinFunctionType,
    FunctionType,
    MappingProxyType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any

from ...messages.source import is_user_file
from .kinds import UNKNOWN
from .stack import Stack
from .values import in_classes, is_container

__all__ = ["Calls", "parent"]

_WRITES = frozenset("append appendleft extend extendleft insert add __setitem__ __setattr__ __init__".split())
_LOOKUPS = frozenset({"get", "setdefault", "__getitem__"})
_GETTERS = (operator.attrgetter, operator.itemgetter)
_SAYS_ALL = frozenset({"__reduce_ex__", "__reduce__", "__getstate__"})


class Calls(Stack):
    """The stack of a frame, and what it calls."""

    def call(self, callee: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Something is called: the frames of what is written in Python are seen, of the rest what is handed to it."""
        handler = _BUILTINS.get(callee) if type(callee) in (BuiltinFunctionType, type) else None
        if handler is not None:
            self.push(handler(self, *args))
            return
        function = callee.__func__ if type(callee) is MethodType else callee
        if type(function) in _GETTERS and args:
            self.push(self._get(function, args[0]))
            return
        if callee in _GETTERS and UNKNOWN not in args:
            self.push(callee(*args))
            return
        if type(callee) is weakref.ReferenceType:
            self.push(self.reads.holds(callee, operator.call, callee()))
            return
        if (
            type(callee) in (BuiltinFunctionType, MethodWrapperType)
            and type(callee.__self__) is not ModuleType
        ):
            self.push(self._method(callee.__self__, callee.__name__, args, kwargs))
            return
        if type(function) is not FunctionType or not is_user_file(function.__code__.co_filename):
            self.hand_on(*args, *kwargs.values())
        if _is_python(callee):
            self.await_result()
        else:
            self.push(UNKNOWN)

    def hand_on(self, *values: Any) -> None:
        """Values are given to what is not seen, which may read all of a container."""
        for value in values:
            self.use(value, deep=True)
        for getter in values:
            if type(getter) in _GETTERS:  # what calls it is not seen
                for value in values:
                    for part in self.reads.held_by(value):
                        self._get(getter, part)

    def _method(self, owner: Any, name: str, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
        """A method that is not written in Python."""
        if type(owner) is contextvars.ContextVar and name == "get":
            return self.reads.holds(owner, functools.partial(_held_by, *args), _held_by(*args, owner))
        if not is_container(owner):
            self.use(owner)
            if name in _SAYS_ALL:
                self.use(self.attribute(owner, "__dict__"), deep=True)
        elif name in _WRITES:
            return UNKNOWN
        elif name in _LOOKUPS and args:
            return self.item(owner, args[0])
        else:
            self.use(owner)
        self.hand_on(*args, *kwargs.values())
        return UNKNOWN

    def _ask(self, owner: Any = UNKNOWN, name: Any = UNKNOWN, *default: Any) -> Any:
        if type(name) is str:
            return self.attribute(owner, name)
        self.use(self.attribute(owner, "__dict__"), deep=True)
        return UNKNOWN

    def _ask_whether(self, owner: Any = UNKNOWN, name: Any = UNKNOWN) -> Any:
        self._ask(owner, name)
        return UNKNOWN

    def _vars(self, owner: Any = UNKNOWN) -> Any:
        return self.attribute(owner, "__dict__")

    def _len(self, owner: Any = UNKNOWN) -> Any:
        self.size(owner)
        return UNKNOWN

    def _bool(self, owner: Any = UNKNOWN) -> Any:
        self.size(owner, truth=True)
        return UNKNOWN

    def _type(self, owner: Any = UNKNOWN, *more: Any) -> Any:
        return UNKNOWN if owner is UNKNOWN or more else type(owner)

    def _globals(self) -> Any:
        self.reads.root(self.frame.f_globals, "globals()")
        return self.frame.f_globals

    def _super(self, *given: Any) -> Any:
        names, held = self.code.co_varnames, self.frame.f_locals
        return (
            parent(*given) if given else parent(held.get("__class__"), held.get(names[0]) if names else None)
        )

    def _nothing(self, *given: Any) -> Any:
        return UNKNOWN

    def _get(self, getter: Any, owner: Any) -> Any:
        found, keys = UNKNOWN, getter.__reduce__()[1]
        for key in keys:
            found = owner
            if type(getter) is operator.itemgetter:
                found = self.item(found, key)
            else:
                for name in key.split("."):
                    found = self.attribute(found, name)
        return found if len(keys) == 1 else UNKNOWN


# What builtins read of their arguments: not what they hold, but a part of it, or nothing.
_BUILTINS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        getattr: Calls._ask,
        hasattr: Calls._ask_whether,
        vars: Calls._vars,
        len: Calls._len,
        bool: Calls._bool,
        type: Calls._type,
        globals: Calls._globals,
        super: Calls._super,
        id: Calls._nothing,
        print: Calls._nothing,
        callable: Calls._nothing,
        isinstance: Calls._nothing,
        issubclass: Calls._nothing,
        setattr: Calls._nothing,
        repr: Calls._nothing,
    }
)


def _held_by(*args: Any) -> Any:
    *default, variable = args
    return contextvars.ContextVar.get(variable, *default)


def parent(cls: Any, instance: Any) -> Any:
    """``super(cls, instance)``."""
    try:
        return super(cls, instance)
    except TypeError:
        return UNKNOWN


def _is_python(callee: Any) -> bool:
    kind = type(callee)
    if kind is MethodType:
        return _is_python(callee.__func__)
    if kind is FunctionType:
        return not callee.__code__.co_flags & 0x20  # it yields
    return type(in_classes(kind.__mro__, "__call__")) is FunctionType
