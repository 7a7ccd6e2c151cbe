"""How many bytes a capture takes from the device at once, so that its temporaries leave few gaps.

torch's allocator takes a segment of its own for each large value that fits into no free block, and never joins two
segments. Values of several sizes that live as long as a pipeline's activations leave a quarter of that memory unused.
Of one large segment the allocator cuts blocks, and joins those that are free again; walls keep parts of it apart. How
many gaps are left then changes with each MiB of a part, and for no simple reason: the best is searched for, by a
simulation.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

import torch
from torch import Tensor

from ...concurrency.garbage import no_garbage_collection
from ..branches.units import Memory
from ..plan import AtenPlan, Plan
from .allocations import LARGE, Event, events, highest, multiplies

__all__ = ["AtOnce", "at_once", "taken"]

_MIB = 2**20
_UNIT = 2 * _MIB  # of a segment
_MIDDLE = 10 * _MIB  # below which values lie in segments of 20 MiB
_WALL = LARGE + 512  # the smallest block that lies among large ones
_LEAST = 32 * _MIB  # of temporaries that are worth it
_ENOUGH = 1.01  # of the bytes that live at most: what is taken then is not tried further
_TRIED = 600_000  # events, if each try had all of them; some 0.1 s
_PARTS, _PART = 3, 2 * _UNIT  # at most; and the bytes of one at least: with a wall, it is large
_DRAWN = (0.985, 1.03)  # of the bytes that live at most
_DRAWS = 12  # tries that are drawn before the best is changed
_AGAIN = 0.3  # of tries after that are drawn, too, rather than the best so far, changed


@dataclass(frozen=True, slots=True)
class AtOnce:
    """What a capture takes at once.

    Attributes:
      parts: Bytes of the parts of a segment; each but the last ends with a wall.
      workspace: Whether to take cuBLAS's workspace before, which else would lie in the way until the end.
    """

    parts: tuple[int, ...] = ()
    workspace: bool = False

    def take(self, device: torch.device) -> list[Tensor]:
        """Take it for the capture that has begun, if there is room; return the walls, to be kept until its end."""
        if not self.parts:
            return []

        def new(size: int) -> Tensor:
            return torch.empty(size, dtype=torch.uint8, device=device)

        if self.workspace:
            torch.cuda.current_blas_handle()
        try:
            new(sum(self.parts))
        except torch.OutOfMemoryError:
            return []  # where there is no room for one segment, there may be for smaller ones
        blocks = [new(size) for part in self.parts[:-1] for size in (part - _WALL, _WALL)]
        return blocks[1::2]


@dataclass(eq=False, slots=True)
class _Block:
    start: int
    size: int
    before: _Block | None = None
    after: _Block | None = None
    free: bool = True


@no_garbage_collection()
def at_once(plan: Plan) -> AtOnce:
    """Return what to take at once for the large temporaries of a plan; nothing if that is unknown, or not worth it."""
    if plan.compiled or not isinstance(plan, AtenPlan) or plan.temporaries:  # lanes share no memory
        return AtOnce()
    found = events(plan)
    return AtOnce(_best(found), multiplies(plan)) if highest(found) >= _LEAST else AtOnce()


def _best(found: Sequence[Event]) -> tuple[int, ...]:
    """Return the parts with which least is taken, of those that are tried."""
    peak, draw = highest(found), Random(0)
    least, best = taken(found), tuple[int, ...]()
    for number in range(_TRIED // len(found)):
        if least <= peak * _ENOUGH:
            break
        if best and number >= _DRAWS and draw.random() > _AGAIN:
            tried = _changed(best, draw)
        else:
            tried = _drawn(peak, 1 + number % _PARTS, draw)
        if sum(tried) < least and (total := taken(found, tried, least)) < least:
            least, best = total, tried
    return best


def _drawn(peak: int, count: int, draw: Random) -> tuple[int, ...]:
    """Return parts that are about as large together as what lives at most."""
    whole = peak * draw.uniform(*_DRAWN)
    cuts = [0.0, *sorted(draw.uniform(0.05, 0.95) for _ in range(count - 1)), 1.0]
    return tuple(max(_whole(int(whole * (end - start)), _UNIT), _PART) for start, end in pairwise(cuts))


def _changed(parts: tuple[int, ...], draw: Random) -> tuple[int, ...]:
    """Return parts of which one or two are somewhat larger or smaller."""
    changed = [*parts]
    for _ in range(draw.choice((1, 1, 2))):
        number = draw.randrange(len(changed))
        step = _UNIT << draw.randrange(6)
        changed[number] = max(changed[number] + draw.choice((-step, step)), _PART)
    return tuple(changed)


def taken(found: Sequence[Event], first: Sequence[int] = (), limit: float = math.inf) -> int:
    """Return the bytes that torch's allocator takes from the device: segments, of which it cuts the best fit.

    Args:
      found: What is allocated and freed.
      first: Bytes of the parts of a segment that is there before.
      limit: From which on it does not matter how many more: some number that is not below it is returned.
    """
    total, blocks = 0, dict[Memory, _Block]()
    free: list[tuple[int, int, _Block]] = []

    def segment(size: int, wall: int = 0) -> None:
        nonlocal total
        insort(free, (size - wall, total, _Block(total, size - wall)))
        total += size

    def joined(block: _Block, behind: _Block) -> _Block:
        """Return two blocks that lie side by side as one."""
        block.size += behind.size
        block.after = behind.after
        if behind.after is not None:
            behind.after.before = block
        return block

    def take_out(block: _Block) -> None:
        del free[bisect_left(free, (block.size, block.start))]

    for number, part in enumerate(first, 1):
        segment(part, _WALL if number < len(first) else 0)
    for storage, size in found:
        if size < 0:
            block = blocks.pop(storage)
            behind, ahead = block.after, block.before
            if behind is not None and behind.free:
                take_out(behind)
                joined(block, behind)
            if ahead is not None and ahead.free:
                take_out(ahead)
                block = joined(ahead, block)
            block.free = True
            insort(free, (block.size, block.start, block))
            continue
        size = _whole(size, 512)
        at = bisect_left(free, (size,))
        if at == len(free):
            segment(20 * _MIB if size < _MIDDLE else _whole(size, _UNIT))
            if total >= limit:
                return total
            at = bisect_left(free, (size,))
        _, _, block = free.pop(at)
        if block.size - size > LARGE:
            rest = _Block(block.start + size, block.size - size, block, block.after)
            if block.after is not None:
                block.after.before = rest
            block.after, block.size = rest, size
            insort(free, (rest.size, rest.start, rest))
        block.free = False
        blocks[storage] = block
    return total


def _whole(size: int, of: int) -> int:
    return -(-size // of) * of
