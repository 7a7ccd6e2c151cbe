"""Order the update of a step leaf by leaf, so that each leaf may be updated as soon as its gradient is there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..passes.changes import behind_needs
from ..passes.fused import at_places, group_size
from ..program import Instr, Var

__all__ = ["Leaf", "by_leaf", "joined"]


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """A call of the update.

    Attributes:
      call: The call; of a call on lists, what it does at one place.
      whole: The call on lists, if it is part of one.
      place: The place.
    """

    call: Instr
    whole: Instr | None = None
    place: int = 0


def by_leaf(instrs: Sequence[Instr], results: Iterable[Var]) -> list[Leaf]:
    """Return calls in the order in which their gradients are made; calls on lists are split.

    Args:
      instrs: Calls, without views, that write nothing in place.
      results: What they are made for: new leaves in the order of the state.
    """
    leaves = [leaf for instr in instrs for leaf in _split(instr)]
    makers: dict[int, Leaf] = {}  # by storage: a call may read a view of what another one makes
    latest: dict[int, int] = {}
    for leaf in leaves:
        known = max((latest.get(var.storage, var.index) for var in leaf.call.inputs()), default=-1)
        for var in leaf.call.outputs():
            makers[var.storage], latest[var.storage] = leaf, known
    goals = sorted((var.storage for var in results), key=lambda storage: latest.get(storage, -1))

    def needs(leaf: Leaf) -> list[Leaf]:
        return [makers[var.storage] for var in leaf.call.inputs() if var.storage in makers]

    return behind_needs((makers[goal] for goal in (*goals, *makers) if goal in makers), needs)


def _split(instr: Instr) -> Iterator[Leaf]:
    size = group_size(instr)
    if not size:
        yield Leaf(instr)
    for place in range(size):
        yield Leaf(at_places(instr, [place]), instr, place)


def joined(leaves: Sequence[Leaf]) -> list[Instr]:
    """Return the calls, those that are parts of one call on lists as one call, at the place of the last."""
    places: dict[Instr, list[int]] = {}
    last: dict[Instr, Leaf] = {}
    for leaf in leaves:
        if leaf.whole is not None:
            places.setdefault(leaf.whole, []).append(leaf.place)
            last[leaf.whole] = leaf
    return [
        leaf.call if leaf.whole is None else at_places(leaf.whole, places[leaf.whole])
        for leaf in leaves
        if leaf.whole is None or last[leaf.whole] is leaf
    ]
