"""What a step reads on the host while it runs: each name, attribute, key and whole that its frames ask for.

Nothing of the user's is run to find out: only what instances, classes, modules and plain containers store is looked at.
"""

from __future__ import annotations

import builtins
import collections
import enum
import functools
import gc
import os
import random
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePath
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from ..source import Location, is_user_file
from .places import ATTRIBUTE, CELL, ITEM, PART, Entry, How, Place, Step
from .values import Contents, in_classes, instance_dict, is_array, is_container, is_value, missing

__all__ = ["UNKNOWN", "Reads"]

UNKNOWN: Any = types.SimpleNamespace()  # a value that is not seen
_DEEPEST = 4  # containers inside of containers
_REGISTRIES = ("_modules", "_parameters", "_buffers")  # of a torch module
_BUILTIN_ITEMS = frozenset(
    kind.__getitem__
    for kind in (dict, list, tuple, types.MappingProxyType, collections.deque, bytearray, collections.defaultdict)
)


class Reads:
    """The reads of one run of a step.

    Args:
      constants: Declared constants: which tensor a name leads to is a value of the host too.

    Attributes:
      entries: What is compared at each call.
      frame: The frame that runs.
      says_autocast: Whether a function names autocast, whose default dtypes it then depends on.
    """

    def __init__(self, constants: Iterable[torch.Tensor] = ()) -> None:
        self.entries: dict[Any, Entry] = {}
        self.frame: FrameType | None = None
        self._drawn: list[tuple[Place, Any, Location]] = []
        self._advanced: list[tuple[Place, Location]] = []
        self.says_autocast = False
        self._constants = {id(tensor) for tensor in constants}
        self._places: dict[int, Place] = {}
        self._seen: set[Any] = set()
        self._functions: dict[CodeType, list[Place]] = {}
        self._made: dict[CodeType, list[dict[str, tuple[Place, Step]]]] = {}
        self._classes: dict[type, bool] = {}
        self._registries: dict[int, object] = {}
        self.root(os.environ, "os.environ")

    # -- places -------------------------------------------------------------------------------------------------

    def root(self, value: object, name: str, *, outlives: bool = True) -> Place:
        """The place of an object that stays what it is."""
        place = self._places.get(id(value))
        if place is None:
            place = self._places[id(value)] = Place(value, name, outlives=outlives)
            self._arrived(place)
        return place

    def known(self, value: object) -> Place | None:
        """Where an object was found, if it was."""
        return self._places.get(id(value))

    def place(self, value: Any) -> Place:
        """Where an object was found; else a root of which it is not known whether the step has made it."""
        known = self._places.get(id(value))
        if known is not None:
            return known
        if issubclass(type(value), type | ModuleType):
            return self.root(value, value.__name__)
        held = {} if self.frame is None else self.frame.f_locals
        name = next((name for name, one in held.items() if one is value), type(value).__name__)
        return self.root(value, name, outlives=False)

    @property
    def _site(self) -> Location:
        """The line that runs."""
        assert self.frame is not None
        return Location(self.frame.f_code.co_filename, self.frame.f_lineno, self.frame.f_code.co_name)

    def _arrived(self, place: Place) -> None:
        """Look at what a callable keeps for the time when it is called."""
        value = place.value
        if type(value) is FunctionType:
            self._functions.setdefault(value.__code__, []).append(place)
            for name in ("__defaults__", "__kwdefaults__"):
                held = getattr(value, name)
                if held is not None and not _plain(held):
                    self.found(place, Step(ATTRIBUTE, name), held, place.name)
                    parts = held.items() if type(held) is dict else enumerate(held)
                    names = _parameters_with_defaults(value) if type(held) is tuple else list(held)
                    for (key, part), parameter in zip(list(parts), names, strict=True):
                        if not is_value(part):
                            self.found(self._places[id(held)], Step(ITEM, key), part, parameter)
        elif type(value) is MethodType:
            if place.owner is None:  # it stays bound to what it is bound to
                self.root(value.__func__, place.name, outlives=place.outlives)
                self.root(value.__self__, "self", outlives=place.outlives)
                return
            self.found(place, Step(ATTRIBUTE, "__func__"), value.__func__, place.name)
            self.found(place, Step(ATTRIBUTE, "__self__"), value.__self__, place.name)
        elif issubclass(type(value), functools.partial):
            self.found(place, Step(ATTRIBUTE, "func"), value.func, place.name)
            for name in ("args", "keywords"):
                self.found(place, Step(ATTRIBUTE, name), getattr(value, name), place.name + ".args" * (name == "args"))
                held = self._places.get(id(getattr(value, name)))
                if held is not None:
                    self.whole(held)

    def found(self, owner: Place, step: Step, value: Any, name: str) -> None:
        """Note what is read at a step from a place."""
        key = (id(owner.value), step.way, type(step.key), step.key)
        if key in self._seen:
            return
        self._seen.add(key)
        if is_value(value) or id(value) in self._constants:
            how = How.IDENTICAL if issubclass(type(value), torch.Tensor) else How.SAME
            self._compare(owner, step, how, value, name)
        elif not issubclass(type(value), torch.Tensor):
            self._found_object(owner, step, value, name)

    def wrote(self, owner: Any, step: Step) -> None:
        """What the step itself puts somewhere, before it reads it, is nothing that it depends on."""
        self._seen.add((id(owner), step.way, type(step.key), step.key))
        place = self._places.get(id(owner))
        if place is None:
            self._places[id(owner)] = Place(owner, "", outlives=False)  # keeps its id from being that of another

    def assigned(self, owner: Any, name: str) -> None:
        """``owner.name = ...``."""
        if owner is not UNKNOWN:
            self.wrote(owner, Step(ATTRIBUTE, name))

    def put(self, owner: Any, key: Any) -> None:
        """``owner[key] = ...``."""
        if owner is not UNKNOWN and _is_key(key):
            self.wrote(owner, Step(ITEM, key))

    def _found_object(self, owner: Place, step: Step, value: Any, name: str) -> None:
        kind = type(value)
        known = self._places.get(id(value))
        if self._stays(value):
            self._compare(owner, step, How.IDENTICAL, value, name, defines=True)
            self.root(value, name)
        elif known is not None and known.root.outlives:
            self._compare(owner, step, How.ALIAS, known, name)
        elif not owner.root.outlives:
            # What was made in the step is gone after it; what it led to may not be.
            self._compare(owner, step, How.ALIAS, self.root(value, name, outlives=False), name)
        else:
            place = self._places[id(value)] = Place(value, name, owner, step)
            if kind is FunctionType:
                self._compare(place, Step(ATTRIBUTE, "__code__"), How.SAME, value.__code__, name, defines=True)
                for part in ("__defaults__", "__kwdefaults__"):
                    held = getattr(value, part)
                    if held is not None and _plain(held):
                        self._compare(place, Step(ATTRIBUTE, part), How.SAME, held, name, defines=True)
            elif self._followed(value):
                self._compare(owner, step, How.KIND, kind, f"type({name})")
            else:
                self._compare(owner, step, How.SAME, value, name, defines=callable(value))
            self._arrived(place)

    def _stays(self, value: Any) -> bool:
        """Whether one of another identity would be something else: a class, a module, a function of a library."""
        if type(value) is FunctionType:
            return not is_user_file(value.__code__.co_filename)
        return issubclass(type(value), type | torch.nn.Module | ModuleType | BuiltinFunctionType) and not (
            type(value) is BuiltinFunctionType and not issubclass(type(value.__self__), ModuleType)
        )

    def _followed(self, value: Any) -> bool:
        """Whether all that is read of it is seen: then another one that holds the same is no change."""
        kind = type(value)
        return (
            is_container(value)
            or kind in (MethodType, types.SimpleNamespace)
            or issubclass(kind, functools.partial | Iterator)
            or self.is_of_user(kind)
        )

    def is_of_user(self, cls: type) -> bool:
        """Whether a class is the user's own."""
        found = self._classes.get(cls)
        if found is None:
            module = sys.modules.get(cls.__module__)
            found = self._classes[cls] = module is not None and _is_user_module(module)
        return found

    def _compare(
        self, owner: Place, step: Step | None, how: How, old: Any, name: str, *, defines: bool = False
    ) -> None:
        key = (id(owner.value), step and (step.way, type(step.key), step.key), how)
        if key not in self.entries:
            self.entries[key] = Entry(owner, step, how, old, name, defines)

    # -- names --------------------------------------------------------------------------------------------------

    def enter(self, frame: FrameType) -> dict[str, list[tuple[Place, Step]]]:
        """Note what is read by the call of a function: itself, where its class has it, and defaults that are used.

        Returns:
          Where the cells of its closure are found, by name.
        """
        code, self.frame = frame.f_code, frame
        self.says_autocast = self.says_autocast or "autocast" in code.co_names
        held = frame.f_locals
        if code.co_argcount and code.co_varnames[0] in held:
            self._method(held[code.co_varnames[0]], code)
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
        places = self._functions.get(code)
        if places is None and code.co_freevars and code not in self._made:
            # A library calls it, which was given it before the step.
            functions = [one for one in gc.get_referrers(code) if type(one) is FunctionType and one.__code__ is code]
            places = [self.root(one, code.co_name, outlives=False) for one in functions]
            self._functions.setdefault(code, places)
        return [place for place in places or () if _closes_over(place.value, held)]

    def _method(self, owner: Any, code: CodeType) -> None:
        if issubclass(type(owner), torch.Tensor) or is_value(owner):
            return
        cls = owner if issubclass(type(owner), type) else type(owner)
        found = in_classes(cls.__mro__, code.co_name)
        function = getattr(found, "fget", None) or getattr(found, "__func__", found)
        if type(function) is FunctionType and function.__code__ is code:
            self.of_class(cls, code.co_name, found)

    def _defaults(self, place: Place, code: CodeType, held: Mapping[str, Any]) -> None:
        if place.owner is not None:  # compared as a part of its definition
            return
        function = place.value
        names = _parameters_with_defaults(function)
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
        """A function of this code is made, whose closure shares these cells."""
        shared = {name: found[0] for name in code.co_freevars if (found := cells.get(name))}
        self._made.setdefault(code, []).append(shared)

    def from_globals(self, frame: FrameType, name: str) -> Any:
        """What a global name stands for."""
        namespace = frame.f_globals
        if name in namespace:
            value = namespace[name]
            library = type(value) is ModuleType and not _is_user_module(value)
            if is_container(value) and _is_installed(namespace):
                self._registries[id(value)] = value  # others add to it, which is no change for this step
            elif not library:
                self.found(self.root(namespace, "globals()"), Step(ITEM, name), value, name)
            return value
        place = self.root(namespace, "globals()")
        self.part(place, has_key(name), False, name, name, defines=True)  # a builtin is shadowed by one
        return getattr(builtins, name, UNKNOWN)

    # -- parts --------------------------------------------------------------------------------------------------

    def part(
        self, place: Place, read: Any, value: Any, name: str, key: Any = None, *, defines: bool = False
    ) -> None:
        """Note something that a function says of an object."""
        seen = (id(place.value), PART, name, type(key), key)
        if seen not in self._seen:
            self._seen.add(seen)
            self.entries[seen] = Entry(place, Step(PART, read), How.SAME, value, name, defines)

    def whole(self, place: Place, depth: int = 0) -> None:
        """Note all that a container holds, and where; `depth`: how deep those inside of it are read too."""
        held = place.value
        if id(held) in self._registries:
            return
        key = (id(held), How.CONTENTS, None)
        if key not in self.entries:
            self.entries[key] = Entry(place, None, How.CONTENTS, Contents(held), place.name)
        for step, part in _parts(held):
            if is_value(part) or issubclass(type(part), torch.Tensor):
                continue
            known = self._places.get(id(part))
            if known is None:
                name = step.shown(place.name.removesuffix("._modules"))
                outlives = place.root.outlives
                known = Place(part, name, place if outlives else None, step if outlives else None, outlives)
                self._places[id(part)] = known
                self._arrived(known)
            if depth and is_container(part):
                self.whole(known, depth - 1)

    def use(self, value: Any, *, deep: bool = False) -> None:
        """Something is handed to what is not seen, or iterated: a container is read as a whole."""
        if value is UNKNOWN or is_value(value) or issubclass(type(value), torch.Tensor):
            return
        if is_container(value):
            self.whole(self.place(value), _DEEPEST if deep else 0)
        elif (state := _generator_state(value)) is not None:
            place = self.place(value)
            if all(place is not other for other, *_ in self._drawn):
                self._drawn.append((place, state, self._site))
        elif _advances(value):
            self._advanced.append((self.place(value), self._site))

    def held_by(self, value: Any) -> list[Any]:
        """What a container holds that is not plain, once it is read as a whole."""
        return [] if value is UNKNOWN or not is_container(value) else [part for _, part in _parts(value)]

    def went_on(self, frame: FrameType) -> None:
        """A generator goes on that was made before the step."""
        self._advanced.append((Place(frame, frame.f_code.co_name), self._site))

    # -- attributes ---------------------------------------------------------------------------------------------

    def attribute(self, owner: Any, name: str) -> Any:
        """What ``owner.name`` is, as far as it is stored."""
        kind = type(owner)
        if owner is UNKNOWN or is_value(owner) or issubclass(kind, torch.Tensor):
            return UNKNOWN
        if issubclass(kind, super):
            found = in_classes(_after(owner), name)
            definer = next((cls for cls in _after(owner) if name in vars(cls)), None)
            if definer is not None:
                self.of_class(definer, name, found)
            return _bound(found, owner.__self__)
        if issubclass(kind, ModuleType):
            return self._of_module(owner, name)
        if issubclass(kind, type):
            return self._of_type(owner, name)
        if is_array(owner):
            self.use(owner)
            return UNKNOWN
        if _generator_state(owner) is not None:
            self.use(owner)
        in_class = in_classes(kind.__mro__, name)
        if type(in_classes(kind.__mro__, "__getattribute__")) is FunctionType:
            return UNKNOWN
        if name == "__class__":
            return kind
        storage = instance_dict(owner)
        if name == "__dict__":
            if storage:
                place = self.place(owner)
                self.found(place, Step(ATTRIBUTE, "__dict__"), storage, place.name)
            return storage
        return self._of_instance(owner, name, in_class, storage)

    def _of_instance(self, owner: Any, name: str, in_class: Any, storage: dict[str, Any]) -> Any:
        if type(in_class) in (types.MemberDescriptorType, types.GetSetDescriptorType) or (
            issubclass(type(owner), tuple) and name in getattr(type(owner), "_fields", ())
        ) or (type(owner) is functools.partial and type(in_class) is types.MemberDescriptorType):
            value = getattr(owner, name, missing)
            if value is missing:
                return UNKNOWN
            self._read(owner, Step(ATTRIBUTE, name), value)
            return value
        if hasattr(type(in_class), "__set__"):  # a property comes before what the instance stores
            self.of_class(type(owner), name, in_class)
            return UNKNOWN
        if name in storage:
            self._read(owner, Step(ATTRIBUTE, name), storage[name])
            return storage[name]
        if issubclass(type(owner), torch.nn.Module):
            for registry in _REGISTRIES:
                if name in storage.get(registry, ()):
                    return self._of_registry(owner, storage[registry], registry, name)
        if in_class is missing:
            return self._looked_up(owner, name)
        return self._of_its_class(owner, name, in_class)

    def _of_registry(self, owner: Any, held: dict[str, Any], registry: str, name: str) -> Any:
        place = self.place(owner)
        self.found(place, Step(ATTRIBUTE, registry), held, f"{place.name}.{registry}")
        self.found(self.place(held), Step(ITEM, name), held[name], f"{place.name}.{name}")
        return held[name]

    def _read(self, owner: Any, step: Step, value: Any) -> None:
        place = self.place(owner)
        self.found(place, step, value, step.shown(place.name))

    def _of_its_class(self, owner: Any, name: str, in_class: Any) -> Any:
        if not _computes(in_class):
            known = self._places.get(id(owner))
            if known is None or not known.root.outlives:
                self.of_class(type(owner), name, in_class)
            self._read(owner, Step(ATTRIBUTE, name), in_class)
            return in_class
        self.of_class(type(owner), name, in_class)
        of_interest = self.is_of_user(type(owner)) or issubclass(type(owner), torch.nn.Module)
        if of_interest and type(in_class) is FunctionType:  # one that the instance stores would come before it
            place = self.place(owner)
            shown = f"{place.name}.{name}"
            self.part(place, functools.partial(_stores, name), False, shown, name, defines=True)
        return _bound(in_class, owner)

    def _looked_up(self, owner: Any, name: str) -> Any:
        """An attribute that is not stored: the class computes it, or it is not there."""
        asks = in_classes(type(owner).__mro__, "__getattr__")
        if asks in (dict.__getitem__, dict.get):
            return self.item(owner, name)
        place = self.place(owner)
        text = f"hasattr({place.name}, {name!r})"
        self.part(place, functools.partial(_stores, name), False, text, name)
        if asks is missing:
            self.of_class(type(owner), name, missing)
        return UNKNOWN

    def _of_module(self, owner: ModuleType, name: str) -> Any:
        found = vars(owner).get(name, missing)
        if found is missing:
            return UNKNOWN
        if _is_user_module(owner):
            self._read(owner, Step(ATTRIBUTE, name), found)
        return found

    def _of_type(self, owner: type, name: str) -> Any:
        found = in_classes(owner.__mro__, name)
        if issubclass(type(owner), enum.EnumType):
            return found if issubclass(type(found), owner) else UNKNOWN
        if found is missing:
            meta = in_classes(type(owner).__mro__, name)
            if meta is not missing:
                self.of_class(type(owner), name, meta)
            return _bound(meta, owner)
        self.of_class(owner, name, found)
        if type(found) is staticmethod:
            return found.__func__
        if type(found) is classmethod:
            return MethodType(found.__func__, owner)
        return UNKNOWN if _computes(found) and type(found) is not FunctionType else found

    def of_class(self, cls: type, name: str, found: Any) -> None:
        """Note what a class of the user's has under a name."""
        definer = next((one for one in cls.__mro__ if name in vars(one)), None)
        if not self.is_of_user(cls if definer is None else definer) or issubclass(cls, enum.Enum):
            return
        place = self.root(cls, cls.__name__)
        key = (id(cls), ATTRIBUTE, str, name)
        shown = f"{cls.__name__}.{name}"
        if key in self._seen or definer is None:
            if definer is None:
                self.part(place, functools.partial(_defines, name), False, f"hasattr({cls.__name__}, {name!r})", name)
        elif not _computes(found) and not hasattr(type(found), "__set__"):
            self.found(place, Step(ATTRIBUTE, name), found, shown)
        else:
            self._seen.add(key)
            stored = getattr(found, "__func__", found)
            self.entries[key] = Entry(
                place, Step(PART, functools.partial(_stored_in_class, name)), How.IDENTICAL, found, shown, True
            ) if type(found) is not FunctionType else Entry(
                place, Step(ATTRIBUTE, name), How.IDENTICAL, found, shown, True
            )
            for function in (stored, getattr(found, "fget", None)):
                if type(function) is FunctionType and is_user_file(function.__code__.co_filename):
                    function_place = self.root(function, shown)
                    self._compare(
                        function_place, Step(ATTRIBUTE, "__code__"), How.SAME, function.__code__, shown, defines=True
                    )

    # -- items --------------------------------------------------------------------------------------------------

    def item(self, owner: Any, key: Any) -> Any:
        """What ``owner[key]`` is, of a builtin container."""
        if owner is UNKNOWN or is_value(owner) or issubclass(type(owner), torch.Tensor):
            return UNKNOWN
        if not is_container(owner):
            return UNKNOWN
        getter = in_classes(type(owner).__mro__, "__getitem__")
        if not _is_key(key) or is_array(owner) or getter not in _BUILTIN_ITEMS:
            self.use(owner)
            return UNKNOWN
        place = self.place(owner)
        if issubclass(type(owner), dict) and not dict.__contains__(owner, key):
            self.has(owner, key)
            return UNKNOWN
        try:
            value = owner[key]
        except (LookupError, TypeError):
            self.whole(place)
            return UNKNOWN
        name = place.name.removesuffix("._modules")
        self.found(place, Step(ITEM, key), value, Step(ITEM, key).shown(name))
        return value

    def has(self, owner: Any, key: Any) -> None:
        """``key in owner``."""
        if owner is UNKNOWN or not is_container(owner) or is_value(owner):
            return
        if not _is_key(key):
            self.use(owner)
        elif not is_array(owner):
            place = self.place(owner)
            self.part(place, has_key(key), key in owner, f"{key!r} in {place.name}", key)
        else:
            self.use(owner)

    def size(self, owner: Any, *, truth: bool) -> None:
        """``len(owner)``, or whether there is anything in it."""
        if owner is UNKNOWN or is_value(owner) or not is_container(owner):
            return
        place, read = self.place(owner), bool if truth and not is_array(owner) else len
        if is_array(owner):
            self.use(owner)
        else:
            self.part(place, read, read(owner), f"{read.__name__}({place.name})")

    # -- the end ------------------------------------------------------------------------------------------------

    def finish(self) -> list[Entry]:
        """The entries of what has been there before the step; what the step has made is forgotten.

        What nothing but this record holds is of the step.
        """
        self.frame = None
        self._functions.clear()
        self._made.clear()
        self._registries.clear()
        places = [place for place in self._places.values() if place.owner is None and not place.outlives]
        self._places.clear()
        probe = Place(object(), "")
        held = sys.getrefcount(probe.value)
        entries, gone = list(self.entries.values()), True
        self.entries.clear()
        while gone:
            gone = [place for place in places if sys.getrefcount(place.value) <= held]
            places = [place for place in places if sys.getrefcount(place.value) > held]
            for place in gone:
                place.value = _GONE
            entries = [entry for entry in entries if _remains(entry)]
        for place in places:
            place.outlives = True
        return entries

    def taken_from(self) -> list[tuple[str, Location]]:
        """(name, line) of each iterator, of before the step, that it has taken from, and of generators it has drawn."""
        drawn = [
            (place, site) for place, state, site in self._drawn if _generator_state(place.value) not in (None, state)
        ]
        found = {id(place): (place.name, site) for place, site in drawn + self._advanced if place.root.value is not _GONE}
        return list(found.values())


