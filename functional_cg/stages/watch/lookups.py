"""Look up attributes and items where Python would, as far as they are stored."""

from __future__ import annotations

import collections
import enum
import functools
import operator
import types
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.autograd.graph import Node

from ...messages.source import is_user_file
from .kinds import (
    UNKNOWN,
    Stored,
    after,
    bound,
    computes,
    definer_after,
    defines,
    generator_state,
    has_key,
    holds,
    is_key,
    is_slot,
    is_user_module,
    stored_in_class,
    stores,
)
from .places import ATTRIBUTE, ITEM, PART, How, Place, Step, parts_of
from .reads import PLAIN_TENSORS, Reads
from .values import in_classes, instance_dict, is_array, is_container, is_value, missing

__all__ = ["GETTERS", "Lookups"]

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
_DEFINITIONS = (FunctionType, classmethod, property, staticmethod)
_KEEPS_ARGUMENTS = (functools.partial, functools.partialmethod, functools.singledispatchmethod)
_REGISTRIES = ("_modules", "_parameters", "_buffers")  # of a torch module
_BUILTIN_ITEMS = frozenset(
    kind.__getitem__
    for kind in (
        dict,
        list,
        tuple,
        types.MappingProxyType,
        collections.deque,
        bytearray,
        collections.defaultdict,
    )
)


