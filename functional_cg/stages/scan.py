"""Which values of the host a function's Python reads directly, found in its bytecode without running it.

A value is read directly when a name (a global, a closure cell, a default, ``self``), followed by attributes and
constant keys, leads to it. Names are followed through local variables that are assigned once, as arguments into the
user's own functions, and into what wrappers of libraries close over. The getter of a property is scanned, not run.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import torch

from ..source import is_user_file
from .bytecode import Reader
from .refs import Ref, Step, in_classes, instance_dict, is_user_module, is_value

__all__ = ["Scan"]

_LARGEST_CONTAINER = 256
_NO_KEYWORDS: Mapping[str, Any] = MappingProxyType({})


class Scan:
    """Collects the values that functions read.

    Args:
      constants: Declared constants: which tensor a name leads to is a value of the host too.

    Attributes:
      values: The values found, each once, with the way to read it again.
      definitions: Code, closure and defaults of the functions that names lead to, and the modules, likewise.
      says_autocast: Whether a function names autocast, whose default dtypes it then depends on.
    """

    def __init__(self, constants: Iterable[torch.Tensor] = ()) -> None:
        self.values: dict[Any, Ref] = {}
        self.definitions: dict[Any, Ref] = {}
        self.says_autocast = False
        self._constants = {id(tensor) for tensor in constants}
        self._entered: set[Any] = set()
        self._active: set[Any] = set()
        self._walked: dict[int, object] = {}

    def reach(self, ref: Ref | None) -> Ref | None:
        """Note what a name or a chain of the function leads to."""
        if ref is not None and ref.root is not None:
            if is_value(ref.value) or id(ref.value) in self._constants:
                if ref.steps:
                    self.values.setdefault(ref.place, ref)
            elif isinstance(ref.value, torch.nn.Module):
                self._modes_of(ref)
                self._identify(ref)
            elif isinstance(ref.value, type) and issubclass(ref.value, torch.autograd.Function):
                for name in ("forward", "setup_context", "backward"):
                    self.offer(ref.attribute(name))
        return ref

    def offer(self, ref: Ref | None) -> None:
        """Enter what is handed on to code that is not scanned: it may be called there."""
        if ref is not None and not is_value(ref.value) and not isinstance(ref.value, type):
            self.enter(ref)

    def _define(self, ref: Ref) -> None:
        """Note the definition of a function of the user that a name leads to: a notebook may define it anew."""
        if ref.root is not None and ref.steps and is_user_file(ref.value.__code__.co_filename):
            for name in ("__code__", "__closure__", "__defaults__", "__kwdefaults__"):
                part = ref.follow(getattr(ref.value, name), Step(name), name=ref.name)
                if part is not None and part.value is not None:
                    self.definitions.setdefault(part.place, part)

    def _identify(self, ref: Ref) -> None:
        """Note which module, or which callable object of a library, a name leads to."""
        if ref.root is not None and ref.steps:
            self.definitions.setdefault(ref.place, ref)

    def _modes_of(self, ref: Ref) -> None:
        """Note whether a module, and those inside of it that act on it, are in training mode."""
        for path, module in ref.value.named_modules():
            forward = getattr(getattr(type(module), "forward", None), "__code__", None)
            if not path or (forward is not None and "training" in forward.co_names):
                # Read from the module itself: the way to it through its parents costs a lookup per level.
                self.reach(Ref.to(module, f"{ref.name}.{path}".rstrip(".")).attribute("training"))

    def enter(
        self, ref: Ref, args: Sequence[Ref | None] = (), kwargs: Mapping[str, Ref | None] = _NO_KEYWORDS
    ) -> bool:
        """Scan what a call of `ref.value` runs, its parameters standing for `args` and `kwargs`.

        Returns:
          Whether it is the user's code, so that what becomes of the arguments is known.
        """
        value = ref.value
        args = args if ref.bound is None else (ref.bound, *args)
        match value:
            case FunctionType():
                self._define(ref)
                return self._function(value, args, kwargs)
            case MethodType(__func__=FunctionType() as function):
                name = next(iter(function.__code__.co_varnames), "self")
                owner = Ref(value.__self__) if ref.root is None else Ref.to(value.__self__, name)
                return self._function(function, (owner, *args), kwargs)
            case functools.partial():
                return self._partial(ref, args, kwargs)
            case property(fget=FunctionType() as getter):
                return self._function(getter, args, {})
            case type():
                init = in_classes(value.__mro__, "__init__")
                return isinstance(init, FunctionType) and self._function(init, (None, *args), kwargs)
            case torch.nn.Module():
                return self._module(ref, args, kwargs)
        wrapped, call = ref.attribute("__wrapped__"), ref.attribute("__call__")
        if wrapped is not None:
            return self.enter(wrapped, args, kwargs)
        if call is not None and isinstance(call.value, FunctionType) and _is_user_class(type(value)):
            return self.enter(call, args, kwargs)
        if callable(value):
            self._identify(ref)
        self.walk(value, ref.name)
        return False

    def _partial(self, ref: Ref, args: Sequence[Ref | None], kwargs: Mapping[str, Ref | None]) -> bool:
        partial = ref.value
        keywords = Ref(partial.keywords, partial, (Step("keywords"),), ref.name)
        first = [Ref.to(value, f"{ref.name}.args[{place}]") for place, value in enumerate(partial.args)]
        named = {name: keywords.item(name) for name in partial.keywords}
        return self.enter(Ref.to(partial.func, ref.name), (*first, *args), {**named, **kwargs})

    def _module(self, ref: Ref, args: Sequence[Ref | None], kwargs: Mapping[str, Ref | None]) -> bool:
        forward = ref.attribute("forward")
        if forward is not None and is_user_file(forward.value.__code__.co_filename):
            return self.enter(forward, args, kwargs)
        for name, child in ref.value._modules.items():
            steps = Step("_modules"), Step(name, item=True)
            self.offer(ref.follow(child, *steps, name=f"{ref.name}.{name}"))
        return False

    def walk(self, value: object, name: str) -> None:
        """Enter the functions that something of a library holds: a wrapper's closure, an optimizer, a container."""
        if id(value) in self._walked:
            return
        self._walked[id(value)] = value
        match value:
            case FunctionType() | MethodType() | functools.partial():
                self.enter(Ref.to(value, name))
            case torch.nn.Module():
                # A library's private copy, whose modes it sets as it likes: only what its code reads elsewhere.
                self.enter(Ref(value))
            case _:
                for part in itertools.islice(self._parts(value, name), _LARGEST_CONTAINER):
                    self.walk(part, name)

    def _parts(self, value: object, name: str) -> Iterable[object]:
        if isinstance(value, tuple | list):
            return value
        if isinstance(value, dict):
            return value.values()
        if isinstance(value, type | torch.Tensor | ModuleType):
            return ()
        held = instance_dict(value)
        if callable(value) and (_is_user_class(type(value)) or "__wrapped__" in held):
            self.enter(Ref.to(value, name))
            return ()
        fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
        ours = type(value).__module__.partition(".")[0] == __name__.partition(".")[0]
        return [getattr(value, field.name, None) for field in fields] or (held.values() if ours else ())

    def _function(
        self, function: FunctionType, args: Sequence[Ref | None], kwargs: Mapping[str, Ref | None]
    ) -> bool:
        code, names = function.__code__, _closure(function)
        if not is_user_file(code.co_filename):
            for name, ref in names.items():
                self.walk(ref.value, name)
            return False
        known = {name: ref for name, ref in _parameters(function, args, kwargs).items() if ref is not None}
        entry = (function, tuple((name, ref.place) for name, ref in known.items()))
        # A path around a cycle of objects is new each time round, but it leads to the same values.
        active = (function, tuple((name, id(ref.value)) for name, ref in known.items()))
        if entry not in self._entered and active not in self._active:
            self._entered.add(entry)
            self._active.add(active)
            self.read(code, {**names, **known}, function.__globals__)
            self._active.discard(active)
        return True

    def read(self, code: CodeType, names: dict[str, Ref], namespace: dict[str, Any]) -> None:
        """Scan one code object and those nested in it; `names` says what its variables stand for."""
        self.says_autocast = self.says_autocast or "autocast" in code.co_names
        Reader(self, code, names, namespace).run()
        for inner in code.co_consts:
            if isinstance(inner, CodeType):
                self.read(
                    inner, {name: names[name] for name in inner.co_freevars if name in names}, namespace
                )


def _is_user_class(cls: type) -> bool:
    module = sys.modules.get(cls.__module__)
    return module is not None and is_user_module(module)


def _closure(function: FunctionType) -> dict[str, Ref]:
    names = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            names[name] = Ref(cell.cell_contents, cell, (Step("cell_contents"),), name)
        except ValueError:  # not yet assigned
            continue
    return names


def _parameters(
    function: FunctionType, args: Sequence[Ref | None], kwargs: Mapping[str, Ref | None]
) -> dict[str, Ref | None]:
    """What the parameters stand for: the arguments of the call, else the defaults."""
    code = function.__code__
    positional = code.co_varnames[: code.co_argcount]
    named = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    defaults, keywords = function.__defaults__ or (), function.__kwdefaults__ or {}
    known: dict[str, Ref | None] = {}
    for place, name in enumerate(positional[len(positional) - len(defaults) :]):
        known[name] = Ref(defaults[place], function, (Step("__defaults__"), Step(place, item=True)), name)
    for name, value in keywords.items():
        known[name] = Ref(value, function, (Step("__kwdefaults__"), Step(name, item=True)), name)
    known.update(zip(positional, args, strict=False))
    known.update((name, ref) for name, ref in kwargs.items() if name in named)
    return known
