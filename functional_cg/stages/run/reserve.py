"""How many bytes a capture takes from the device at once, so that its temporaries leave few gaps.

torch's allocator takes a segment of its own for each large value that fits into no free block, and never joins two
segments. Values of several sizes that live as long as a pipeline's activations leave a quarter of that memory unused.
Of one large segment the allocator cuts blocks, and joins those that are free again.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

from ...concurrency.garbage import no_garbage_collection
from ..plan import AtenPlan, ExecutionPlan
from .allocations import LARGE, Event, events, highest

__all__ = ["at_once", "taken"]

_MIB = 2**20
_MIDDLE = 10 * _MIB  # below which values lie in segments of 20 MiB
_LEAST = 32 * _MIB  # of temporaries that are worth it
# Of the bytes that live at most, which are tried; best first for pipelines of Llama's blocks.
_SHARES = (
    1.0,
    1.006,
    0.976,
    1.02,
    0.956,
    1.04,
    0.922,
    1.032,
    0.988,
    1.01,
    0.97,
    1.018,
    0.9,
    1.05,
    0.864,
    0.944,
)
_TRIED = 70_000  # events at most, or one share: some 20 ms
_ENOUGH = 1.01  # of them: what is taken then is not tried further


@dataclass(eq=False, slots=True)
class _Block:
    start: int
    size: int
    before: _Block | None = None
    after: _Block | None = None
    free: bool = True


@no_garbage_collection()
def at_once(plan: ExecutionPlan) -> int:
    """Return the bytes to take at once for the large temporaries of a plan; 0 if that is unknown, or not worth it."""
    if not isinstance(plan, AtenPlan) or plan.temporaries:  # lanes share no memory
        return 0
    found = events(plan)
    peak = highest(found)
    if peak < _LEAST:
        return 0
    least, best = taken(found), 0
    for share in _SHARES[: max(_TRIED // len(found), 1)]:
        size = int(peak * share)
        if (total := taken(found, size, least)) < least:
            least, best = total, size
        if least <= peak * _ENOUGH:
            break
    return best


def taken(found: Sequence[Event], first: Sequence[int] = (), limit: float = math.inf) -> int:
    """Return the bytes that torch's allocator takes from the device: segments, of which it cuts the best fit.

    Args:
      found: What is allocated and freed.
      first: Bytes of segments that are there before.
      limit: From which on it does not matter how many more: some number that is not below it is returned.
    """
    total, blocks = 0, dict[int, _Block]()
    free: list[tuple[int, int, _Block]] = []

    def segment(size: int) -> None:
        nonlocal total
        insort(free, (size, total, _Block(total, size)))
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

    for one in first:
        segment(_whole(one, 2 * _MIB))
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
            segment(20 * _MIB if size < _MIDDLE else _whole(size, 2 * _MIB))
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
