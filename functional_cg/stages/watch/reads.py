"""Record what a step reads on the host: names, attributes, keys, whole containers.

Recording runs no user code: it inspects only what instances, classes, modules and plain containers store.
"""

from __future__ import annotations

import functools
import gc
import operator
import os
import types
from collections import Counter
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from ...concurrency.garbage import collections
from ...messages.source import Location, is_user_file
from .kinds import (
    BUILTINS,
    UNKNOWN,
    advances,
    generator_state,
    inside,
    is_installed,
    is_key,
    is_user_class,
    parameters_with_defaults,
    plain,
)
from .liveness import without_gone, without_unheld
from .places import ATTRIBUTE, GONE, ITEM, PART, Changes, Entry, How, Memory, Place, Step, parts_of
from .values import Contents, Shape, is_container, is_value

__all__ = ["PLAIN_TENSORS", "Reads"]


class Reads:
    """The host reads of one run of a step.

    Args:
      constants: Declared constants: which of them a name refers to is a host value, too.

    Attributes:
      entries: What is compared at each call.
      frame: The running frame.
      functions: Places of the functions found so far, by code.
      says_autocast: Whether a function names autocast, and so may depend on its default dtypes.
      memory: The constants that some function remembers.
      threads: The lines that start a thread.
      contexts: How often the step has set a context variable, less how often it has reset it.
    """

    def __init__(self, constants: Iterable[torch.Tensor] = ()) -> None:
        self.entries: dict[Any, Entry] = {}
        self.frame: FrameType | None = None
        self._drawn: list[tuple[Place, Any, Location]] = []
        self._advanced: list[tuple[Place, Location]] = []
        self.changes = Changes()
        self.asked_types: list[Location] = []
        self.threads: list[Location] = []
        self.says_autocast = False
        self.contexts: Counter[ContextVar[Any]] = Counter()
        self._constants = {id(tensor) for tensor in constants}
        self.memory = Memory(self._constants)
        self._places: dict[int, Place] = {}
        self._seen: set[Any] = set()
        self.functions: dict[CodeType, list[Place]] = {}
        self._classes: dict[type, bool] = {}
        self._registries: dict[int, object] = {}
        self.root(os.environ, "os.environ")
        self._collections = collections()

    def root(self, value: object, name: str, *, outlives: bool = True) -> Place:
        """Return an object's place; a new one is a root, which stays the same object."""
        place = self._places.get(id(value))
        if place is None:
            place = self._places[id(value)] = Place(value, name, outlives=outlives)
            self._arrived(place)
        return place

    def known(self, value: object) -> Place | None:
        """Return the place where an object was found; None if it was not."""
        return self._places.get(id(value))

    def place(self, value: Any) -> Place:
        """Return the place where an object was found, else a new root, which the step may have made."""
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
        """The line being executed."""
        assert self.frame is not None
        return Location(self.frame.f_code.co_filename, self.frame.f_lineno, self.frame.f_code.co_name)

    def _arrived(self, place: Place) -> None:
        """Record what a callable stores for its calls: defaults, a bound object, arguments of a partial."""
        value = place.value
        if type(value) is FunctionType:
            self.functions.setdefault(value.__code__, []).append(place)
            if is_user_file(value.__code__.co_filename):
                code = value.__code__
                self.compare(place, Step(ATTRIBUTE, "__code__"), How.SAME, code, code.co_name, defines=True)
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
            if place.owner is None:  # its binding cannot change
                self.root(value.__func__, place.name, outlives=place.outlives)
                self.root(value.__self__, "self", outlives=place.outlives)
                return
            self.found(place, Step(ATTRIBUTE, "__func__"), value.__func__, place.name)
            self.found(place, Step(ATTRIBUTE, "__self__"), value.__self__, place.name)
        elif issubclass(type(value), functools.singledispatchmethod):
            self.whole(self.root(value.dispatcher.registry, f"{place.name}.registry"))
        elif issubclass(type(value), functools.partial | functools.partialmethod):
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
        """Record the value read at a step from a place."""
        if not self.is_new(owner, step):
            return
        self.memory.found(owner, step, value, name, self.frame)
        if is_value(value) or id(value) in self._constants:
            # An equal value of a class of the user's may have other attributes.
            by_identity = issubclass(type(value), torch.Tensor) or self.is_of_user(type(value))
            self.compare(owner, step, How.IDENTICAL if by_identity else How.SAME, value, name)
            if by_identity and owner.root.outlives:
                self._places.setdefault(id(value), Place(value, name, owner, step))
        elif not issubclass(type(value), torch.Tensor):
            self._found_object(owner, step, value, name)
        elif type(value) in PLAIN_TENSORS and owner.root.outlives:
            self.compare(owner, step, How.KIND, type(value), f"type({name})")
            self._places.setdefault(id(value), Place(value, name, owner, step))

    def is_new(self, owner: Place, step: Step) -> bool:
        """Whether this is the first read here and the step has not written here before; marks it as read."""
        key = (id(owner.value), step.way, type(step.key), step.key)
        new = key not in self._seen
        self._seen.add(key)
        return new

    def wrote(self, owner: Any, step: Step) -> None:
        """Record a write: the step does not depend on what it writes before it reads."""
        self._seen.add((id(owner), step.way, type(step.key), step.key))
        if not is_value(owner):
            self.changes.replaces(self.place(owner), step)

    def changed(self, owner: Any) -> None:
        """Record that the step changes an object; what it reads there later may go on from call to call."""
        if owner is not UNKNOWN and not is_value(owner):
            self.changes.changed(self.place(owner))

    def assigned(self, owner: Any, name: str) -> None:
        """Record ``owner.name = ...``."""
        if owner is not UNKNOWN:
            self.wrote(owner, Step(ATTRIBUTE, name))

    def put(self, owner: Any, key: Any) -> None:
        """Record ``owner[key] = ...``."""
        if owner is not UNKNOWN and is_key(key):
            self.wrote(owner, Step(ITEM, key))
        else:
            self.changed(owner)

    def _found_object(self, owner: Place, step: Step, value: Any, name: str) -> None:
        kind = type(value)
        known = self._places.get(id(value))
        if self._stays(value):
            # The step may have made the module, so only its place may reference it.
            of_module = issubclass(kind, torch.nn.Module)
            place = self.root(value, name, outlives=owner.root.outlives or not of_module)
            how, old = (How.ALIAS, place) if of_module else (How.IDENTICAL, value)
            self.compare(owner, step, how, old, name, defines=True)
        elif known is not None and known.root.outlives:
            self.compare(owner, step, How.ALIAS, known, name)
        elif not owner.root.outlives:
            # The step made the owner, which dies with it; the value may live on.
            self.compare(owner, step, How.ALIAS, self.root(value, name, outlives=False), name)
        else:
            place = self._places[id(value)] = Place(value, name, owner, step)
            if kind is FunctionType:
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
        """Whether a value is known by its identity: a class, a module, a library's function."""
        if type(value) is FunctionType:
            return not is_user_file(value.__code__.co_filename)
        return issubclass(type(value), type | torch.nn.Module | ModuleType | BuiltinFunctionType) and not (
            type(value) in BUILTINS and not issubclass(type(value.__self__), ModuleType)
        )

    def _followed(self, value: Any) -> bool:
        """Whether all reads from a value are seen, so that another one with equal contents is no change."""
        kind = type(value)
        return (
            is_container(value)
            or kind in (MethodType, types.SimpleNamespace)
            or issubclass(kind, functools.partial | Iterator)
            or self.is_of_user(kind)
        )

    def has_parts(self, value: Any) -> bool:
        """Whether an object may have attributes that count: any but a plain value of a library's class."""
        return not is_value(value) or self.is_of_user(type(value))

    def is_of_user(self, cls: type) -> bool:
        """Whether a class is user code."""
        found = self._classes.get(cls)
        if found is None:
            found = self._classes[cls] = is_user_class(cls)
        return found

    def compare(
        self, owner: Place, step: Step | None, how: How, old: Any, name: str, *, defines: bool = False
    ) -> None:
        """Add an entry, unless it exists."""
        key = (id(owner.value), step and (step.way, type(step.key), step.key), how)
        if key not in self.entries:
            self.entries[key] = Entry(owner, step, how, old, name, defines)

    def identity(self, value: Any) -> None:
        """Record which object stands where one was found: it is compared or hashed as a whole."""
        place = None if value is UNKNOWN or is_value(value) else self.known(value)
        if place is not None and place.owner is not None:
            self.compare(place.owner, place.step, How.IDENTICAL, value, place.name)

    def unlike(self, value: Any, other: Any) -> None:
        """Record that an object is not ``other``, such as a default: it may be replaced by any third one."""
        self.identity(other)
        place, fixed = self.known(value), self.known(other)
        if place is None or place.owner is None or fixed is None:
            self.identity(value)
        else:
            self.part(
                place,
                functools.partial(operator.is_, other),
                False,
                f"{place.name} is {fixed.name}",
                id(other),
            )

    def part(
        self, place: Place, read: Any, value: Any, name: str, key: Any = None, *, defines: bool = False
    ) -> None:
        """Record what ``read`` returns for an object."""
        seen = (id(place.value), PART, name, type(key), key)
        if seen not in self._seen:
            self._seen.add(seen)
            self.entries[seen] = Entry(place, Step(PART, read), How.SAME, value, name, defines)

    def whole(self, place: Place, *, deep: bool = False) -> None:
        """Record all contents of a container; if ``deep``, also of all containers in it, however deep they lie."""
        left, met = [place], {id(place.value)}
        by_its_library = self.frame is not None and is_installed(self.frame.f_globals)
        while left:
            held = (place := left.pop()).value
            if id(held) in self._registries and by_its_library:
                continue
            key = (id(held), How.CONTENTS, None)
            if key not in self.entries and not (contents := Contents(held)).of_the_trace:
                self.entries[key] = Entry(place, None, How.CONTENTS, contents, place.name)
            for step, part in parts_of(held):
                self.memory.held(place, part)
                if is_value(part) or issubclass(type(part), torch.Tensor):
                    continue
                known = self._part_of(place, step, part)
                if deep and id(part) not in met and is_container(part):
                    met.add(id(part))
                    left.append(known)

    def _part_of(self, place: Place, step: Step, part: Any) -> Place:
        known = self._places.get(id(part))
        if known is None:
            name = step.shown(place.name.removesuffix("._modules"))
            outlives = place.root.outlives
            known = Place(part, name, place if outlives else None, step if outlives else None, outlives)
            self._places[id(part)] = known
            self._arrived(known)
        return known

    def use(self, value: Any, *, deep: bool = False) -> None:
        """Record that a value is iterated or passed to unseen code: a container is then read as a whole."""
        if value is UNKNOWN or is_value(value) or issubclass(type(value), torch.Tensor):
            return
        if is_container(value):
            self.whole(self.place(value), deep=deep)
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
        """Record the bases and method names of a user's class: they decide what its instances do."""
        for one in cls.__mro__ if self.is_of_user(cls) else ():
            if self.is_of_user(one):
                key = (id(one), None, How.SHAPE)
                if key not in self.entries:
                    self.compare(
                        self.root(one, one.__name__), None, How.SHAPE, Shape(one), one.__name__, defines=True
                    )

    def asks_for_type(self) -> None:
        """Record that the type of a traced tensor is compared with that of ordinary ones: the answer is another."""
        self.asked_types.append(self._site)

    def starts_thread(self) -> None:
        """Record that the step starts a thread, whose reads are not seen."""
        self.threads.append(self._site)

    def went_on(self, frame: FrameType) -> None:
        """Record that a generator from before the step resumes."""
        self._advanced.append((Place(frame, frame.f_code.co_name), self._site))

    def finish(self) -> list[Entry]:
        """Return the entries of objects that existed before the step; forget those that the step made.

        The step made an object if only this record still references it.
        """
        self.frame = None
        self.changes.settle()
        self.functions.clear()
        self._registries.clear()
        outside = {id(place.value) for place in self._places.values() if place.root.outlives}
        places = [place for place in self._places.values() if place.owner is None and not place.outlives]
        self._places.clear()
        entries = list(self.entries.values())
        self.entries.clear()
        places, entries = without_gone(places, entries)
        # Cycles, such as a local function that calls itself, may contain places or lead to them.
        if places:
            places, entries = without_unheld(places, entries, vars(self), outside)
        # All that the step made is young, unless it was collected on the way.
        if places and gc.collect(0 if collections() == self._collections else 2):
            places, entries = without_gone(places, entries)
        for place in places:
            place.outlives = True
        return entries

    def taken_from(self) -> list[tuple[str, Location]]:
        """Return (name, line) for each iterator and random generator of before the step that it advanced."""
        drawn = [
            (place, site)
            for place, state, site in self._drawn
            if generator_state(place.value) not in (None, state)
        ]
        found = {
            id(place): (place.name, site)
            for place, site in drawn + self._advanced
            if place.root.value is not GONE
        }
        return list(found.values())


PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)  # not those of a trace or of a state
