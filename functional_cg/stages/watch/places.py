"""Places on the host: what a step reads from, how to find it again, and what to compare there."""

from __future__ import annotations

import collections
import enum
import functools
import itertools
import operator
import types
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, cast

from ...pytree.sameness import same
from .evaluation import CODES, depths_of, instructions_of
from .kinds import is_key
from .values import in_classes, is_array, is_container

__all__ = [
    "ATTRIBUTE",
    "CELL",
    "GONE",
    "ITEM",
    "PART",
    "Entry",
    "How",
    "Memory",
    "Place",
    "Step",
    "parts_of",
]

ATTRIBUTE, ITEM, CELL, PART = (
    "{owner}.{name}",
    "{owner}[{key}]",
    "{owner}.__closure__[{key}].cell_contents",
    "{key}({owner})",
)
GONE = object()  # stands for an object that the step made
_PUTS = frozenset({"append", "insert", "setdefault", "update"})
_KINDS_WITH_PARTS: tuple[Any, ...] = (dict, types.MappingProxyType, list, tuple, collections.deque)


@dataclass(frozen=True, slots=True)
class Step:
    """One step: an attribute, an item by key, a closure cell by number, or the result of a function.

    Attributes:
      way: Template of the expression, in terms of owner and key.
    """

    way: str
    key: Any

    def read(self, owner: Any) -> Any:
        """Return the current value. Raises what reading it raises."""
        return eval(
            self.way.format(owner="owner", key="key", name=self.key), {"owner": owner, "key": self.key}
        )

    def shown(self, owner: str) -> str:
        """Return the expression as the user writes it."""
        if self.way is ATTRIBUTE:
            return f"{owner}.{self.key}"
        owner = owner.removesuffix("._modules")
        return f'{owner}["{self.key}"]' if type(self.key) is str else f"{owner}[{self.key!r}]"


@dataclass(slots=True, eq=False, weakref_slot=True)
class Place:
    """An object that is read from.

    Attributes:
      value: The object.
      name: How the user writes it, such as ``self.cfg``.
      owner: Where it was found; None for a root, which is always the same object.
      step: How it was found there.
      outlives: Whether it is known to be older than the step; otherwise the step may have made it.
    """

    value: Any
    name: str
    owner: Place | None = None
    step: Step | None = None
    outlives: bool = True

    def read(self) -> Any:
        """Return the object that is there now. Raises what reading it raises."""
        root, *places = self.way()
        return functools.reduce(lambda found, one: cast("Step", one.step).read(found), places, root.value)

    def way(self) -> list[Place]:
        """Return the places that lead here, from the root; there may be thousands, so no recursion."""
        way = [self]
        while way[-1].owner is not None:
            way.append(way[-1].owner)
        return way[::-1]

    @property
    def root(self) -> Place:
        return self.way()[0]


