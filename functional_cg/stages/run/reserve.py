"""How many bytes a capture takes from the device at once, so that its temporaries leave few gaps.

torch's allocator takes a segment of its own for each large value that fits into no free block, and never joins two
segments. Values of several sizes that live as long as a pipeline's activations leave a quarter of that memory unused.
Of a few large segments the allocator cuts blocks, and joins those that are free again. How many gaps are left then
changes with each MiB of a segment, and for no simple reason: the best sizes are searched for, by a simulation.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise, permutations
from random import Random

from ...concurrency.garbage import no_garbage_collection
from ..branches.listing import Timeline
from ..branches.units import GIVEN, Memory
from ..plan import Plan
from ..program import Instr
from ..sub_programs import SubProgram, each_once
from ..work import beside, flops_of

__all__ = ["Event", "at_once", "events", "highest", "taken"]

Event = tuple[Memory, int]  # memory, and its bytes: negative where it is freed

_MIB = 2**20
_LARGE = _MIB  # above which a value lies in a segment for large ones
_UNIT = 2 * _MIB  # of a segment
_MIDDLE = 10 * _MIB  # below which values lie in segments of 20 MiB
_LEAST = 32 * _MIB  # of temporaries that are worth it
_ENOUGH = 1.01  # of the bytes that live at most: what is taken then is not tried further
_SIZES = (0.95, 1.05)  # of the bytes that live at most: between them the sizes are tried
_SEGMENTS = 3  # at most
_SIMULATED = 600_000  # events of all tries together, at most
_VARIED = 0.6  # of the tries: the best so far, with one segment up to so many units smaller or larger
_UNITS = 64
_BESIDE = -1  # in place of memory: what a kernel takes while it runs


@no_garbage_collection()
def at_once(plan: Plan) -> tuple[Sequence[int], bool]:
    """Return the bytes of segments to take for the large temporaries of a plan, and whether it multiplies matrices.

    With these segments least is taken, of those that are tried; there are none where temporaries are unknown, or few.
    """
    if plan.compiled or plan.temporaries:  # lanes share no memory
        return [], False
    found = events(plan)
    peak, draw = highest(found), Random(0)
    if peak < _LEAST:
        return [], False
    least, best = taken(found), list[int]()
    for number in range(_SIMULATED // len(found)):
        if least <= peak * _ENOUGH:
            break
        if best and draw.random() < _VARIED:
            tried = [*best]
            tried[draw.randrange(len(best))] += draw.choice((-_UNIT, _UNIT)) * draw.randint(1, _UNITS)
        else:
            whole = peak * draw.uniform(*_SIZES)
            cuts = sorted(draw.uniform(0, whole) for _ in range(number % _SEGMENTS))
            tried = [_whole(int(end - start), _UNIT) for start, end in pairwise([0, *cuts, whole])]
        tried = [max(size, _MIDDLE) for size in tried]
        # Of two gaps of one size the lower is cut, and the driver may place a segment above or below the others.
        total = 0
        for order in permutations(tried):
            total = max(total, taken(found, order, least))
            if total >= least:
                break
        else:
            least, best = total, tried
    return best, any(map(flops_of, each_once([*plan.schedule.head, *plan.schedule.fused])))


def taken(found: Sequence[Event], first: Iterable[int] = (), limit: float = math.inf) -> int:
    """Return the bytes that torch's allocator takes from the device: segments, of which it cuts the best fit.

    Args:
      found: What is allocated and freed.
      first: Bytes of the segments that are there before, in the order of their addresses.
      limit: From which on it does not matter how many more: some number that is not below it is returned.
    """
    total, blocks = 0, dict[Memory, tuple[int, int]]()
    # The gaps: their sizes and starts, in order; and their sizes by where they start and end.
    gaps: list[tuple[int, int]] = []
    starting, ending = dict[int, int](), dict[int, int]()

    def segment(size: int) -> None:
        nonlocal total
        add(2 * total, size)  # apart from all others, with which it is never joined
        total += size

    def add(start: int, size: int) -> None:
        insort(gaps, (size, start))
        starting[start] = ending[start + size] = size

    def remove(start: int, size: int) -> None:
        del gaps[bisect_left(gaps, (size, start))], starting[start], ending[start + size]

    for size in first:
        segment(size)
    if total >= limit:
        return total
    for memory, size in found:
        if size < 0:
            start, size = blocks.pop(memory)
            behind, ahead = starting.get(start + size, 0), ending.get(start, 0)
            if behind:
                remove(start + size, behind)
            if ahead:
                remove(start - ahead, ahead)
            add(start - ahead, ahead + size + behind)
            continue
        size = _whole(size, 512)
        if not gaps or gaps[-1][0] < size:
            segment(20 * _MIB if size < _MIDDLE else _whole(size, _UNIT))
            if total >= limit:
                return total
        gap, start = gaps[bisect_left(gaps, (size,))]
        remove(start, gap)
        if gap - size > _LARGE:
            add(start + size, gap - size)
            gap = size
        blocks[memory] = start, gap
    return total


def _whole(size: int, of: int) -> int:
    return -(-size // of) * of


def events(plan: Plan) -> list[Event]:
    """Return when a plan allocates and frees its large temporaries, in order; not the workspace of products."""
    inside = {
        sub_program: list(_along(line, {}, dict.fromkeys((var.storage for var in sub_program.given), 0)))
        for sub_program, line in plan.sub_programs.items()
    }
    return list(_along(plan.timeline, inside, {}))


def highest(found: Sequence[Event]) -> int:
    """Return the most bytes that live at one time."""
    return max(accumulate(size for _, size in found), default=0)


def _along(
    timeline: Timeline, inside: Mapping[SubProgram, Sequence[Event]], alive: dict[Memory, int]
) -> Iterator[Event]:
    """Yield what units allocate and free.

    Args:
      timeline: The units.
      inside: What sub-programs allocate and free; what they are given they free with 0 bytes.
      alive: The memory that is there, with its bytes.
    """
    handed: Collection[Memory] = ()
    for place in timeline.places:
        unit = timeline.units[place.unit]
        if unit.call is not None and isinstance(unit.call.op, SubProgram):
            yield from _again(unit.call, inside[unit.call.op], handed, alive)
        else:
            large = {memory: size for memory, size in unit.made.items() if size > _LARGE}
            yield from large.items()
            alive |= large
            if unit.call is not None and (size := beside(unit.call)) > _LARGE:
                yield from ((_BESIDE, size), (_BESIDE, -size))
        handed = place.frees if GIVEN in unit.writes else ()
        for memory in () if handed or unit.commits else place.frees:
            if memory in alive:
                yield memory, -alive.pop(memory)


def _again(
    instr: Instr, inside: Sequence[Event], handed: Collection[Memory], alive: dict[Memory, int]
) -> Iterator[Event]:
    """Yield what a call of a sub-program allocates and frees: its function frees what is handed over to it.

    Args:
      instr: The call.
      inside: What the sub-program allocates and frees.
      handed: The memory that nobody else holds.
      alive: As for :func:`_along`.
    """
    sub_program, (given, _, later) = instr.op, instr.args
    lies = {mine.storage: var.storage for mine, var in zip(sub_program.results, instr.out, strict=True)}
    lies |= {mine.storage: var.storage for mine, var in zip(sub_program.given, given, strict=True)}
    last = {lies[one]: number for number, (one, size) in enumerate(inside) if not size}
    for number, (one, size) in enumerate(inside):
        if one not in lies:
            yield (one if one == _BESIDE else one + later), size
        elif size:
            alive[lies[one]] = size
            yield lies[one], size
        elif lies[one] in handed and lies[one] in alive and last[lies[one]] == number:
            yield lies[one], -alive.pop(lies[one])