_GONE = object()  # stands for what the step has made


def _remains(entry: Entry) -> bool:
    led_to = entry.old.root.value if entry.how is How.ALIAS else None
    return entry.owner.root.value is not _GONE and led_to is not _GONE


def _parts(held: Any) -> list[tuple[Step, Any]]:
    if issubclass(type(held), dict | types.MappingProxyType):
        return [(Step(ITEM, key), part) for key, part in held.items() if _is_key(key)]
    if issubclass(type(held), list | tuple | collections.deque):
        return [(Step(ITEM, number), part) for number, part in enumerate(held)]
    return []


def has_key(key: Any) -> Any:
    """The question whether a container has a key, or an element."""
    return functools.partial(_has_key, key)


def _has_key(key: Any, container: Any) -> bool:
    return key in container


def _plain(defaults: Any) -> bool:
    return all(map(is_value, defaults.values() if type(defaults) is dict else defaults))


def _is_key(key: Any) -> bool:
    try:
        hash(key)
    except TypeError:
        return False
    return key is not UNKNOWN and is_value(key)


def _stores(name: str, owner: Any) -> bool:
    return name in instance_dict(owner)


def _defines(name: str, cls: type) -> bool:
    return in_classes(cls.__mro__, name) is not missing


def _stored_in_class(name: str, cls: type) -> Any:
    return in_classes(cls.__mro__, name)