class Lookups(Reads):
    """The host reads of one run, by lookups of attributes and items."""

    def attribute(self, owner: Any, name: str, *, stored: bool = False) -> Any:
        """Return ``owner.name`` and record the read; UNKNOWN if it is not stored.

        ``stored`` bypasses the class's own ``__getattribute__``.
        """
        kind = type(owner)
        if kind is str and name in ("format", "format_map"):
            return getattr(owner, name)
        if owner is UNKNOWN or not self.has_parts(owner):
            return UNKNOWN
        if issubclass(kind, torch.Tensor):
            return self._of_tensor(owner, name)
        if issubclass(kind, super):
            self.shape_of(owner.__self_class__)
            classes = after(owner)
            found = in_classes(classes, name)
            definer = next((cls for cls in classes if name in vars(cls)), None)
            if definer is not None:
                self.of_class(definer, name, found)
            which = functools.partial(definer_after, owner.__thisclass__, name)
            place = self.root(owner.__self_class__, owner.__self_class__.__name__)
            self.part(place, which, definer, f"super().{name}", (owner.__thisclass__, name), defines=True)
            return bound(found, owner.__self__)
        if issubclass(kind, ModuleType):
            return self._of_module(owner, name)
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
            if holds(in_class, owner):
                value = in_class.__get__(owner, type(owner))
                self._read(owner, Step(ATTRIBUTE, name), value)
                return value
            place = self.place(owner)
            lacks = functools.partial(holds, in_class)
            self.part(place, lacks, False, f"hasattr({place.name}, {name!r})", name)
            return UNKNOWN
        if issubclass(type(owner), tuple) and name in getattr(type(owner), "_fields", ()):
            self._read(owner, Step(ATTRIBUTE, name), getattr(owner, name))
            return getattr(owner, name)
        if hasattr(type(in_class), "__set__"):  # a property precedes what the instance stores
            self.of_class(type(owner), name, in_class)
            return self.got(getattr(in_class, "fget", None), owner)
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
        self._added_to_tensors(name)
        if type(owner) not in PLAIN_TENSORS:  # made by the trace, or a leaf
            return UNKNOWN
        place = self.place(owner)  # wherever it came from: a generator tells no place
        if name in vars(owner):
            self._read(owner, Step(ATTRIBUTE, name), vars(owner)[name])
            return vars(owner)[name]
        if name in _FACTS:
            ask = functools.partial(_fact, name)
            self.part(place, ask, ask(owner), f"{place.name}.{name}", name)
        elif in_classes(type(owner).__mro__, name) is missing:
            lacks = functools.partial(_has, name)
            self.part(place, lacks, False, f"hasattr({place.name}, {name!r})", name)
        return UNKNOWN

    def _added_to_tensors(self, name: str) -> None:
        """Record what the user has made a method or an attribute of all tensors."""
        found = in_classes(torch.Tensor.__mro__, name)
        function = getattr(found, "fget", found)
        users = type(function) is FunctionType and is_user_file(function.__code__.co_filename)
        if users or (found is not missing and is_value(found) and not name.startswith("_")):
            place, ask = Place(torch.Tensor, "Tensor"), functools.partial(stored_in_class, name)
            self.part(place, ask, found, f"Tensor.{name}", name, defines=True)

    def _of_registry(self, owner: Any, held: dict[str, Any], registry: str, name: str) -> Any:
        place = self.place(owner)
        self.found(place, Step(ATTRIBUTE, registry), held, f"{place.name}.{registry}")
        self.found(self.place(held), Step(ITEM, name), held[name], f"{place.name}.{name}")
        return held[name]

    def _read(self, owner: Any, step: Step, value: Any) -> None:
        place = self.place(owner)
        self.found(place, step, value, step.shown(place.name))

    def _of_its_class(self, owner: Any, name: str, in_class: Any) -> Any:
        if not computes(in_class):
            known = self._places.get(id(owner))
            if known is None or not known.root.outlives:
                self.of_class(type(owner), name, in_class)
            self._read(owner, Step(ATTRIBUTE, name), in_class)
            return in_class
        self.of_class(type(owner), name, in_class)
        of_module = issubclass(type(owner), torch.nn.Module) and not name.startswith("_")
        of_interest = self.is_of_user(type(owner)) or of_module
        if of_interest:  # what is stored in the instance would precede it
            place = self.place(owner)
            shown = f"{place.name}.{name}"
            self.part(place, functools.partial(stores, name), False, shown, name, defines=True)
        return bound(in_class, owner)

    def _looked_up(self, owner: Any, name: str) -> Any:
        """Handle an attribute that is not stored: the class computes it, or it does not exist."""
        asks = in_classes(type(owner).__mro__, "__getattr__")
        if asks in (dict.__getitem__, dict.get):
            return self.item(owner, name)
        place = self.place(owner)
        text = f"hasattr({place.name}, {name!r})"
        self.part(place, functools.partial(stores, name), False, text, name)
        self.of_class(type(owner), name, missing)
        return UNKNOWN

    def _of_module(self, owner: ModuleType, name: str) -> Any:
        if name == "__dict__":
            self.root(vars(owner), owner.__name__)
            return vars(owner)
        found = vars(owner).get(name, missing)
        users = is_user_module(owner)
        if found is missing:  # what the module's own `__getattr__` makes of it is seen in its frame
            if users:
                place, lacks = self.place(owner), functools.partial(stores, name)
                self.part(place, lacks, False, f"hasattr({place.name}, {name!r})", name)
            return UNKNOWN
        if users:
            self._read(owner, Step(ATTRIBUTE, name), found)
        return found

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
                self._said_of_class(owner, name, said)
            elif meta is not missing and not computed:
                self.of_class(kind, name, meta)
            else:
                self.of_class(owner, name, missing)
            return bound(meta, owner)
        self.of_class(owner, name, found)
        if type(found) is staticmethod:
            return found.__func__
        if type(found) is classmethod:
            return MethodType(found.__func__, owner)
        as_it_is = (FunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
        return UNKNOWN if computes(found) and type(found) not in as_it_is else found

    def _said_of_class(self, cls: type, name: str, value: Any) -> None:
        if is_value(value):  # such as its name
            self._read(cls, Step(ATTRIBUTE, name), value)

    def of_class(self, cls: type, name: str, found: Any) -> None:
        """Record what a user's class stores under a name."""
        definer = next((one for one in cls.__mro__ if name in vars(one)), cls)
        of_interest = self.is_of_user(cls) or issubclass(cls, torch.nn.Module)
        own = self.is_of_user(definer) or (of_interest and not name.startswith("_"))
        if not own or (issubclass(cls, enum.Enum) and type(found) not in _DEFINITIONS):  # a member stays
            return
        place, shown = self.root(cls, cls.__name__), f"{cls.__name__}.{name}"
        if found is missing:
            self.part(
                place, functools.partial(defines, name), False, f"hasattr({cls.__name__}, {name!r})", name
            )
        elif not computes(found):
            self.found(place, Step(ATTRIBUTE, name), found, shown)
        elif self.is_new(place, Step(ATTRIBUTE, name)):
            # Read from a class, a function is returned as it is; other descriptors compute what they return.
            as_it_is = type(found) is FunctionType
            step = Step(ATTRIBUTE, name) if as_it_is else Step(PART, functools.partial(stored_in_class, name))
            self.compare(place, step, How.IDENTICAL, found, shown, defines=True)
            for function in (getattr(found, "__func__", found), getattr(found, "fget", None)):
                if type(function) in _KEEPS_ARGUMENTS:
                    self.root(function, shown)
                if type(function) is FunctionType and is_user_file(function.__code__.co_filename):
                    code = Step(ATTRIBUTE, "__code__")
                    self.compare(
                        self.root(function, shown), code, How.SAME, function.__code__, shown, defines=True
                    )

    def holds(self, owner: Any, ask: Any, value: Any) -> Any:
        """Record and return ``value``, the result of ``ask(owner)``, such as a weak reference's target."""
        place = self.place(owner)
        self.found(place, Step(PART, ask), value, f"{place.name}()")
        return value

    def goes_on(self, value: Any) -> None:
        """Record that the step advances an object unseen, such as a compiled queue."""
        self._advanced.append((self.place(value), self._site))

    def says(self, owner: Any, ask: Any, value: Any, text: str) -> Any:
        """Record and return an object's answer to a query that can be repeated."""
        place = self.place(owner)
        self.part(place, ask, value, f"{place.name}.{text}")
        return value

    def held_by(self, value: Any) -> list[Any]:
        """Return the elements of a container that can be found again; none for other values."""
        return [] if value is UNKNOWN or not is_container(value) else [part for _, part in parts_of(value)]

    def item(self, owner: Any, key: Any) -> Any:
        """Return ``owner[key]`` of a builtin container, and record the read; UNKNOWN for other objects."""
        if owner is UNKNOWN or is_value(owner) or issubclass(type(owner), torch.Tensor):
            return UNKNOWN
        if not is_container(owner):
            self.use(owner)
            return UNKNOWN
        if is_array(owner) and owner.dtype.hasobject and is_key(key):
            return self._element(owner, key)
        getter = in_classes(type(owner).__mro__, "__getitem__")
        if not is_key(key) or is_array(owner) or getter not in _BUILTIN_ITEMS:
            self.use(owner)
            self.identity(key)
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

    def _element(self, array: Any, key: Any) -> Any:
        """Return an element of an object array, and record the read."""
        self.use(array)
        try:
            value = array[key]
        except (LookupError, TypeError):
            return UNKNOWN
        self._read(array, Step(ITEM, key), value)
        return value

    def has(self, owner: Any, key: Any) -> None:
        """Record ``key in owner``."""
        if owner is UNKNOWN or is_value(owner):
            return
        if not is_container(owner) or not is_key(key):
            self.use(owner)
            self.identity(key)
        elif not is_array(owner):
            place = self.place(owner)
            self.part(place, has_key(key), key in owner, f"{key!r} in {place.name}", key)
        else:
            self.use(owner)

    def size(self, owner: Any, *, truth: bool) -> None:
        """Record ``len(owner)``, or its truth value."""
        if owner is UNKNOWN or is_value(owner):
            return
        if not is_container(owner):
            self.use(owner)
            return
        place, read = self.place(owner), bool if truth and not is_array(owner) else len
        if is_array(owner):
            self.use(owner)
        else:
            self.part(place, read, read(owner), f"{read.__name__}({place.name})")


def _has(name: str, tensor: torch.Tensor) -> bool:
    return name in vars(tensor)


def _fact(name: str, tensor: torch.Tensor) -> Any:
    value = getattr(tensor, name)
    if name in _ANSWERED:
        return value()
    return value is not None if name in _THERE else value
