"""Which values of the host a function's Python reads directly, found in its bytecode without running it.

A value is read directly when a name (a global, a closure cell, a default, ``self``), followed by attributes and keys,
leads to it. Names are followed through local variables and branches, as arguments into the user's own functions and
back as their results, and into what wrappers of libraries close over. Of a container that is handed on as a whole, what
it holds is noted; of an object only what is read by name. The getter of a property is scanned, not run.
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
from .bytecode import Inner, Reader
from .calls import known_call
from .refs import Made, Ref, Refs, Step, is_user_module
from .values import (
    CONTENTS,
    KIND,
    SUBMODULES,
    View,
    in_classes,
    instance_dict,
    is_container,
    is_value,
)

__all__ = ["Scan"]

_LARGEST_CONTAINER = 256
_DEEPEST = 4  # containers inside of containers
_METHODS = ("forward", "setup_context", "backward")  # of an autograd.Function
_DEEPEST_CALLS = 32
_MOST_CALLS = 2048
_NO_KEYWORDS: Mapping[str, Refs] = MappingProxyType({})


class Scan:
    """Collects the values that functions read.

    Args:
      constants: Declared constants: which tensor a name leads to is a value of the host too.

    Attributes:
      values: The values found, each once, with the way to read it again.
      definitions: Code, closure and defaults of the functions that names lead to, classes and modules, likewise.
      says_autocast: Whether a function names autocast, whose default dtypes it then depends on.
    """

    def __init__(self, constants: Iterable[torch.Tensor] = ()) -> None:
        self.values: dict[Any, Ref] = {}
        self.definitions: dict[Any, Ref] = {}
        self.says_autocast = False
        self._constants = {id(tensor) for tensor in constants}
        self._entered: dict[Any, Refs] = {}
        self._active: set[Any] = set()
        self._walked: dict[int, object] = {}

    def reach(self, ref: Ref) -> Ref:
        """Note what a name or a chain of the function leads to."""
        if ref.root is None:
            return ref
        if is_value(ref.value) or id(ref.value) in self._constants:
            if ref.steps:
                self.values.setdefault(ref.place, ref)
        elif isinstance(ref.value, torch.nn.Module):
            self._module_of(ref)
        elif isinstance(ref.value, type):
            self._identify(ref)
            for name in _METHODS if issubclass(ref.value, torch.autograd.Function) else ():
                found = ref.attribute(name)
                self.offer((found,) if found is not None else ())
        return ref

    def note(self, ref: Ref, view: View) -> None:
        """Note that a part of a value is read."""
        if view is not KIND:
            ref = dataclasses.replace(ref.storage, name=ref.name)
        if ref.root is not None and view.fits(ref.value) and (ref.steps or view is not KIND):
            seen = ref.seen(view)
            self.values.setdefault(seen.place, seen)

    def offer(self, refs: Refs) -> None:
        """Enter what is handed on to code that is not scanned: it may be called there."""
        for ref in refs:
            if isinstance(ref.value, Made):
                self.offer(ref.value.all)
            elif not is_value(ref.value) and not isinstance(ref.value, type):
                self.enter(ref)

    def use(self, refs: Refs) -> None:
        """Note all that code which is not scanned can read of a container."""
        self.offer(refs)
        for ref in refs:
            self._read_whole(ref)

    def hold(self, ref: Ref) -> None:
        """Note all of something that belongs to the structure of a state: it is not to change at all."""
        self.use((ref,))
        owner = ref.value
        ours = type(owner).__module__.partition(".")[0] in (__name__.partition(".")[0], torch.__name__)
        if ours or callable(owner):
            return
        if (
            dataclasses.is_dataclass(owner) and type(owner).__hash__ is not None
        ):  # its fields are not bound anew
            fields = [ref.attribute(field.name) for field in dataclasses.fields(owner)]
            self.use(tuple(field for field in fields if field is not None))
        elif (held := ref.attribute("__dict__")) is not None:
            self.use((dataclasses.replace(held, name=ref.name),))

    def _read_whole(self, ref: Ref, depth: int = 0) -> None:
        if isinstance(ref.value, Made):
            for part in ref.value.all:
                self._read_whole(self.reach(part), depth)
        elif is_container(ref.storage.value) and not is_value(ref.value) and depth < _DEEPEST:
            self.note(ref, CONTENTS)
            for part in ref.values():
                self._read_whole(part, depth + 1)

    def _define(self, ref: Ref) -> None:
        """Note the definition of a function of the user that a name leads to: a notebook may define it anew."""
        if not is_user_file(ref.value.__code__.co_filename):
            self._identify(ref)
        elif ref.root is not None and ref.steps:
            for name in ("__code__", "__closure__", "__defaults__", "__kwdefaults__"):
                part = ref.follow(getattr(ref.value, name), Step(name), name=ref.name)
                if part is not None and part.value is not None:
                    self.definitions.setdefault(part.place, part)

    def _identify(self, ref: Ref) -> None:
        """Note which class, module, or callable of a library, a name leads to."""
        if ref.root is not None and ref.steps:
            self.definitions.setdefault(ref.place, ref)

    def _module_of(self, ref: Ref) -> None:
        """Note a module: which it is, and what torch's own code reads of it and of those inside of it."""
        self._identify(ref)
        if ref.value._modules:
            inside = Ref.to(ref.value, ref.name).seen(SUBMODULES)
            self.definitions.setdefault(inside.place, inside)
        for path, module in ref.value.named_modules():
            forward = getattr(type(module), "forward", None)
            # Read from the module itself: the way to it through its parents costs a lookup per level.
            place = Ref.to(module, f"{ref.name}.{path}".rstrip("."))
            if not path or (isinstance(forward, FunctionType) and "training" in forward.__code__.co_names):
                training = place.attribute("training")
                if training is not None:
                    self.reach(training)
            if isinstance(forward, FunctionType) and not is_user_file(forward.__code__.co_filename):
                self._settings_of(place, forward)

    def _settings_of(self, ref: Ref, forward: FunctionType) -> None:
        """Note the numbers and names that a forward of torch's own reads of its module."""
        for name in forward.__code__.co_names:
            found = ref.attribute(name) if name in instance_dict(ref.value) else None
            if found is not None and is_value(found.value):
                self.reach(found)

    def _settings_of_value(self, ref: Ref) -> None:
        """Note what a method of a library can read of its frozen dataclass: of a precision policy, the dtypes."""
        made = getattr(type(ref.value), "__dataclass_params__", None)
        for field in dataclasses.fields(ref.value) if made is not None and made.frozen else ():
            found = ref.attribute(field.name)
            if found is not None and is_value(found.value):
                self.reach(found)

    def enter(
        self, ref: Ref, args: Sequence[Refs] = (), kwargs: Mapping[str, Refs] = _NO_KEYWORDS
    ) -> Refs | None:
        """Scan what a call of `ref.value` runs, its parameters standing for `args` and `kwargs`.

        Returns:
          What the result stands for; None if it is not the user's code, so that what becomes of the arguments is
          unknown.
        """
        value = ref.value
        if (known := known_call(self, ref, args, kwargs)) is not None:
            return known
        if ref.bound is not None:
            args = (ref.bound,), *args
            self.note(ref.bound, KIND)
            if isinstance(value, FunctionType) and not is_user_file(value.__code__.co_filename):
                self._settings_of_value(ref.bound)
        match value:
            case Inner():
                return self._call(value.code, value.code, value.parameters(args, kwargs), value.namespace)
            case FunctionType():
                self._define(ref)
                return self._function(value, args, kwargs)
            case MethodType(__func__=FunctionType() as function):
                name = next(iter(function.__code__.co_varnames), "self")
                owner = Ref(value.__self__) if ref.root is None else Ref.to(value.__self__, name)
                return self._function(function, ((owner,), *args), kwargs)
            case functools.partial():
                return self._partial(ref, args, kwargs)
            case property(fget=FunctionType() as getter):
                return self._function(getter, args, {})
            case type():
                init = in_classes(value.__mro__, "__init__")
                made = isinstance(init, FunctionType) and self._function(init, ((), *args), kwargs)
                return None if made is None or made is False else ()
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
        return None

    def _partial(self, ref: Ref, args: Sequence[Refs], kwargs: Mapping[str, Refs]) -> Refs | None:
        partial = ref.value
        keywords = Ref(partial.keywords, partial, (Step("keywords"),), ref.name)
        first = [(Ref.to(value, f"{ref.name}.args[{place}]"),) for place, value in enumerate(partial.args)]
        named = {name: (found,) for name in partial.keywords if (found := keywords.item(name)) is not None}
        return self.enter(Ref.to(partial.func, ref.name), (*first, *args), {**named, **kwargs})

    def _module(self, ref: Ref, args: Sequence[Refs], kwargs: Mapping[str, Refs]) -> Refs | None:
        forward = ref.attribute("forward")
        if forward is not None and is_user_file(forward.value.__code__.co_filename):
            return self.enter(forward, args, kwargs)
        for name, child in ref.value._modules.items():
            steps = Step("_modules"), Step(name, item=True)
            found = ref.follow(child, *steps, name=f"{ref.name}.{name}")
            self.offer((found,) if found is not None else ())
        return None

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
        self, function: FunctionType, args: Sequence[Refs], kwargs: Mapping[str, Refs]
    ) -> Refs | None:
        code, names = function.__code__, _closure(function)
        if not is_user_file(code.co_filename):
            for name, ref in names.items():
                self.walk(ref.value, name)
            wrapped = vars(function).get("__wrapped__")
            name = getattr(wrapped, "__name__", type(wrapped).__name__)
            return None if wrapped is None else self.enter(Ref.to(wrapped, name), args, kwargs)
        known = {name: refs for name, refs in _parameters(function, args, kwargs).items() if refs}
        outer = {name: (ref,) for name, ref in names.items()}
        return self._call(function, code, {**outer, **known}, function.__globals__)

    def _call(
        self, function: object, code: CodeType, names: Mapping[str, Refs], namespace: dict[str, Any]
    ) -> Refs:
        """What a call stands for; each is scanned once, and none inside of itself."""
        known = sorted(names.items())
        entry = (function, tuple((name, tuple(ref.place for ref in refs)) for name, refs in known))
        # A path around a cycle of objects is new each time round, but it leads to the same values.
        active = (function, tuple((name, tuple(map(_identity, refs))) for name, refs in known))
        fresh = entry not in self._entered and active not in self._active
        if fresh and len(self._active) < _DEEPEST_CALLS and len(self._entered) < _MOST_CALLS:
            self._entered[entry] = ()
            self._active.add(active)
            self._entered[entry] = self.read(code, names, namespace)
            self._active.discard(active)
        return self._entered.get(entry, ())

    def read(self, code: CodeType, names: Mapping[str, Refs], namespace: dict[str, Any]) -> Refs:
        """Scan one code object and those nested in it; `names` says what its variables stand for."""
        self.says_autocast = self.says_autocast or "autocast" in code.co_names
        reader = Reader(self, code, names, namespace)
        returned = reader.run()
        for inner in code.co_consts:
            if isinstance(inner, CodeType):
                outer = {name: reader.ever[name] for name in inner.co_freevars if name in reader.ever}
                self.read(inner, outer, namespace)
        return returned


