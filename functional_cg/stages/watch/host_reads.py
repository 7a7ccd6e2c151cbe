"""Record what a step reads on the host: names, attributes, keys, whole containers.

Recording runs no user code: it inspects only what instances, classes, modules and plain containers store.
"""

from __future__ import annotations

import builtins
import enum
import functools
import gc
import operator
import os
import sys
import types
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from itertools import chain, compress, filterfalse, repeat
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.autograd.graph import Node

from ...messages.source import Location
from .evaluation import function_of
from .kinds import (
    BUILTINS,
    UNKNOWN,
    Stored,
    advances,
    computes,
    definer_after,
    generator_state,
    has_key,
    in_slot,
    inside,
    is_key,
    is_slot,
    is_user_class,
    is_user_function,
    is_user_module,
    plain,
    stores,
)
from .places import ATTRIBUTE, CELL, GONE, ITEM, PART, Entry, How, Memory, Place, Step, parts_of
from .values import Contents, Shape, in_classes, instance_dict, is_array, is_container, is_value, missing

__all__ = ["GETTERS", "HostReads", "first_argument"]

# What a tensor says of itself to the host, but for its values: attributes, methods, and what is there or not.
_SAID = frozenset(
    "shape dtype device layout ndim requires_grad is_leaf itemsize nbytes _version names is_cuda".split()
)
_ANSWERED = frozenset(
    "size dim numel stride element_size storage_offset is_floating_point is_complex is_contiguous".split()
)
_THERE = frozenset({"grad", "grad_fn"})
_FACTS = _SAID | _ANSWERED | _THERE
GETTERS = (operator.attrgetter, operator.itemgetter)
_BASES = (torch.nn.Module, object)
_KEEPS_ARGUMENTS = (functools.partial, functools.partialmethod, functools.singledispatchmethod)
_REGISTRIES = ("_modules", "_parameters", "_buffers")  # of a torch module
_BUILTIN_ITEMS = frozenset(
    kind.__getitem__
    for kind in (
        dict,
        list,
        tuple,
        types.MappingProxyType,
        deque,
        bytearray,
        defaultdict,
    )
)
_TAKES_ANY = 0x04  # code flag of functions with ``*args``


