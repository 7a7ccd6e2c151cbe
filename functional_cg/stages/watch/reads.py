"""What a step reads on the host while it runs: each name, attribute, key and whole that its frames ask for.

Nothing of the user's is run to find out: only what instances, classes, modules and plain containers store is looked at.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
import types
from collections.abc import Iterable, Iterator, Set
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from ...messages.source import Location, is_user_file
from .kinds import BUILTINS, UNKNOWN, advances, generator_state, inside, is_key, is_user_class, plain
from .liveness import unheld
from .places import ATTRIBUTE, ITEM, PART, Entry, How, Place, Step, parts_of
from .values import Contents, Shape, is_container, is_value

__all__ = ["Reads", "parameters_with_defaults"]

_DEEPEST = 4  # containers inside of containers


class Reads:
    """The reads of one run of a step.

    Args:
      constants: Declared constants: which tensor a name leads to is a value of the host too.

    Attributes:
      entries: What is compared at each call.
      frame: The frame that runs.
      functions: Places of the functions that have been found, by their code.
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
        self.functions: dict[CodeType, list[Place]] = {}
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
            self.functions.setdefault(value.__code__, []).append(place)
            for name in ("__defaults__", "__kwdefaults__"):
                held = getattr(value, name)
                if held is not None and not plain(held):
                    self.found(place, Step(ATTRIBUTE, name), held, place.name)
                    parts = held.items() if type(held) is dict else enumerate(held)
                    names = parameters_with_defaults(value) if type(held) is tuple else list(held)
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
                self.found(
                    place,
                    Step(ATTRIBUTE, name),
                    getattr(value, name),
                    place.name + ".args" * (name == "args"),
                )
                held = self._places.get(id(getattr(value, name)))
                if held is not None:
                    self.whole(held)

    def found(self, owner: Place, step: Step, value: Any, name: str) -> None:
        """Note what is read at a step from a place."""
        if not self.is_new(owner, step):
            return
        if is_value(value) or id(value) in self._constants:
            how = How.IDENTICAL if issubclass(type(value), torch.Tensor) else How.SAME
            self.compare(owner, step, how, value, name)
        elif not issubclass(type(value), torch.Tensor):
            self._found_object(owner, step, value, name)

    def is_new(self, owner: Place, step: Step) -> bool:
        """Whether this is read for the first time, and was not written by the step."""
        key = (id(owner.value), step.way, type(step.key), step.key)
        new = key not in self._seen
        self._seen.add(key)
        return new

    def wrote(self, owner: Any, step: Step) -> None:
        """What the step itself puts somewhere, before it reads it, is nothing that it depends on."""
        self._seen.add((id(owner), step.way, type(step.key), step.key))
        self.place(owner)  # keeps its id from being that of another

    def assigned(self, owner: Any, name: str) -> None:
        """``owner.name = ...``."""
        if owner is not UNKNOWN:
            self.wrote(owner, Step(ATTRIBUTE, name))

    def put(self, owner: Any, key: Any) -> None:
        """``owner[key] = ...``."""
        if owner is not UNKNOWN and is_key(key):
            self.wrote(owner, Step(ITEM, key))

    def _found_object(self, owner: Place, step: Step, value: Any, name: str) -> None:
        kind = type(value)
        known = self._places.get(id(value))
        if self._stays(value):
            # Of a module, which the step may have made, nothing but its place may keep it.
            of_module = issubclass(kind, torch.nn.Module)
            place = self.root(value, name, outlives=owner.root.outlives or not of_module)
            how, old = (How.ALIAS, place) if of_module else (How.IDENTICAL, value)
            self.compare(owner, step, how, old, name, defines=True)
        elif known is not None and known.root.outlives:
            self.compare(owner, step, How.ALIAS, known, name)
        elif not owner.root.outlives:
            # What was made in the step is gone after it; what it led to may not be.
            self.compare(owner, step, How.ALIAS, self.root(value, name, outlives=False), name)
        else:
            place = self._places[id(value)] = Place(value, name, owner, step)
            if kind is FunctionType:
                self.compare(place, Step(ATTRIBUTE, "__code__"), How.SAME, value.__code__, name, defines=True)
                for part in ("__defaults__", "__kwdefaults__"):
                    held = getattr(value, part)
                    if held is not None and plain(held):
                        old = held if type(held) is tuple else dict(held)
                        self.compare(place, Step(ATTRIBUTE, part), How.SAME, old, name, defines=True)
            elif self._followed(value):
                self.compare(owner, step, How.KIND, kind, f"type({name})")
            else:
                self.compare(owner, step, How.SAME, value, name, defines=callable(value))
            self._arrived(place)

    def _stays(self, value: Any) -> bool:
        """Whether one of another identity would be something else: a class, a module, a function of a library."""
        if type(value) is FunctionType:
            return not is_user_file(value.__code__.co_filename)
        return issubclass(type(value), type | torch.nn.Module | ModuleType | BuiltinFunctionType) and not (
            type(value) in BUILTINS and not issubclass(type(value.__self__), ModuleType)
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
            found = self._classes[cls] = is_user_class(cls)
        return found

    def compare(
        self, owner: Place, step: Step | None, how: How, old: Any, name: str, *, defines: bool = False
    ) -> None:
        """Note a comparison."""
        key = (id(owner.value), step and (step.way, type(step.key), step.key), how)
        if key not in self.entries:
            self.entries[key] = Entry(owner, step, how, old, name, defines)

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
        for step, part in parts_of(held):
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
        elif (held := inside(value)) is not None:
            place = self.place(value)
            name = "maps" if hasattr(value, "maps") else "data"
            self.found(place, Step(ATTRIBUTE, name), held, place.name)
            self.use(held, deep=True)
        elif (state := generator_state(value)) is not None:
            place = self.place(value)
            if all(place is not other for other, *_ in self._drawn):
                self._drawn.append((place, state, self._site))
        elif advances(value):
            self._advanced.append((self.place(value), self._site))
        else:
            self.shape_of(type(value))

    def shape_of(self, cls: type) -> None:
        """What a class of the user's derives from, and which methods there are, decides what its instances do."""
        for one in cls.__mro__ if self.is_of_user(cls) else ():
            if self.is_of_user(one):
                key = (id(one), None, How.SHAPE)
                if key not in self.entries:
                    self.compare(
                        self.root(one, one.__name__), None, How.SHAPE, Shape(one), one.__name__, defines=True
                    )

    def takes_from(self, value: Any, method: str) -> None:
        """A method is called of a queue that is not written in Python."""
        if method.startswith("get"):
            self._advanced.append((self.place(value), self._site))

    def says(self, owner: Any, ask: Any, value: Any, text: str) -> Any:
        """Note what an object answers, which may be asked again."""
        place = self.place(owner)
        self.part(place, ask, value, f"{place.name}.{text}")
        return value

    def held_by(self, value: Any) -> list[Any]:
        """What a container holds that is not plain, once it is read as a whole."""
        return [] if value is UNKNOWN or not is_container(value) else [part for _, part in parts_of(value)]

    def went_on(self, frame: FrameType) -> None:
        """A generator goes on that was made before the step."""
        self._advanced.append((Place(frame, frame.f_code.co_name), self._site))

    # -- the end ------------------------------------------------------------------------------------------------

    def finish(self) -> list[Entry]:
        """The entries of what has been there before the step; what the step has made is forgotten.

        What nothing but this record holds is of the step.
        """
        self.frame = None
        self.functions.clear()
        self._registries.clear()
        outside = {id(place.value) for place in self._places.values() if place.root.outlives}
        places = [place for place in self._places.values() if place.owner is None and not place.outlives]
        self._places.clear()
        entries = list(self.entries.values())
        self.entries.clear()
        places, entries = _without_gone(places, entries)
        # What holds itself, such as a local function that calls itself, may be among the places, or lead to them.
        if places:
            places, entries = _without_unheld(places, entries, vars(self), outside)
        if places and gc.collect():
            places, entries = _without_gone(places, entries)
        for place in places:
            place.outlives = True
        return entries

    def taken_from(self) -> list[tuple[str, Location]]:
        """(name, line) of each iterator, of before the step, that it has taken from, and of generators it has drawn."""
        drawn = [
            (place, site)
            for place, state, site in self._drawn
            if generator_state(place.value) not in (None, state)
        ]
        found = {
            id(place): (place.name, site)
            for place, site in drawn + self._advanced
            if place.root.value is not _GONE
        }
        return list(found.values())


_GONE = object()  # stands for what the step has made


def _without_gone(places: list[Place], entries: list[Entry]) -> tuple[list[Place], list[Entry]]:
    """Forget the places whose values nothing else holds, and what was read there."""
    probe = Place(object(), "")
    held = sys.getrefcount(probe.value)
    while gone := [place for place in places if sys.getrefcount(place.value) <= held]:
        for place in gone:
            place.value = _GONE
        places = [place for place in places if place.value is not _GONE]
        entries = [entry for entry in entries if _remains(entry)]
    return places, entries


def _without_unheld(
    places: list[Place], entries: list[Entry], books: dict[str, Any], outside: Set[int]
) -> tuple[list[Place], list[Entry]]:
    values = [place.value for place in places]
    free = unheld(values, (places, entries, books), (Place, Entry, Contents), outside)
    del values
    for place, gone in zip(places, free, strict=True):
        if gone:
            place.value = _GONE
    return [one for one in places if one.value is not _GONE], [one for one in entries if _remains(one)]


def _remains(entry: Entry) -> bool:
    led_to = entry.old.root.value if entry.how is How.ALIAS else None
    return entry.owner.root.value is not _GONE and led_to is not _GONE


def parameters_with_defaults(function: FunctionType) -> list[str]:
    """Names of the parameters that have a default, but for those that go by name alone."""
    code, defaults = function.__code__, function.__defaults__ or ()
    return list(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount])
