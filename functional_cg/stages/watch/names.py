"""Resolve the names of a frame: globals, closure cells, parameters."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterable, Mapping
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch

from ...concurrency.garbage import functions_of
from .kinds import UNKNOWN, has_key, is_installed, is_user_module, parameters_with_defaults
from .lookups import Lookups
from .places import ATTRIBUTE, CELL, ITEM, How, Place, Step
from .values import in_classes, is_container, is_value, missing

__all__ = ["HostReads", "first_argument"]

_TAKES_ANY = 0x04  # code flag of functions with ``*args``


class HostReads(Lookups):
    """What a step reads on the host while it runs.

    Args:
      constants: Declared constants: which of them a name refers to is a host value, too.
    """

    def __init__(self, constants: Iterable[torch.Tensor] = ()) -> None:
        super().__init__(constants)
        self._made: dict[CodeType, list[dict[str, tuple[Place, Step]]]] = {}
        self._methods: dict[type, Mapping[CodeType, list[str]]] = {}

    def handed(self, value: Any, name: str) -> None:
        """Record an object that the step gets from its caller."""
        if not is_value(value) and not issubclass(type(value), torch.Tensor):
            self.root(value, name)

    def enter(self, frame: FrameType) -> dict[str, list[tuple[Place, Step]]]:
        """Record what a function call reads: a method from its class, and the defaults that are used.

        Returns:
          By name, where the cells of its closure are found.
        """
        code, self.frame = frame.f_code, frame
        self.says_autocast = self.says_autocast or "autocast" in code.co_names
        held = frame.f_locals
        owner = first_argument(code, held)
        if owner is not UNKNOWN:
            self._method(owner, code)
        cells: dict[str, list[tuple[Place, Step]]] = {name: [] for name in code.co_freevars}
        for place in self._called(code, held):
            self._defaults(place, code, held)
            for number, name in enumerate(code.co_freevars):
                cells[name].append((place, Step(CELL, number)))
        for made in self._made.get(code, ()):
            for name, cell in made.items():
                if name in cells and cell not in cells[name]:
                    cells[name].append(cell)
        return cells

    def _called(self, code: CodeType, held: Mapping[str, Any]) -> list[Place]:
        places = self.functions.get(code)
        if places is None and code.co_freevars and code not in self._made:
            # Called by a library that received it before the step.
            functions = functions_of(code)
            places = [self.root(one, code.co_name, outlives=False) for one in functions]
            self.functions.setdefault(code, places)
        return [place for place in places or () if _closes_over(place.value, held)]

    def _method(self, owner: Any, code: CodeType) -> None:
        if issubclass(type(owner), torch.Tensor) or not self.has_parts(owner):
            return
        cls = owner if issubclass(type(owner), type) else type(owner)
        if cls not in self._methods:
            self._methods[cls] = _names_of_methods(cls)
        for name in self._methods[cls].get(code, ()):
            self.of_class(cls, name, in_classes(cls.__mro__, name))

    def _defaults(self, place: Place, code: CodeType, held: Mapping[str, Any]) -> None:
        if place.owner is not None:  # compared as part of the definition
            return
        function = place.value
        names = parameters_with_defaults(function)
        for number, (name, value) in enumerate(zip(names, function.__defaults__ or (), strict=True)):
            if held.get(name, missing) is value:
                self.found(self._part(place, "__defaults__"), Step(ITEM, number), value, name)
        for name, value in (function.__kwdefaults__ or {}).items():
            if held.get(name, missing) is value:
                self.found(self._part(place, "__kwdefaults__"), Step(ITEM, name), value, name)

    def _part(self, place: Place, name: str) -> Place:
        value = getattr(place.value, name)
        known = self._places.get(id(value))
        if known is None:
            known = self._places[id(value)] = Place(value, place.name, place, Step(ATTRIBUTE, name))
        return known

    def made(self, code: CodeType, cells: Mapping[str, list[tuple[Place, Step]]]) -> None:
        """Record that a function with this code is made; its closure shares these cells."""
        shared = {name: found[0] for name in code.co_freevars if (found := cells.get(name))}
        self._made.setdefault(code, []).append(shared)

    def imported(self, name: str, module: ModuleType) -> None:
        """Record what an ``import`` in a function finds."""
        if is_user_module(module):
            of_all = Place(
                sys.modules, "sys.modules"
            )  # no known place: libraries look there for what they can do
            self.compare(of_all, Step(ITEM, name), How.IDENTICAL, module, name, defines=True)

    def of_library(self, module: ModuleType, name: str) -> None:
        """Record which object the user's code finds in a library's module: it stays as it is, but may be replaced."""
        found = vars(module).get(name, missing)
        stays = (
            found is missing or type(found) is ModuleType or type(found).__module__ == "torch"
        )  # as a dtype does
        if stays or module.__name__.startswith("functional_cg") or is_user_module(module):
            return
        definition = issubclass(type(found), type | FunctionType | BuiltinFunctionType)
        # Where a program prints to is no part of the step, and a library's private objects are its own to exchange.
        if definition or is_value(found) or not (module is sys or name.startswith("_")):
            step, how = Step(ATTRIBUTE, name), How.SAME if is_value(found) else How.IDENTICAL
            self.compare(
                Place(module, module.__name__), step, how, found, f"{module.__name__}.{name}", defines=True
            )

    def from_globals(self, frame: FrameType, name: str) -> Any:
        """Return the value of a global name, and record the read."""
        namespace = frame.f_globals
        if name in namespace:
            value = namespace[name]
            if is_container(value) and is_installed(namespace):
                self._registries[id(value)] = value  # others add to it; for this step that is no change
            elif type(value) is ModuleType and not is_user_module(value):
                place = self.root(
                    namespace, "globals()"
                )  # no place of its own: what libraries read of it is theirs
                self.compare(place, Step(ITEM, name), How.IDENTICAL, value, name, defines=True)
            else:
                self.found(self.root(namespace, "globals()"), Step(ITEM, name), value, name)
            return value
        place = self.root(namespace, "globals()")
        self.part(place, has_key(name), False, name, name, defines=True)  # a global would shadow it
        self.of_library(builtins, name)
        return getattr(builtins, name, UNKNOWN)


def first_argument(code: CodeType, held: Mapping[str, Any]) -> Any:
    """Return the first argument of a call, be it one of ``*args``; UNKNOWN if there is none."""
    if code.co_argcount:
        return held.get(code.co_varnames[0], UNKNOWN)
    given = held.get(code.co_varnames[code.co_kwonlyargcount], ()) if code.co_flags & _TAKES_ANY else ()
    return given[0] if type(given) is tuple and given else UNKNOWN


def _names_of_methods(cls: type) -> Mapping[CodeType, list[str]]:
    """Return by code the names under which a class or its bases keep it: as a method or in one, decorated or not."""
    found: dict[CodeType, list[str]] = {}
    for name in dict.fromkeys(name for one in cls.__mro__ for name in vars(one)):
        stored = in_classes(cls.__mro__, name)
        function = _kept(stored, "fget", None) or _kept(stored, "__func__", stored)
        met: set[int] = set()
        while type(function) is FunctionType and id(function) not in met:
            met.add(id(function))
            found.setdefault(function.__code__, []).append(name)
            function = vars(function).get("__wrapped__")
    return found


def _kept(descriptor: object, name: str, default: object) -> Any:
    """Return a function that a descriptor keeps, without its class's own ways to look attributes up."""
    try:
        kept = object.__getattribute__(descriptor, name)
    except AttributeError:
        return default
    return kept if type(kept) is FunctionType else default


def _closes_over(function: FunctionType, held: Mapping[str, Any]) -> bool:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # not yet assigned
            value = missing
        if held.get(name, missing) is not value:
            return False
    return True