class HostReads:
    """The host reads of one run of a step.

    Args:
      constants: Declared constants: which of them a name refers to is a host value, too.
      made: Returns the objects that were made since the run began; see :func:`.new_objects`.

    Attributes:
      entries: What is compared at each call.
      frame: The running frame.
      is_of_user: Whether a class is user code.
      says_autocast: Whether a function names autocast, and so may depend on its default dtypes.
      memory: The constants that some function remembers.
      asked_types: The lines that compare the type of a traced tensor with that of ordinary ones: the answer is another.
      threads: The lines that start a thread, whose reads are not seen.
      disturbed: Whether another thread has moved what the step made, so that it may count as older than the step.
      contexts: How often the step has set a context variable, less how often it has reset it.
    """

    def __init__(
        self,
        constants: Iterable[torch.Tensor],
        made: Callable[[], tuple[set[int], Callable[[], Iterator[Any]], bool]],
    ) -> None:
        self.entries: dict[Any, Entry] = {}
        self.frame: FrameType | None = None
        self._taken: dict[Place, tuple[Any, Location]] = {}  # a random generator with its state before
        self._changed: dict[int, Place] = {}  # keeps the objects alive, so that an id is not reused
        self.asked_types: list[Location] = []
        self.threads: list[Location] = []
        self.says_autocast = self.disturbed = False
        self.contexts: Counter[ContextVar[Any]] = Counter()
        self._constants = {id(tensor) for tensor in constants}
        self.memory = Memory(self._constants)
        self._places: dict[int, Place] = {}
        self._seen: set[Any] = set()
        self.is_of_user: Callable[[type], bool] = functools.cache(is_user_class)
        self.root(os.environ, "os.environ")
        self._made_lately = made
        self._cells: dict[int, tuple[Place, Step]] = {}

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
            name: str = value.__name__
            if sys.modules.get(name) is value:
                # As an `import` finds it. No known place: libraries look there for what they can do.
                imported = Place(sys.modules, "sys.modules")
                self.compare(imported, Step(ITEM, name), How.IDENTICAL, value, name, defines=True)
            return self.root(value, name)
        held = {} if self.frame is None else self.frame.f_locals
        name = next((name for name, one in held.items() if one is value), type(value).__name__)
        return self.root(value, name, outlives=False)

    @property
    def site(self) -> Location:
        """The line being executed."""
        assert self.frame is not None
        return Location(self.frame.f_code.co_filename, self.frame.f_lineno, self.frame.f_code.co_name)

    def _arrived(self, place: Place) -> None:
        """Record what a callable stores for its calls: defaults, a bound object, arguments of a partial."""
        value = place.value
        dispatched = value.dispatcher if issubclass(type(value), functools.singledispatchmethod) else value
        of_functools = (
            type(dispatched) is FunctionType and dispatched.__code__.co_filename == functools.__file__
        )
        if of_functools and "registry" in vars(dispatched):  # as `singledispatch` makes it
            self.whole(self.root(dispatched.registry, f"{place.name}.registry"))
        if is_user_function(value):
            code = value.__code__
            self.compare(place, Step(ATTRIBUTE, "__code__"), How.SAME, code, code.co_name, defines=True)
        elif type(value) is MethodType and place.owner is None:  # its binding cannot change
            self.root(value.__func__, place.name, outlives=place.outlives)
            self.root(value.__self__, "self", outlives=place.outlives)
        elif issubclass(type(value), functools.partial | functools.partialmethod | MethodType):
            names = ("__func__", "__self__") if type(value) is MethodType else ("func", "args", "keywords")
            for name in names:
                part, shown = getattr(value, name), place.name + ".args" * (name == "args")
                self.found(place, Step(ATTRIBUTE, name), part, shown)
                self.use(part)

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
        self.changed(owner)

    def changed(self, owner: Any) -> None:
        """Record that the step changes an object; what it reads there later may go on from call to call."""
        if owner is not UNKNOWN and not is_value(owner):
            self._changed[id(owner)] = self.place(owner)

    def changes_older(self) -> bool:
        """Whether the step has changed an object that is older than it."""
        return any(place.root.value is not GONE and place.root.outlives for place in self._changed.values())

    def put(self, owner: Any, key: Any) -> None:
        """Record ``owner[key] = ...``."""
        if is_key(key):
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
            if self._followed(value):
                self.compare(owner, step, How.KIND, kind, f"type({name})")
            elif kind is not FunctionType:  # of which the code counts
                self.compare(owner, step, How.SAME, value, name, defines=callable(value))
            self._arrived(place)

    def _stays(self, value: Any) -> bool:
        """Whether a value is known by its identity: a class, a module, a library's function."""
        if type(value) is FunctionType:
            return not is_user_function(value)
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

    def compare(
        self, owner: Place, step: Step | None, how: How, old: Any, name: str, *, defines: bool = False
    ) -> None:
        """Add an entry, unless it exists."""
        key = (id(owner.value), step and (step.way, type(step.key), step.key), how)
        self.entries.setdefault(key, Entry(owner, step, how, old, name, defines))

    def identity(self, value: Any) -> None:
        """Record which object stands where one was found: it is compared or hashed as a whole."""
        place = None if value is UNKNOWN or is_value(value) else self.known(value)
        if place is not None and place.owner is not None:
            self.compare(place.owner, place.step, How.IDENTICAL, value, place.name)

    def part(
        self, place: Place, read: Any, value: Any, name: str, key: Any = None, *, defines: bool = False
    ) -> None:
        """Record what ``read`` returns for an object."""
        asked = (id(place.value), PART, name, type(key), key)
        self.entries.setdefault(asked, Entry(place, Step(PART, read), How.SAME, value, name, defines))

    def whole(self, place: Place, *, deep: bool = False) -> None:
        """Record all contents of a container; if ``deep``, also of all containers in it, however deep they lie."""
        left, met = [place], {id(place.value)}
        while left:
            held = (place := left.pop()).value
            known = (id(held), None, How.CONTENTS) in self.entries
            if not known and not (contents := Contents(held)).of_the_trace:
                self.compare(place, None, How.CONTENTS, contents, place.name)
            for step, part in parts_of(held):
                self.memory.held(place, part)
                if is_value(part) or issubclass(type(part), torch.Tensor):
                    continue
                below = self._part_of(place, step, part)
                if deep and id(part) not in met and is_container(part):
                    met.add(id(part))
                    left.append(below)

    def _part_of(self, place: Place, step: Step, part: Any) -> Place:
        known = self._places.get(id(part))
        if known is None:
            name, outlives = step.shown(place.name), place.root.outlives
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
        elif (name := inside(value)) is not None:
            place, held = self.place(value), getattr(value, name)
            self.found(place, Step(ATTRIBUTE, name), held, place.name)
            self.use(held, deep=True)
        elif (state := generator_state(value)) is not None:
            self._taken.setdefault(self.place(value), (state, self.site))
        elif advances(value):
            self.goes_on(self.place(value))
        else:
            self.shape_of(type(value))

    def shape_of(self, cls: type) -> None:
        """Record the bases, methods and properties of a user's class: they decide what its instances do."""
        of_module = issubclass(cls, torch.nn.Module)  # a library's, whose methods a program may replace
        for one in cls.__mro__:
            counts = self.is_of_user(one) or (of_module and one not in _BASES)
            if counts and (id(one), None, How.SHAPE) not in self.entries:
                place, shape = self.root(one, one.__name__), Shape(one)
                self.compare(place, None, How.SHAPE, shape, one.__name__, defines=True)
                for name, held in zip(shape.names, shape.called, strict=True):
                    if type(held) in _KEEPS_ARGUMENTS:
                        self.root(held, f"{one.__name__}.{name}")

    def returned(self, result: Any) -> None:
        """Record what a step returns: of what existed before, the caller sees all contents."""
        left, met = [result], set[int]()
        while left:
            value = left.pop()
            if (
                id(value) in met
                or is_value(value)
                or issubclass(type(value), torch.Tensor | type | ModuleType)
            ):
                continue
            met.add(id(value))
            known, held = self.known(value), instance_dict(value)
            if is_container(value):
                left += [part for _, part in parts_of(value)]
            elif known is None or not known.root.outlives:  # the step may have made it
                left += held.values()
            if known is not None and is_container(value):
                self.use(value, deep=True)
            elif known is not None:
                self.identity(value)
                self.use(self.attribute(value, "__dict__"), deep=True)

    def finish(self) -> list[Entry]:
        """Return the entries of objects that existed before the step; forget those that the step made.

        An object was made by the step if it was made since the run began.
        """
        self.frame = None
        places = [place for place in self._places.values() if place.owner is None and not place.outlives]
        self._places.clear()
        values = [place.value for place in places]
        made, young, self.disturbed = self._made_lately()
        made = _among(made, young, values)  # last: it counts the references that `values` holds, too
        for place in places:
            gone = id(place.value) in made
            place.value, place.outlives = (GONE, False) if gone else (place.value, True)
        entries = [
            entry
            for entry in self.entries.values()
            if all(place.root.value is not GONE for place in entry.places())
        ]
        self.entries.clear()
        return entries

    def taken_from(self) -> list[tuple[str, Location]]:
        """Return (name, line) for each iterator and random generator of before the step that it advanced."""
        return [
            (place.name, site)
            for place, (state, site) in self._taken.items()
            if place.root.value is not GONE and (state is None or generator_state(place.value) != state)
        ]

    def attribute(self, owner: Any, name: str, *, stored: bool = False) -> Any:
        """Return ``owner.name`` and record the read; UNKNOWN if it is not stored.

        ``stored`` bypasses the class's own ``__getattribute__``.
        """
        kind = type(owner)
        if owner is UNKNOWN or not self.has_parts(owner):
            return UNKNOWN
        if issubclass(kind, torch.Tensor):
            return self._of_tensor(owner, name)
        if issubclass(kind, super):
            self.shape_of(owner.__self_class__)
            which = functools.partial(definer_after, owner.__thisclass__, name)
            definer = which(owner.__self_class__)
            found = missing if definer is None else vars(definer)[name]
            if definer is not None:
                self.of_class(definer, name, found)
            place = self.root(owner.__self_class__, owner.__self_class__.__name__)
            self.part(place, which, definer, f"super().{name}", (owner.__thisclass__, name), defines=True)
            return plain(found)
        if issubclass(kind, ModuleType) and not is_user_module(owner):
            return vars(owner).get(name, UNKNOWN)
        if issubclass(kind, type):
            return self._of_type(owner, name)
        if is_array(owner):
            self.use(owner)
            return UNKNOWN
        if generator_state(owner) is not None:
            self.use(owner)
        in_class = in_classes(kind.__mro__, name)
        self.shape_of(kind)
        if not stored and type(in_classes(kind.__mro__, "__getattribute__")) is FunctionType:
            return UNKNOWN
        if name == "__class__":
            return kind
        storage = instance_dict(owner)
        if name == "__dict__":
            if storage:
                place = self.place(owner)
                self.found(place, Step(ATTRIBUTE, "__dict__"), storage, place.name)
            return storage
        if stored and (name in storage or not computes(in_class)):
            value = storage.get(name, in_class)
            return UNKNOWN if value is missing else self.holds(owner, Stored(name), value)
        return self._of_instance(owner, name, in_class, storage)

    def _of_instance(self, owner: Any, name: str, in_class: Any, storage: dict[str, Any]) -> Any:
        if type(in_class) is types.GetSetDescriptorType and isinstance(owner, Node):
            return UNKNOWN  # it may unpack a saved tensor, by calls that the function does not make
        if is_slot(in_class):
            value = in_slot(in_class, owner)
            if value is not missing:
                return self._read(owner, Step(ATTRIBUTE, name), value)
            self._lacks(self.place(owner), name)
            return UNKNOWN
        if hasattr(type(in_class), "__set__"):  # a property precedes what the instance stores
            return self.got(getattr(in_class, "fget", None), owner)
        if name in storage:
            return self._read(owner, Step(ATTRIBUTE, name), storage[name])
        if issubclass(type(owner), torch.nn.Module):
            for registry in _REGISTRIES:
                if name in storage.get(registry, ()):
                    held = self._read(owner, Step(ATTRIBUTE, registry), storage[registry])
                    shown = Step(ATTRIBUTE, name).shown(self.place(owner).name)
                    self.found(self.place(held), Step(ITEM, name), held[name], shown)
                    return held[name]
        if in_class is missing:
            return self._looked_up(owner, name)
        return self._of_its_class(owner, name, in_class)

    def got(self, getter: Any, owner: Any) -> Any:
        """Return what an ``attrgetter`` or ``itemgetter`` gets, and record the reads; UNKNOWN of other callables."""
        if type(getter) not in GETTERS:
            return UNKNOWN
        found, keys = UNKNOWN, getter.__reduce__()[1]
        for key in keys:
            found = owner
            if type(getter) is operator.itemgetter:
                found = self.item(found, key)
            else:
                for name in key.split("."):
                    found = self.attribute(found, name)
        return found if len(keys) == 1 else UNKNOWN

    def _of_tensor(self, owner: torch.Tensor, name: str) -> Any:
        """Handle an attribute of a tensor: what a tensor of before the step says of itself, but for its values."""
        self.method_of_tensors(name)
        if type(owner) not in PLAIN_TENSORS:  # made by the trace, or a leaf
            return UNKNOWN
        place = self.place(owner)  # wherever it came from: a generator tells no place
        if name in vars(owner):
            return self._read(owner, Step(ATTRIBUTE, name), vars(owner)[name])
        if name in _FACTS:
            ask = functools.partial(_fact, name)
            self.part(place, ask, ask(owner), f"{place.name}.{name}", name)
        elif in_classes(type(owner).__mro__, name) is missing:
            self._lacks(place, name)
        return UNKNOWN

    def _read(self, owner: Any, step: Step, value: Any) -> Any:
        """Record and return ``value``, which was read at a step from an object."""
        place = self.place(owner)
        self.found(place, step, value, step.shown(place.name))
        return value

    def _of_its_class(self, owner: Any, name: str, in_class: Any) -> Any:
        if not computes(in_class):
            known = self.known(owner)
            if known is None or not known.root.outlives:
                self.of_class(type(owner), name, in_class)
            definer = _definer(type(owner), name)
            # What this library's own classes store, such as the fields of a TrainState, nobody changes.
            if self.is_of_user(definer) or not definer.__module__.startswith("functional_cg."):
                self._read(owner, Step(ATTRIBUTE, name), in_class)
            return in_class
        of_module = issubclass(type(owner), torch.nn.Module) and not name.startswith("_")
        if of_module or self.is_of_user(type(owner)):  # what is stored in the instance would precede it
            place = self.place(owner)
            shown = f"{place.name}.{name}"
            self.part(place, functools.partial(stores, name), False, shown, name, defines=True)
        return UNKNOWN

    def _looked_up(self, owner: Any, name: str) -> Any:
        """Handle an attribute that is not stored: the class computes it, or it does not exist."""
        asks = in_classes(type(owner).__mro__, "__getattr__")
        if asks in (dict.__getitem__, dict.get):
            return self.item(owner, name)
        self._lacks(self.place(owner), name)
        self.of_class(type(owner), name, missing)
        return UNKNOWN

    def _of_type(self, owner: type, name: str) -> Any:
        found = in_classes(owner.__mro__, name)
        if name == "__dict__" and self.is_of_user(owner):  # a new view each time: all that it shows counts
            shown = f"vars({owner.__name__})"
            self.whole(Place(vars(owner), shown, self.place(owner), Step(ATTRIBUTE, name)))
            return UNKNOWN
        if issubclass(type(owner), enum.EnumType):
            return found if issubclass(type(found), owner) else UNKNOWN
        if found is missing:
            kind: Any = type(owner)
            meta = in_classes(kind.__mro__, name)
            computed = type(meta) is types.GetSetDescriptorType and self.is_of_user(owner)
            if computed and (said := getattr(owner, name, missing)) is not missing:
                if is_value(said):  # such as its name
                    self._read(owner, Step(ATTRIBUTE, name), said)
            elif meta is not missing and not computed:
                self.of_class(kind, name, meta)
            elif not issubclass(owner, enum.Enum):
                self._lacks(self.root(owner, owner.__name__), name)
            return plain(meta)
        self.of_class(owner, name, found)
        return plain(found)

    def of_class(self, cls: type, name: str, found: Any) -> None:
        """Record what a user's class stores under a name; of what computes, the whole class tells."""
        definer = _definer(cls, name)
        of_interest = self.is_of_user(cls) or issubclass(cls, torch.nn.Module)
        own = self.is_of_user(definer) or (of_interest and not name.startswith("_"))
        if not own or issubclass(cls, enum.Enum):  # a member stays
            return
        place, shown = self.root(cls, cls.__name__), f"{cls.__name__}.{name}"
        if found is missing:
            self._lacks(place, name)
        elif not computes(found):
            self.found(place, Step(ATTRIBUTE, name), found, shown)

    def holds(self, owner: Any, ask: Any, value: Any, method: str = "") -> Any:
        """Record and return ``value``, the result of ``ask(owner)``, such as a weak reference's target.

        Args:
          owner: What is asked.
          ask: Asks it.
          value: What it answers.
          method: How the program asks it, such as ``".get"``; by a call if it is empty.
        """
        place = self.place(owner)
        self.found(place, Step(PART, ask), value, f"{place.name}{method}()")
        return value

    def goes_on(self, place: Place) -> None:
        """Record that the step advances an object: unseen, as a compiled queue, or a generator from before the step."""
        self._taken[place] = None, self.site

    def item(self, owner: Any, key: Any) -> Any:
        """Return ``owner[key]`` of a builtin container, and record the read; UNKNOWN for other objects."""
        if is_value(owner) or not is_container(owner):
            self.use(owner)
            return UNKNOWN
        getter = in_classes(type(owner).__mro__, "__getitem__")
        if not is_key(key) or getter not in _BUILTIN_ITEMS:
            self.use(owner)
            self.identity(key)
            return UNKNOWN
        if issubclass(type(owner), dict) and not dict.__contains__(owner, key):
            self.has(owner, key)
            return UNKNOWN
        try:
            value = owner[key]
        except (LookupError, TypeError):
            self.whole(self.place(owner))
            return UNKNOWN
        return self._read(owner, Step(ITEM, key), value)

    def has(self, owner: Any, key: Any) -> None:
        """Record ``key in owner``."""
        if owner is UNKNOWN or is_value(owner):
            return
        if is_container(owner) and is_key(key) and not is_array(owner):
            place, has = self.place(owner), functools.partial(has_key, key)
            self.part(place, has, key in owner, f"{key!r} in {place.name}", key)
        else:
            self.use(owner)
            self.identity(key)

    def size(self, owner: Any, *, truth: bool) -> None:
        """Record ``len(owner)``, or its truth value."""
        if is_container(owner) and not (is_array(owner) or is_value(owner)):
            place, read = self.place(owner), bool if truth else len
            self.part(place, read, read(owner), f"{read.__name__}({place.name})")
        else:
            self.use(owner)

    def handed(self, value: Any, name: str) -> None:
        """Record an object that the step gets from its caller."""
        if not is_value(value) and not issubclass(type(value), torch.Tensor):
            self.root(value, name)

    def enter(self, frame: FrameType) -> dict[str, tuple[Place, Step]]:
        """Record what a function call reads: a method from its class, and the defaults that are used.

        Returns:
          By name, where the cells of its closure are found.
        """
        code, function, self.frame = frame.f_code, function_of(frame), frame
        self.says_autocast = self.says_autocast or "autocast" in code.co_names
        held = frame.f_locals
        owner = first_argument(code, held)
        if owner is not UNKNOWN and self.has_parts(owner):
            self.shape_of(owner if issubclass(type(owner), type) else type(owner))
        place = self.root(
            function, code.co_name, outlives=False
        )  # unless it is known, the step may have made it
        self._defaults(place, code, held)
        return dict(self._cells_of(place))

    def _cells_of(self, place: Place) -> Iterator[tuple[str, tuple[Place, Step]]]:
        """Yield each free variable of a function, and where its cell is found.

        The step may have made the function, which then shares the cells of another one.
        """
        function = place.value
        for number, cell in enumerate(function.__closure__ or ()):
            here = place, Step(CELL, number)
            first = self._cells.setdefault(id(cell), here)
            yield function.__code__.co_freevars[number], here if place.root.outlives else first

    def _defaults(self, place: Place, code: CodeType, held: Mapping[str, Any]) -> None:
        numbered, named = place.value.__defaults__ or (), place.value.__kwdefaults__ or {}
        names = code.co_varnames[code.co_argcount - len(numbered) : code.co_argcount]
        for where, those, defaults in (("__defaults__", names, numbered), ("__kwdefaults__", named, named)):
            owner = Place(defaults, place.name, place, Step(ATTRIBUTE, where))
            for name, (step, value) in zip(those, parts_of(defaults), strict=True):
                if held.get(name, missing) is value:
                    self.found(self._places.setdefault(id(defaults), owner), step, value, name)

    def of_library(self, module: ModuleType, name: str) -> None:
        """Record what the user's code finds in a library's module, or that it finds nothing.

        A definition stays as it is, but may be replaced; of other objects, plain values count.
        """
        if module.__name__.startswith("functional_cg") or is_user_module(module):
            return
        place, stored = Place(module, module.__name__), name in vars(module)
        found = vars(module)[name] if stored else _computed(module, name)
        if found is missing and module is not builtins:
            self._lacks(place, name)
        of_torch = type(found).__module__ == "torch"  # as a dtype is
        if of_torch or type(found) is ModuleType or not (stored or is_value(found)):
            return
        definition = issubclass(type(found), type | FunctionType | BuiltinFunctionType)
        # Where a program prints to is no part of the step, and a library's private objects are its own to exchange.
        if definition or is_value(found) or not (module is sys or name.startswith("_")):
            step, how = Step(ATTRIBUTE, name), How.SAME if is_value(found) else How.IDENTICAL
            self.compare(place, step, how, found, step.shown(place.name), defines=stored)

    def answers(self, getter: Any, value: Any) -> None:
        """Record what a compiled getter says that takes no arguments."""
        name = f"{getter.__module__}.{getter.__name__}" if getter.__module__ else getter.__name__
        self.part(Place(getter, name), operator.call, value, f"{name}()")

    def _lacks(self, place: Place, name: str) -> None:
        """Record that an object, or a class with its bases, stores nothing under a name."""
        self.part(place, functools.partial(stores, name), False, f"hasattr({place.name}, {name!r})", name)

    def method_of_tensors(self, name: str) -> None:
        """Record what all tensors have under a name: torch's own, or what the user has put there."""
        found, place = in_classes(torch.Tensor.__mro__, name), Place(torch.Tensor, "Tensor")
        if found is missing:
            self._lacks(place, name)
        elif getattr(torch.Tensor, name, missing) is found:  # as a method is, and a property
            how = How.SAME if is_value(found) else How.IDENTICAL
            self.compare(place, Step(ATTRIBUTE, name), how, found, f"Tensor.{name}", defines=True)

    def from_globals(self, frame: FrameType, name: str) -> Any:
        """Return the value of a global name, and record the read."""
        namespace = frame.f_globals
        if name in namespace:
            value = namespace[name]
            if type(value) is ModuleType and not is_user_module(value):
                place = self.root(
                    namespace, "globals()"
                )  # no place of its own: what libraries read of it is theirs
                self.compare(place, Step(ITEM, name), How.IDENTICAL, value, name, defines=True)
            else:
                self.found(self.root(namespace, "globals()"), Step(ITEM, name), value, name)
            return value
        place = self.root(namespace, "globals()")
        has = functools.partial(has_key, name)
        self.part(place, has, False, name, name, defines=True)  # a global would shadow it
        self.of_library(builtins, name)
        return getattr(builtins, name, UNKNOWN)


PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)  # not those of a trace or of a state


def _among(made: set[int], young: Callable[[], Iterator[Any]], values: list[Any]) -> set[int]:
    """Add to the ids of young objects those of values that only they hold, since the collector does not track all.

    Not tracked are an iterator of a range, and a dict of numbers or of a frame's locals. A young dict may be the
    `__dict__` of an old object, which Python makes when it is first asked for: then the old object holds it, too.

    Args:
      made: Ids of all young objects.
      young: Yields them, for one call in C.
      values: What the run has met that may be young; the list is.
    """
    loose = {id(one): one for one in values if not gc.is_tracked(one)}
    if not loose and not any(type(one) is dict for one in values):
        return made
    held = Counter(map(id, chain.from_iterable(map(gc.get_referents, young()))))
    untracked = list(filterfalse(gc.is_tracked, chain.from_iterable(map(gc.get_referents, young()))))
    loose |= {id(one): one for one in untracked if type(one) is dict}
    del untracked
    are_dicts = map(operator.is_, map(type, young()), repeat(dict))
    for one in list(compress(chain(young(), repeat(None)), are_dicts)):
        if sys.getrefcount(one) - _HERE > held[id(one)]:
            made.discard(id(one))
            held.subtract(map(id, gc.get_referents(one)))
    before = -1
    while before != (before := len(loose)):
        for number in list(loose):
            one = loose[number]
            if sys.getrefcount(one) - _HERE <= held[number]:
                made.add(number)
                held.update(map(id, gc.get_referents(loose.pop(number))))
    return made


_HERE = 3  # references to an object that such a loop looks at: of the list or dict, its own, and an argument


def _definer(cls: type, name: str) -> type:
    """Return the class that stores a name, the class itself or one of its bases; the class if none does."""
    return next((one for one in cls.__mro__ if name in vars(one)), cls)


def _computed(module: ModuleType, name: str) -> Any:
    """Return what a module's class, or its own `__getattr__`, gives; `missing` if nothing."""
    try:
        return getattr(module, name, missing)
    except Exception:  # the user's code is about to meet it
        return missing


def _fact(name: str, tensor: torch.Tensor) -> Any:
    value = getattr(tensor, name)
    if name in _ANSWERED:
        return value()
    return value is not None if name in _THERE else value


def first_argument(code: CodeType, held: Mapping[str, Any]) -> Any:
    """Return the first argument of a call, be it one of ``*args``; UNKNOWN if there is none."""
    if code.co_argcount:
        return held.get(code.co_varnames[0], UNKNOWN)
    given = held.get(code.co_varnames[code.co_kwonlyargcount], ()) if code.co_flags & _TAKES_ANY else ()
    return given[0] if type(given) is tuple and given else UNKNOWN
