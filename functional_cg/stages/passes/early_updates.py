"""Order the update of a step leaf by leaf, so that each leaf may be updated as soon as its gradient is there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..program import Instr, Var
from .grouped import at_places, group_size

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
      instrs: Calls without side effects.
      results: What they are made for: new leaves in the order of the state.
    """
    leaves = [leaf for instr in instrs for leaf in _split(instr)]
    makers = {var: leaf for leaf in leaves for var in leaf.call.outputs()}
    latest: dict[Var, int] = {}
    for leaf in leaves:
        known = max((latest.get(var, var.index) for var in leaf.call.inputs()), default=-1)
        latest |= dict.fromkeys(leaf.call.outputs(), known)
    results = sorted(results, key=lambda var: latest.get(var, -1))
    done: dict[Leaf, None] = {}
    for result in (*results, *makers):
        front = [makers[result]] if result in makers else []
        while front:
            leaf = front[-1]
            missing = [makers[var] for var in leaf.call.inputs() if var in makers and makers[var] not in done]
            front += missing
            if not missing:
                done[front.pop()] = None
    return list(done)


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
