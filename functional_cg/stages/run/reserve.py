"""How many bytes a capture takes from the device at once, so that its temporaries leave few gaps.

torch's allocator takes a segment of its own for each large value that fits into no free block, and never joins two
segments. Values of several sizes that live as long as a pipeline's activations leave a quarter of that memory unused.
Of one large segment the allocator cuts blocks, and joins those that are free again.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..branches.costs import WORKSPACE
from ..lifetimes import lives_of
from ..plan import AtenPlan, ExecutionPlan
from ..schedule import schedule, temporaries
from ..template import unrolled
from ..work import flops_of

__all__ = ["Event", "at_once", "events", "highest", "taken"]

Event = tuple[int, int]  # a storage, and its bytes: negative where it is freed

_MIB = 2**20
_SMALL, _MIDDLE = _MIB, 10 * _MIB  # up to which values lie in segments of 2 MiB, and in those of 20 MiB
_LEAST = 32 * _MIB  # of temporaries that are worth it
_SHARES = (1.0, 1.02, 1.04, 0.97, 1.01, 0.99, 1.03, 0.95)  # of the bytes that live at most, which are tried
_WORKSPACE = -1  # cuBLAS's, in place of a storage: it is never freed
_TRIED = 20_000  # events at most, or one share: a tenth of a second
_ENOUGH = 1.03  # of them: what is taken then is not tried further


@dataclass(eq=False, slots=True)
class _Block:
    start: int
    size: int
    before: _Block | None = None
    after: _Block | None = None
    free: bool = True


def at_once(plan: ExecutionPlan) -> int:
    """Return the bytes to take at once for the large temporaries of a plan; 0 if that is unknown, or not worth it."""
    if not isinstance(plan, AtenPlan) or plan.temporaries:  # lanes share no memory
        return 0
    found = events(plan)
    peak = highest(found)
    if peak < _LEAST:
        return 0
    best = (taken(found), 0)
    for share in _SHARES[: max(_TRIED // len(found), 1)]:
        size = int(peak * share)
        best = min(best, (taken(found, size), size))
        if best[0] <= peak * _ENOUGH:
            break
    return best[1]


def events(plan: AtenPlan) -> list[Event]:
    """Return when a plan allocates and frees its large temporaries, in order."""
    program = unrolled(plan.program)
    split = schedule(program)
    calls = [*split.head, *split.fused]
    sizes = {one: size for one, size in temporaries(program, split).items() if size > _SMALL}
    kept = {var.storage for var in (*split.outputs, *(new for _, new in split.commits))}
    begins, ends = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for storage, (start, end) in lives_of(calls, kept, sizes).items():
        begins[start].append(storage)
        ends[end].append(storage)
    found: list[Event] = []
    product = next((number for number, instr in enumerate(calls) if flops_of(instr)), None)
    for number in range(len(calls)):
        found += [(_WORKSPACE, WORKSPACE)] if number == product else []
        found += [(one, sizes[one]) for one in begins[number]]
        found += [(one, -sizes[one]) for one in ends[number]]
    return found


def highest(found: Iterable[Event]) -> int:
    """Return the most bytes that live at one time."""
    live = most = 0
    for _, size in found:
        live += size
        most = max(most, live)
    return most


def taken(found: Sequence[Event], first: int = 0) -> int:
    """Return the bytes that torch's allocator takes from the device: segments, of which it cuts the best fit.

    Args:
      found: What is allocated and freed.
      first: Bytes of a segment that is there before.
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

    if first:
        segment(_whole(first, 2 * _MIB))
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
            at = bisect_left(free, (size,))
        _, _, block = free.pop(at)
        if block.size - size > _SMALL:
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
