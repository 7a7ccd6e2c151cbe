"""Find where a program repeats itself, and where it may be cut there without making its kernels slower.

Layers of a network make the same calls one layer after another, forward and backward. A stretch that repeats may be cut
anywhere in its period. It is cut just before a matrix product, convolution or attention: no compiler fuses those with
their arguments, so what they read is in memory in any case. Among these places, the cheapest one is taken: where the
fewest bytes are read again or stored because of the cut.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from ..passes.equal_calls import frozen, frozen_call
from ..passes.min_cut import is_fused
from ..program import Instr, Var
from ..work import bytes_of, flops_of

__all__ = ["cuts"]

_SHORTEST = 8  # calls of a period: a function takes a second to compile, however few calls it has
_LOSS = 0.01  # of the bytes that a period moves: what cutting may cost
_TRIED = 64  # places to cut at in a period without products, such as an update


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Calls that repeat with a period, from ``start`` up to ``end``."""

    start: int
    end: int
    period: int

    @property
    def saved(self) -> int:
        return self.end - self.start - self.period


def cuts(instrs: Sequence[Instr]) -> list[int]:
    """Return the places in front of which calls are cut, in order, so that most parts are equal to others.

    Args:
      instrs: The calls.
    """
    found: list[int] = []
    free = [True] * len(instrs)
    for stretch in sorted(_stretches(_kinds(instrs)), key=lambda one: (-one.saved, one.start)):
        if all(free[stretch.start : stretch.end]):
            free[stretch.start : stretch.end] = [False] * (stretch.end - stretch.start)
            found += _cheapest(instrs, stretch)
    return sorted(found)


def _kinds(instrs: Sequence[Instr]) -> list[int]:
    """Number the calls: equal numbers for calls that are equal but for which variables they read and make."""
    numbers: dict[Hashable, int] = {}

    def spec(var: Var) -> Hashable:
        return var.spec

    def kind(instr: Instr) -> Hashable:
        return frozen_call(instr, spec), frozen([instr.out, instr.writes], spec)

    return [numbers.setdefault(kind(instr), len(numbers)) for instr in instrs]


def _stretches(kinds: Sequence[int]) -> Iterator[_Stretch]:
    """Yield stretches with a period, by comparing windows of 8, 16, 32, ... calls: O(n log n) in all.

    A period is found by windows that are at most as long as it is, but longer than its half.
    """
    ranks, width = list(kinds), 1
    while 2 * width <= len(kinds):
        if width >= _SHORTEST:
            yield from _with_windows(ranks, width)
        pairs: dict[tuple[int, int], int] = {}
        ranks = [
            pairs.setdefault(pair, len(pairs)) for pair in zip(ranks[:-width], ranks[width:], strict=True)
        ]
        width *= 2


def _with_windows(ranks: Sequence[int], width: int) -> Iterator[_Stretch]:
    last: dict[int, int] = {}
    start = period = 0
    for place, rank in enumerate((*ranks, -1)):
        gap = place - last.get(rank, place)
        last[rank] = place
        if gap != period:
            if width <= period < 2 * width:
                yield _Stretch(start - period, place - 1 + width, period)
            start, period = place, gap


def _cheapest(instrs: Sequence[Instr], stretch: _Stretch) -> Iterator[int]:
    """Yield where to cut a stretch; nowhere if each place costs too much."""
    first, period = stretch.start, stretch.period
    middle = (
        first + (stretch.end - first) // period // 2 * period
    )  # not at an end, where neighbours are others
    middle = min(middle, stretch.end - period)
    places = [place for place in range(middle, middle + period) if flops_of(instrs[place])]
    places = places or list(range(middle, middle + period, -(-period // _TRIED)))
    losses = {place: _lost(instrs, place, period) for place in places}
    best = min(places, key=lambda place: (losses[place], _handed_on(instrs, place, period)))
    used = {var for instr in instrs[first : stretch.end] for var in instr.inputs()}
    moved = sum(bytes_of(one, used) for one in instrs[middle : middle + period] if not one.is_view)
    if losses[best] <= _LOSS * moved:
        yield from range(first + (best - first) % period, stretch.end, period)


def _handed_on(instrs: Sequence[Instr], place: int, period: int) -> int:
    """Return the bytes that the calls of a period in front of a place make for the calls of a period behind it."""
    made = {
        var.storage: var.spec.nbytes
        for instr in instrs[max(place - period, 0) : place]
        if not instr.is_view
        for var in instr.outputs()
    }
    read = {var.storage for instr in instrs[place : place + period] for var in instr.inputs()}
    return sum(size for storage, size in made.items() if storage in read)


def _lost(instrs: Sequence[Instr], place: int, period: int) -> int:
    """Return the bytes that a cut in front of a call may cost: what fused kernels would have had in registers."""
    before = instrs[max(place - period, 0) : place]
    after = instrs[place : place + period]
    in_memory = {var.storage for instr in after if not is_fused(instr) for var in instr.inputs()}
    in_memory |= {var.storage for instr in before if not is_fused(instr) for var in instr.inputs()}
    near = {
        var.storage: var
        for instr in before
        if is_fused(instr) and not instr.is_view
        for var in instr.outputs()
    }
    later = set[int]()  # what waits for a call that nothing is fused with
    lost: dict[int, int] = {}
    for instr in after:
        if not is_fused(instr) or not later.isdisjoint(var.storage for var in instr.inputs()):
            later.update(var.storage for var in instr.outputs())
        elif not instr.is_view:
            for var in instr.inputs():
                if var.storage in near:
                    size = near[var.storage].spec.nbytes
                    lost[var.storage] = size if var.storage in in_memory else 2 * size
    return sum(lost.values())
