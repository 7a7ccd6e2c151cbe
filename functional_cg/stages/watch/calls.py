"""Record what calls of compiled code read of their arguments."""

from __future__ import annotations

import contextvars
import functools
import logging
import operator
import threading
import weakref
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from types import (
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

from ...messages.source import is_user_file
from .kinds import BUILTINS, LOCKS, UNKNOWN, inside, is_key
from .lookups import GETTERS
from .stack import Stack
from .values import in_classes, is_container

__all__ = ["Calls", "parent"]

_WRITES = frozenset("append appendleft insert add __setitem__ __setattr__ __init__".split())
_COPIES = frozenset({"extend", "extendleft", "update"})  # write what their arguments hold
_LOOKUPS = frozenset({"get", "setdefault", "__getitem__"})
# Their answers depend on hidden state, and asking changes nothing.
_QUERIES: frozenset[Any] = frozenset(
    {threading.Event.is_set, logging.Logger.isEnabledFor, logging.Logger.getEffectiveLevel}
)
_COMPILED_QUERIES = frozenset(
    {(SimpleQueue, "empty"), (SimpleQueue, "qsize"), *((kind, "locked") for kind in LOCKS)}
)
_SAYS_ALL = frozenset({"__reduce_ex__", "__reduce__", "__getstate__"})


class Calls(Stack):
    """The stack of a frame, with the calls that the frame makes."""

    def call(self, callee: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Handle a call: Python code is seen in its frames; for other code, record the arguments as read."""
        handler = _BUILTINS.get(callee) if type(callee) in (*BUILTINS, type) else None
        if handler is not None:
            self.push(handler(self, *args))
            return
        function = callee.__func__ if type(callee) is MethodType else callee
        if type(function) in GETTERS and args:
            self.push(self._get(function, args[0]))
            return
        if type(callee) is type and callee in GETTERS and not any(one is UNKNOWN for one in args):
            self.push(callee(*args))
            return
        if self.own and function is threading.Thread.start:
            self.reads.starts_thread()
        if args and _is_dispatched(function):
            kind = type(args[0])
            self.reads.holds(function, functools.partial(_dispatched, kind), _dispatched(kind, function))
        if type(callee) is functools.partial:
            self.call(callee.func, [*callee.args, *args], {**callee.keywords, **kwargs})
            return
        if type(callee) is weakref.ReferenceType:
            self.push(self.reads.holds(callee, operator.call, callee()))
            return
        if type(function) is functools._lru_cache_wrapper:
            callee, args = function, [callee.__self__, *args] if function is not callee else args
            self.hand_on(*args, *kwargs.values())
            self.await_kept(callee, args, kwargs)
            return
        if type(callee) is MethodType and type(function) is FunctionType and function in _QUERIES:
            self.push(self._asked(callee.__self__, function.__name__, args))
            return
        if type(callee) in (MethodDescriptorType, WrapperDescriptorType) and args:
            self.push(self._method(args[0], callee.__name__, args[1:], kwargs))
            return
        if type(callee) is MethodType and inside(callee.__self__) is not None:
            self.use(callee.__self__)
        if type(callee) in (*BUILTINS, MethodWrapperType) and type(callee.__self__) is not ModuleType:
            self.push(self._method(callee.__self__, callee.__name__, args, kwargs))
            return
        if type(function) is not FunctionType or not is_user_file(function.__code__.co_filename):
            self.hand_on(*args, *kwargs.values())
        if _is_python(callee):
            self.await_result()
        else:
            self.push(UNKNOWN)

    def hand_on(self, *values: Any) -> None:
        """Record values that are passed to unseen code, which may read all of a container."""
        for value in values:
            self.use(value, deep=True)
        for value in values:
            if _is_compiled(value):  # what calls it is not seen
                self._handed_on(value, [one for one in values if one is not value])

    def _handed_on(self, callee: Any, others: list[Any]) -> None:
        """Record a compiled callable passed to unseen code, which may call it on what the others hold."""
        parts = [part for one in others for part in self.reads.held_by(one)]
        if type(callee) in GETTERS:
            for part in parts:
                self._get(callee, part)
        elif type(callee) is functools.partial:
            self.hand_on(callee.func, *callee.args, *callee.keywords.values(), *others)
        elif callee is next:
            for part in parts:
                self.use(part)
        elif callee is getattr:
            for part in (*others, *parts):
                self._all_attributes(part)
        elif callee.__name__ == "__getattribute__":
            self._all_attributes(callee.__self__)
        elif type(callee.__self__) is not ModuleType:
            self._method(callee.__self__, callee.__name__, [], {})

    def _method(self, owner: Any, name: str, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
        """Handle a call of a compiled method."""
        if type(owner) is contextvars.ContextVar and name in ("get", "set", "reset"):
            return self._of_context(owner, name, args)
        if name == "__getattribute__" and args:  # as it is stored, bypassing the class's own lookup
            return self.stored(owner, args[0])
        if (type(owner), name) in _COMPILED_QUERIES or name == "__subclasses__":
            return self._asked(owner, name, args)
        if type(owner) is SimpleQueue and name.startswith(("get", "put")):
            self.reads.goes_on(owner)
        if type(owner) is str and name.startswith("format"):  # its fields may name attributes
            for value in (*args, *kwargs.values()):
                self._all_attributes(value)
        if not is_container(owner):
            self.use(owner)
            self.changes(owner)
            if name in _SAYS_ALL:
                self._all_attributes(owner)
        elif name in _WRITES:
            self.changes(owner)
            return UNKNOWN
        elif name in _COPIES:
            self.changes(owner)
        elif name in _LOOKUPS and args:
            return self.item(owner, args[0])
        else:
            self.use(owner)
            self.changes(owner)
            for value in (
                args if self.own else ()
            ):  # such as `index` looks for; containers are compared by contents
                if not is_container(value):
                    self.reads.identity(value)
        self.hand_on(*args, *kwargs.values())
        return UNKNOWN

    def _of_context(self, variable: contextvars.ContextVar[Any], name: str, args: list[Any]) -> Any:
        """Handle a call of a context variable: what it holds is read, unless the step itself has set it."""
        if name != "get":
            self.reads.contexts[variable] += 1 if name == "set" else -1
            return UNKNOWN
        held = _held_by(*args, variable)
        if self.reads.contexts[variable] > 0:
            return held
        return self.reads.holds(variable, functools.partial(_held_by, *args), held)

    def _ask(self, owner: Any = UNKNOWN, name: Any = UNKNOWN, *default: Any) -> Any:
        if type(name) is str:
            lacks = is_container(owner) and not hasattr(type(owner), name)
            return default[0] if default and lacks else self.attribute(owner, name)
        self._all_attributes(owner)
        return UNKNOWN

    def _all_attributes(self, owner: Any) -> None:
        self.use(self.attribute(owner, "__dict__"), deep=True)
        for cls in type(owner).__mro__:
            for name, found in vars(cls).items():
                if type(found) is MemberDescriptorType:
                    self.use(self.attribute(owner, name), deep=True)

    def use_compared(self, owner: Any) -> None:
        """Record what a comparison in C reads: attributes, as of namespaces; one in Python is seen in its frame."""
        if self._reads_from(owner) and self.reads.has_parts(owner) and not is_container(owner):
            how = in_classes(type(owner).__mro__, "__eq__")
            if type(how) is not FunctionType and how is not object.__eq__:
                self._all_attributes(owner)

    def _asked(self, owner: Any, name: str, args: list[Any]) -> Any:
        """Record and return the answer to a query of hidden state, which can be repeated."""
        if not all(map(is_key, args)):
            return UNKNOWN
        ask = operator.methodcaller(name, *args)
        return self.reads.says(owner, ask, ask(owner), f"{name}({', '.join(map(repr, args))})")

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

    def _can_be_called(self, owner: Any = UNKNOWN) -> Any:
        self.use_class(owner)
        return UNKNOWN

    def _instance(self, owner: Any = UNKNOWN, *classes: Any) -> Any:
        self.use_class(owner)
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

    def _which(self, owner: Any = UNKNOWN) -> Any:
        if self.own:
            self.reads.identity(owner)
        return UNKNOWN

    def _get(self, getter: Any, owner: Any) -> Any:
        return self.reads.got(getter, owner) if self._reads_from(owner) else UNKNOWN

    def _subclass(self, cls: Any = UNKNOWN, *classes: Any) -> Any:
        if self.own and issubclass(type(cls), type):
            self.reads.shape_of(cls)
        return UNKNOWN


# What builtins read of their arguments: not all contents, but a part of them or nothing.
_BUILTINS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        getattr: Calls._ask,
        hasattr: Calls._ask_whether,
        vars: Calls._vars,
        dir: Calls._ask,
        len: Calls._len,
        bool: Calls._bool,
        type: Calls._type,
        globals: Calls._globals,
        super: Calls._super,
        id: Calls._which,
        hash: Calls._which,
        print: Calls._nothing,
        callable: Calls._can_be_called,
        isinstance: Calls._instance,
        issubclass: Calls._subclass,
        setattr: Calls._nothing,
    }
)


def _is_dispatched(function: Any) -> bool:
    """Whether ``functools.singledispatch`` made a function."""
    of_functools = type(function) is FunctionType and function.__code__.co_filename == functools.__file__
    return of_functools and "registry" in vars(function)


def _dispatched(kind: type, function: Any) -> Any:
    return function.dispatch(kind)


def _is_compiled(value: Any) -> bool:
    """Whether a value is a callable whose work is not seen."""
    return type(value) in (*BUILTINS, MethodWrapperType, functools.partial, *GETTERS)


def _held_by(*args: Any) -> Any:
    *default, variable = args
    return contextvars.ContextVar.get(variable, *default)


def parent(cls: Any, instance: Any) -> Any:
    """Return ``super(cls, instance)``; UNKNOWN if it raises."""
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
