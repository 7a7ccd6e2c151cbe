"""How many bytes a capture takes from the device at once, so that its temporaries leave few gaps.

torch's allocator takes a segment of its own for each large value that fits into no free block, and never joins two
segments. Values of several sizes that live as long as a pipeline's activations leave a quarter of that memory unused.
Of one large segment the allocator cuts blocks, and joins those that are free again. How many gaps are left then changes
with each MiB of the segment, and for no simple reason: the best size is searched for, by a simulation.
"""

from __future__ import annotations

import contextlib
import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...concurrency.garbage import no_garbage_collection
from ..branches.units import Memory
from ..plan import Plan
from .allocations import LARGE, Event, events, highest, multiplies

__all__ = ["AtOnce", "at_once", "taken"]

_MIB = 2**20
_UNIT = 2 * _MIB  # of a segment
_MIDDLE = 10 * _MIB  # below which values lie in segments of 20 MiB
_LEAST = 32 * _MIB  # of temporaries that are worth it
_ENOUGH = 1.01  # of the bytes that live at most: what is taken then is not tried further
_SMALLEST = 0.985  # of the bytes that live at most: the size that is tried first
_TRIES = 120


@dataclass(frozen=True, slots=True)
class AtOnce:
    """What a capture takes at once.

    Attributes:
      nbytes: Bytes of a segment.
      workspace: Whether to take cuBLAS's workspace before, which else would lie in the way until the end.
    """

    nbytes: int = 0
    workspace: bool = False

    def take(self, device: torch.device) -> None:
        """Take it for the capture that has begun, if there is room; where there is none, there may be for less."""
        if self.nbytes:
            if self.workspace:
                torch.cuda.current_blas_handle()
            with contextlib.suppress(torch.OutOfMemoryError):
                torch.empty(self.nbytes, dtype=torch.uint8, device=device)


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
    if plan.compiled or plan.temporaries:  # lanes share no memory
        return AtOnce()
    found = events(plan)
    return AtOnce(_best(found), multiplies(plan)) if highest(found) >= _LEAST else AtOnce()


def _best(found: Sequence[Event]) -> int:
    """Return the bytes with which least is taken, of those that are tried."""
    peak, least, best = highest(found), taken(found), 0
    start = _whole(int(peak * _SMALLEST), _UNIT)
    for size in range(start, least, _whole((least - start) // _TRIES + 1, _UNIT)):
        if size >= least or least <= peak * _ENOUGH:
            break
        if (total := taken(found, size, least)) < least:
            least, best = total, size
    return best


def taken(found: Sequence[Event], first: int = 0, limit: float = math.inf) -> int:
    """Return the bytes that torch's allocator takes from the device: segments, of which it cuts the best fit.

    Args:
      found: What is allocated and freed.
      first: Bytes of a segment that is there before.
      limit: From which on it does not matter how many more: some number that is not below it is returned.
    """
    total, blocks = 0, dict[Memory, _Block]()
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

    if first:
        segment(first)
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
