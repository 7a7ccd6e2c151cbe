"""How many bytes a capture takes from the device at once, so that its temporaries leave few gaps.

torch's allocator takes a segment of its own for each large value that fits into no free block, and never joins two
segments. Values of several sizes that live as long as a pipeline's activations leave a quarter of that memory unused.
Of one large segment the allocator cuts blocks, and joins those that are free again.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...concurrency.garbage import no_garbage_collection
from ..branches.costs import WORKSPACE
from ..lifetimes import lives_of, storage_bytes
from ..plan import AtenPlan, ExecutionPlan
from ..program import Instr
from ..schedule import not_computed
from ..template import Template
from ..work import flops_of

__all__ = ["Event", "at_once", "events", "highest", "taken"]

Event = tuple[int, int]  # a storage, and its bytes: negative where it is freed
_Touched = tuple[int, int, int, int]  # a storage, the first and the last call that touch it, and its bytes

_MIB = 2**20
_SMALL, _MIDDLE = _MIB, 10 * _MIB  # up to which values lie in segments of 2 MiB, and in those of 20 MiB
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
_WORKSPACE = -1  # cuBLAS's, in place of a storage: it is never freed
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


def events(plan: AtenPlan) -> list[Event]:
    """Return when a plan allocates and frees its large temporaries, in order."""
    split, there = plan.schedule, not_computed(plan.program, plan.schedule)
    first, last, sizes = dict[int, int](), dict[int, int](), dict[int, int]()
    number, product = 0, -1
    for instr in (*split.head, *split.fused):
        calls, touched = _touched(instr)
        for storage, start, end, nbytes in touched:
            if storage not in there:
                first.setdefault(storage, number + start)
                last[storage] = max(last.get(storage, 0), number + end)
                sizes[storage] = max(sizes.get(storage, 0), nbytes)
        if product < 0 and (at := _first_product(instr)) >= 0:
            product = number + at
        number += calls
    kept = {var.storage for var in (*split.outputs, *(new for _, new in split.commits))}
    large = [storage for storage, size in sizes.items() if size > _SMALL]
    found = [(first[one], 0, one) for one in large]
    found += [(product, 1, _WORKSPACE)] if product >= 0 else []  # after its result
    found += [(last[one], 2, one) for one in large if one not in kept]
    sizes[_WORKSPACE] = WORKSPACE
    found.sort(key=lambda one: one[:2])
    return [(storage, sizes[storage] if kind < 2 else -sizes[storage]) for _, kind, storage in found]


def _touched(instr: Instr) -> tuple[int, Iterable[_Touched]]:
    """Return how many ATen calls a call stands for, and what they touch; of a template, without making them."""
    if not isinstance(instr.op, Template):
        made = [(storage, 0, 0, size) for storage, size in storage_bytes([instr]).items()]
        return 1, [*made, *((var.storage, 0, 0, 0) for var in instr.inputs())]
    template, (given, _, later) = instr.op, instr.args
    pairs = [*zip(template.results, instr.out, strict=True), *zip(template.given, given, strict=True)]
    lies = {var.storage: other.storage for var, other in pairs}
    inside = template.known("touched", _inside)
    return len(template.calls), [(lies.get(one, one + later), *of_it) for one, *of_it in inside]


def _inside(template: Template) -> list[_Touched]:
    """Return what the calls of a template touch that is large, or that others touch, too."""
    sizes = storage_bytes(template.calls)
    outside = {var.storage for var in (*template.given, *template.results)}
    sizes |= dict.fromkeys({var.storage for var in template.given}, 0)
    counted = {one for one, size in sizes.items() if size > _SMALL or one in outside}
    lives = lives_of(template.calls, (), counted)
    return [(storage, start, end, sizes[storage]) for storage, (start, end) in lives.items()]


def _first_product(instr: Instr) -> int:
    """Return the number of the first of its calls that multiplies matrices; -1 if none does."""
    found: int = (
        instr.op.known("product", _product_in) if isinstance(instr.op, Template) else _product_of([instr])
    )
    return found


def _product_in(template: Template) -> int:
    return _product_of(template.calls)


def _product_of(calls: Iterable[Instr]) -> int:
    return next((number for number, one in enumerate(calls) if flops_of(one)), -1)


def highest(found: Iterable[Event]) -> int:
    """Return the most bytes that live at one time."""
    live = most = 0
    for _, size in found:
        live += size
        most = max(most, live)
    return most


def taken(found: Sequence[Event], first: int = 0, limit: float = math.inf) -> int:
    """Return the bytes that torch's allocator takes from the device: segments, of which it cuts the best fit.

    Args:
      found: What is allocated and freed.
      first: Bytes of a segment that is there before.
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
            if total >= limit:
                return total
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
