"""The host watch: at each call, compare the host values that the step's Python reads.

A graph bakes these values in. One generated function reads them again at each call and compares by identity
first (0.02 to 0.05 µs per value, ``python -m tests.bench.watch``). So a change raises before anything
is launched, and never replays a stale number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import torch

from ...ambient.torch_modes import TORCH_MODES, modes_now, unchanged_modes
from ...errors import BakedValueError
from ...pytree.sameness import same
from .places import ATTRIBUTE, Entry, How, Place, Step
from .values import DEFINED, LOST, Contents, Excerpt, Said, excerpts, is_container, shown

__all__ = ["HostWatch", "refusal"]

_MODES = tuple(mode.name for mode in TORCH_MODES)
_FIRST = 4  # values that a message shows before what they change in the step


class HostWatch:
    """Host values as they were when the watch was made.

    Args:
      entries: What is compared at each call, beside the modes of torch.
      counting: Which modes of torch count beside those that always do: "autocast" if the step turns it on itself,
        "halves" if it computes in half precision.

    Attributes:
      unchanged: Returns whether no value and no mode has changed. Values of one type count as unchanged if
        they are equal, floats if their bits are equal; a name that no longer exists counts as changed.
    """

    __slots__ = ("_counting", "_entries", "_modes", "unchanged")

    def __init__(self, entries: Sequence[Entry] = (), counting: Collection[str] = ()) -> None:
        self._entries, self._modes = tuple(entries), modes_now()
        self._counting = {"always", "around", *counting}
        self.unchanged: Callable[[], bool] = _comparison(
            self._entries, *unchanged_modes(self._modes, self._counting)
        )

    def names(self) -> tuple[str, ...]:
        """Return the watched values as the user writes them."""
        values = (How.SAME, How.CONTENTS, How.IDENTICAL)
        return tuple(
            dict.fromkeys(entry.name for entry in self._entries if entry.how in values and not entry.defines)
        )

    @property
    def identical(self) -> set[int]:
        """Ids of the objects that are compared by identity."""
        return {id(one) for entry in self._entries for one in entry.compared()}

    def differences(self) -> list[tuple[str, object, object]]:
        """Return (name, old, new) for each value that has changed."""
        read = [(entry, _read(entry)) for entry in self._entries]
        changed = [(entry, now) for entry, now in read if now is LOST or not entry.agrees(now)]
        rows = [(entry.name, *_sides(entry, now)) for entry, now in changed if not entry.defines]
        redefined = dict.fromkeys(
            name for entry, now in changed if entry.defines for name in _redefined(entry, now)
        )
        return rows + [(name, DEFINED, Said("defined anew")) for name in redefined]

    def other_modes(self) -> list[tuple[str, object, object]]:
        """Return (name, old, new) for each mode of torch that has changed and counts."""
        rows = zip(TORCH_MODES, self._modes, modes_now(), strict=True)
        return [
            (mode.name, old, new) for mode, old, new in rows if mode.counts in self._counting and old != new
        ]

    def let_go(self) -> None:
        """Forget the objects on the way to what is compared: a program that replaces them needs them no more."""
        for entry in self._entries:
            for place in entry.places():
                for one in place.way()[1:]:
                    one.value = None


def refusal(
    function: str, changed: Sequence[tuple[str, object, object]], then: Sequence[str] = ()
) -> BakedValueError:
    """Return the error for host values that have changed.

    Args:
      function: Name of the user's function.
      changed: (name, old, new) of each.
      then: What the step does otherwise now, in rows.
    """
    rows = [f"{name}  traced {shown(old)}   now {shown(new)}" for name, old, new in changed]
    return BakedValueError.of(
        function,
        "reads a Python value that the graph has baked in, and that has changed since; the state is unchanged.",
        rows=[*rows[:_FIRST], *then, *rows[_FIRST:]],
        why="Replay repeats kernels, not Python: it would go on with the old value.",
        fix=_fix(*changed[0][:2]),
    )


def _fix(name: str, old: object) -> str:
    if isinstance(old, torch.Tensor):
        return (
            f"a declared constant stays the tensor that it was at the first call: pass `{name}` as an input, keep it "
            "in the state, or make another step."
        )
    if old is DEFINED:
        return f"make the step anew, `graph_step(fn)`: its graph has the old `{name}` in it."
    if name in _MODES:
        return "set the mode before the first call and leave it; for another one make another step."
    if name.endswith(".training"):
        return "make one step for training and one for evaluation; each is captured in its own mode."
    if name.endswith(")") or " in " in name:
        return "make the step anew, `graph_step(fn)`; or decide by an argument that is named in `static_argnames`."
    if isinstance(old, Excerpt):
        return (
            f"pass what is read of `{name}` in the batch, or keep it in the state; else make the step anew."
        )
    argument = name.rpartition(".")[2] if name.rpartition(".")[2].isidentifier() else "name"
    return (
        f"pass `{name}` in the batch (a Python number in the inputs is live) or keep it in the state; if it seldom "
        f'changes, make it an argument of its own and name it in `static_argnames=("{argument}",)`.'
    )


def _read(entry: Entry) -> object:
    try:
        return entry.read()
    except Exception:  # a user's object may raise anything; the value counts as gone
        return LOST


def _redefined(entry: Entry, now: object) -> list[str]:
    """Return the names of what was defined anew: of a class, each method and property."""
    if entry.how is not How.SHAPE or now is LOST:
        return [entry.name]
    return [f"{entry.name}.{name}" for name in entry.old.changed(now)]


def _sides(entry: Entry, now: object) -> tuple[object, object]:
    """Return the old and the new side of a change, as a message shows them."""
    if entry.how is How.CONTENTS:
        old, new = excerpts(entry.old, Contents(now) if is_container(now) else entry.old)
        return old, new if is_container(now) else now
    if now is LOST:
        return (entry.old if entry.how is not How.ALIAS else Said(f"`{entry.old.name}`")), now
    match entry.how:
        case How.KIND:
            return entry.old, type(now)
        case How.ALIAS:
            return Said(f"the same object as `{entry.old.name}`"), Said("another one")
    return entry.old, now


def _comparison(entries: Sequence[Entry], modes: str, names: dict[str, Any]) -> Callable[[], bool]:
    """Generate the function that reads all modes and entries again and compares them.

    An object from which several values are read is looked up once.

    Args:
      entries: What to compare.
      modes: The source of the test of the modes.
      names: The names in that source.
    """
    names["same"] = same
    lines = [f"if not ({modes}): return False"]
    known: dict[Any, str] = {}

    def named(value: object) -> str:
        text = f"k{len(names)}"
        names[text] = value
        return text

    def at(owner: str, step: Step) -> str:
        where = owner, step.way, type(step.key), step.key
        if where not in known:
            key = step.key if step.way is ATTRIBUTE else named(step.key)
            known[where] = f"p{len(known)}"
            lines.append(f"{known[where]} = {step.way.format(owner=owner, key=key, name=key)}")
        return known[where]

    def variable(place: Place) -> str:
        root, *places = place.way()
        if root not in known:
            known[root] = named(root.value)
        return functools.reduce(at, (cast("Step", one.step) for one in places), known[root])

    for entry in entries:
        now = variable(entry.owner)
        if entry.step is not None:
            now = at(now, entry.step)
        old = variable(entry.old) if entry.how is How.ALIAS else named(entry.old)
        lines.append(f"if {entry.how.value.format(now=now, old=old)}: return False")
    body = "".join(f"        {line}\n" for line in lines)
    source = f"def unchanged():\n    try:\n{body}        return True\n    except Exception:\n        return False\n"
    exec(compile(source, "<functional_cg watch>", "exec"), names)
    return cast("Callable[[], bool]", names["unchanged"])