class How(enum.Enum):
    """How to compare a value with the old one: the source of a test for difference."""

    SAME = "{now} is not {old} and not same({now}, {old})"
    KIND = "type({now}) is not {old}"
    IDENTICAL = "{now} is not {old}"
    CONTENTS = "not {old}.is_in({now})"
    SHAPE = "not {old}.is_of({now})"
    ALIAS = "{old} is not {now}"  # what stands at another place


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One comparison made at each call.

    Attributes:
      owner: Where to read.
      step: What to read there; None for the object itself.
      how: How to compare it.
      old: What to compare it with: a value, a class, the contents of a container, another place.
      name: How the user writes what is read.
      defines: Whether it is part of a definition, such as a function or class: a message says that this was
        defined anew, and shows no values.
    """

    owner: Place
    step: Step | None
    how: How
    old: Any
    name: str
    defines: bool = False

    def read(self) -> Any:
        """Return the current value. Raises what reading it raises."""
        owner = self.owner.read()
        return owner if self.step is None else self.step.read(owner)

    def places(self) -> tuple[Place, ...]:
        """Return the places that it reads from."""
        return (self.owner, self.old) if self.how is How.ALIAS else (self.owner,)

    def compared(self) -> Sequence[Any]:
        """Return the objects that have to be the same ones."""
        if self.how is How.CONTENTS:
            return self.old.parts  # type: ignore[no-any-return]
        return (self.old,) if self.how is How.IDENTICAL else ()

    def agrees(self, now: Any) -> bool:
        """Whether the current value would bake the same constants as the old one."""
        old = self.old.read() if self.how is How.ALIAS else self.old
        return not eval(self.how.value.format(now="now", old="old"), {"same": same, "now": now, "old": old})


class Memory:
    """Which constants were found where a function remembers something: it, or one that calls it, also puts them there.

    Args:
      constants: Ids of the constants.

    Attributes:
      remembered: Ids of those that were found there.
    """

    def __init__(self, constants: Set[int]) -> None:
        self.remembered: set[int] = set()
        self._constants = constants
        self._containers: set[int] = set()  # that stand in such a place themselves

    def found(self, owner: Place, step: Step, value: Any, name: str, frame: FrameType | None) -> None:
        """Note a value that a function has read from a place."""
        if id(value) in self._constants or is_container(value):
            self.held(owner, value)
            while frame is not None and not self._is_filled(owner, step, name, frame):
                # Up to the frame that runs the trace: what is below belongs to the caller of the step.
                frame = frame.f_back if frame.f_code.co_name != "_run" else None
            if frame is not None:
                self._note(value)

    def held(self, owner: Place, value: Any) -> None:
        """Note an element of a container that is read as a whole."""
        if id(owner.value) in self._containers:
            self._note(value)

    def _note(self, value: Any) -> None:
        if id(value) in self._constants:
            self.remembered.add(id(value))
        elif is_container(value):
            self._containers.add(id(value))

    def _is_filled(self, owner: Place, step: Step, name: str, frame: FrameType) -> bool:
        stored = fills(frame.f_code)
        if not stored or step.way not in (ATTRIBUTE, ITEM, CELL):
            return False
        if step.way is not ITEM:
            return (ATTRIBUTE, step.key) in stored if step.way is ATTRIBUTE else (CELL, name) in stored
        if owner.value is frame.f_globals:
            return (CELL, step.key) in stored
        here, last = frame.f_locals, owner.name.rpartition(".")[2]
        called = [one for way, one in stored if way is ITEM]
        return any(one == last or here.get(one, frame.f_globals.get(one)) is owner.value for one in called)


@functools.lru_cache(maxsize=CODES)
def fills(code: CodeType) -> frozenset[tuple[str, str]]:
    """Return where a function puts something, as (way, name): of an attribute, a variable, a container of items."""
    instructions = instructions_of(code)
    depths = depths_of(code)
    found = set()
    for number, one in enumerate(instructions):
        before = instructions[number - 1]
        if one.opname == "STORE_ATTR":
            found.add((ATTRIBUTE, one.argval))
        elif one.opname in ("STORE_GLOBAL", "STORE_DEREF"):
            found.add((CELL, one.argval))
        elif one.opname in ("LOAD_METHOD", "LOAD_ATTR") and one.argval in _PUTS:
            found.add((ITEM, str(before.argval)))
        elif one.opname == "STORE_SUBSCR" and one.offset in depths:
            # The last instruction to leave the container on top of the stack: what follows has pushed the key.
            top = depths[one.offset] - 1
            pairs = reversed(list(itertools.pairwise(instructions[: number + 1])))
            loaded = next((ins for ins, after in pairs if depths.get(after.offset) == top), None)
            found.add((ITEM, str(loaded and loaded.argval)))
    return frozenset(found)


def parts_of(held: Any) -> list[tuple[Step, Any]]:
    """Return the elements of a container with the steps to them; none for a set, which has no such steps."""
    if is_array(held) and held.dtype.hasobject:
        parts = enumerate(held.ravel().tolist())
        return [(Step(PART, operator.methodcaller("item", number)), part) for number, part in parts]
    kind = next((one for one in _KINDS_WITH_PARTS if issubclass(type(held), one)), None)
    if kind is None:
        return []
    pairs = kind.items(held) if hasattr(kind, "items") else enumerate(kind.__iter__(held))
    return [(_item(held, kind, key), part) for key, part in pairs if is_key(key)]


def _item(held: Any, kind: type[Any], key: Any) -> Step:
    """Return the step to an element as it is stored, past a class that gives out something else."""
    if in_classes(type(held).__mro__, "__getitem__") is kind.__getitem__:
        return Step(ITEM, key)
    return Step(PART, functools.partial(_stored, kind.__getitem__, key))


def _stored(getter: Callable[[Any, Any], Any], key: Any, held: Any) -> Any:
    return getter(held, key)