def _after(parent: Any) -> tuple[type, ...]:
    classes = parent.__self_class__.__mro__
    return tuple(classes[classes.index(parent.__thisclass__) + 1 :])


def _bound(found: Any, owner: Any) -> Any:
    """What an attribute of a class is, read through an instance."""
    if type(found) is FunctionType:
        return MethodType(found, owner)
    if type(found) is staticmethod:
        return found.__func__
    if type(found) is classmethod:
        return MethodType(found.__func__, owner if issubclass(type(owner), type) else type(owner))
    if type(found) in (types.MethodDescriptorType, types.WrapperDescriptorType):
        return found.__get__(owner, type(owner))
    return UNKNOWN if found is missing or _computes(found) else found


def _computes(found: Any) -> bool:
    return hasattr(type(found), "__get__") and not issubclass(type(found), type)


def _closes_over(function: FunctionType, held: Mapping[str, Any]) -> bool:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # not yet assigned
            value = missing
        if held.get(name, missing) is not value:
            return False
    return True


def _parameters_with_defaults(function: FunctionType) -> list[str]:
    code, defaults = function.__code__, function.__defaults__ or ()
    return list(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount])


def _generator_state(value: Any) -> Any:
    """The state of a random generator of Python's or numpy's; None for anything else."""
    kind = type(value)
    if issubclass(kind, random.Random) and kind is not random.SystemRandom:
        return random.Random.getstate(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None and kind is numpy.random.Generator:
        return repr(value.bit_generator.state)
    if numpy is not None and kind is numpy.random.RandomState:
        return repr(value.get_state())
    return None


def _advances(value: Any) -> bool:
    kind = type(value)
    return (
        type(in_classes(kind.__mro__, "__next__")) is not FunctionType
        and in_classes(kind.__mro__, "__next__") is not missing
        and in_classes(kind.__mro__, "__iter__") is not missing
    )


def _is_installed(namespace: Mapping[str, Any]) -> bool:
    """Whether code with these globals is of an installed package, rather than of the project that runs."""
    path = PurePath(str(namespace.get("__file__") or ""))
    return not {"site-packages", "dist-packages"}.isdisjoint(path.parts)


def _is_user_module(module: ModuleType) -> bool:
    where = vars(module).get("__file__") or next(iter(vars(module).get("__path__", ())), None)
    return module.__name__ == "__main__" if where is None else is_user_file(where)