def _is_user_class(cls: type) -> bool:
    module = sys.modules.get(cls.__module__)
    return module is not None and is_user_module(module)


def _identity(ref: Ref) -> object:
    return Made if isinstance(ref.value, Made) else id(ref.value)


def _closure(function: FunctionType) -> dict[str, Ref]:
    names = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            names[name] = Ref(cell.cell_contents, cell, (Step("cell_contents"),), name)
        except ValueError:  # not yet assigned
            continue
    return names


def _parameters(function: FunctionType, args: Sequence[Refs], kwargs: Mapping[str, Refs]) -> dict[str, Refs]:
    """What the parameters stand for: the arguments of the call, else the defaults."""
    code = function.__code__
    positional = code.co_varnames[: code.co_argcount]
    named = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    defaults, keywords = function.__defaults__ or (), function.__kwdefaults__ or {}
    known: dict[str, Refs] = {}
    for place, name in enumerate(positional[len(positional) - len(defaults) :]):
        steps = Step("__defaults__"), Step(place, item=True)
        known[name] = (Ref(defaults[place], function, steps, name),)
    for name, value in keywords.items():
        known[name] = (Ref(value, function, (Step("__kwdefaults__"), Step(name, item=True)), name),)
    known.update(zip(positional, args, strict=False))
    known.update((name, refs) for name, refs in kwargs.items() if name in named)
    return known
