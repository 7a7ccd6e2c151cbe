"""What a plan of ATen calls takes from the allocator and gives back, in order, as far as it is large."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from ..lifetimes import dropped_in, spanned
from ..plan import AtenPlan
from ..program import Instr, Var
from ..schedule import not_computed
from ..template import Template
from ..work import beside, flops_of

__all__ = ["LARGE", "Event", "events", "highest", "multiplies"]

Event = tuple[int, int]  # a storage, and its bytes: negative where it is freed

LARGE = 2**20  # above which a value lies in a segment for large ones
_BESIDE = -1  # in place of a storage: what a kernel takes while it runs


def events(plan: AtenPlan) -> list[Event]:
    """Return when a plan allocates and frees its large temporaries, in order; not the workspace of products."""
    program, split = plan.program, plan.schedule
    copied = [program.constants[number].var for number in sorted(split.written_constants)]
    walk = _Walk(not_computed(program, split) - {var.storage for var in copied})
    walk.make(copied)
    for number, instr in enumerate(plan.head):
        walk.call(instr, plan.dropped.get(number, ()))
    copies = [split.outputs[number].spec.nbytes for number in sorted(split.cloned)]
    copies += [new.spec.nbytes for old, new in split.commits if old in split.staged]
    walk.found += [(_BESIDE - number, size) for number, size in enumerate(copies, 1) if size > LARGE]
    return walk.found


def highest(found: Sequence[Event]) -> int:
    """Return the most bytes that live at one time."""
    live = most = 0
    for _, size in found:
        live += size
        most = max(most, live)
    return most


def multiplies(plan: AtenPlan) -> bool:
    """Whether a plan multiplies matrices."""
    return any(
        one.op.known("multiplies", _any_product) if isinstance(one.op, Template) else bool(flops_of(one))
        for one in plan.head
    )


def _any_product(template: Template) -> bool:
    return any(map(flops_of, template.calls))


class _Walk:
    """Goes along calls: a storage is there from the call that makes it until the last of its variables is dropped.

    Args:
      there: Storages that are there anyway.

    Attributes:
      found: What was allocated and freed so far.
      held: How many variables there are of each large storage.
    """

    def __init__(self, there: Collection[int]) -> None:
        self.found: list[Event] = []
        self.held: Counter[int] = Counter()
        self._there = there
        self._sizes: dict[int, int] = {}
        self._named: set[Var] = set()

    def make(self, results: Sequence[Var]) -> None:
        """Allocate what is new, and name all of it."""
        sizes: dict[int, int] = {}
        for var in results:
            if var.storage not in self.held and var.storage not in self._there:
                sizes[var.storage] = max(sizes.get(var.storage, 0), spanned(var))
        for storage, size in sizes.items():
            if size > LARGE:
                self._allocate(storage, size)
        self._name(results)

    def _allocate(self, storage: int, size: int) -> None:
        self.found.append((storage, size))
        self._sizes[storage], self.held[storage] = size, 0

    def _name(self, variables: Iterable[Var]) -> None:
        for var in variables:
            if var.storage in self.held and var not in self._named:
                self._named.add(var)
                self.held[var.storage] += 1

    def drop(self, variables: Iterable[Var]) -> None:
        for var in variables:
            if var in self._named:
                self._named.remove(var)
                self._release(var.storage)

    def _release(self, storage: int) -> None:
        self.held[storage] -= 1
        if not self.held[storage]:
            del self.held[storage]
            self.found.append((storage, -self._sizes.pop(storage)))

    def call(self, instr: Instr, dropped: Sequence[Var]) -> None:
        """Make a call, and drop variables after it."""
        if isinstance(instr.op, Template):
            self._again(instr, instr.op, dropped)
            return
        self.make(instr.outputs())
        if (size := beside(instr)) > LARGE:
            self.found += [(_BESIDE, size), (_BESIDE, -size)]
        self.drop(dropped)

    def _again(self, instr: Instr, template: Template, dropped: Sequence[Var]) -> None:
        """Make a call of a template: its function holds what it is given, and drops that when it has read it."""
        given, _, later = instr.args
        lies = {mine.storage: var.storage for mine, var in zip(template.results, instr.out, strict=True)}
        lies |= {mine.storage: var.storage for mine, var in zip(template.given, given, strict=True)}
        inside, left = template.known("allocations", _inside)
        taken = {mine.storage for mine in template.given if lies[mine.storage] in self.held}
        self.held.update(lies[one] for one in taken)
        read = set(given)
        self.drop(var for var in dropped if var in read)
        for one, size in inside:
            if one not in lies:
                self.found.append((one if one == _BESIDE else one + later, size))
            elif size:
                self._allocate(lies[one], size)
                self.held[lies[one]] += 1
            elif one in taken:
                self._release(lies[one])
        self._name(instr.out)
        for one in left:
            if lies[one] in self.held:
                self._release(lies[one])
        self.drop(var for var in dropped if var not in read)

    def given(self, variables: Sequence[Var]) -> None:
        """Hold what others have allocated: where it is dropped, 0 bytes are found to be freed."""
        self._sizes = {var.storage: 0 for var in variables}
        self.held.update(dict.fromkeys(self._sizes, 0))
        self._name(variables)


def _inside(template: Template) -> tuple[list[Event], list[int]]:
    """Return what a template allocates and frees or, with 0 bytes, drops, and which storages it returns."""
    walk, dropped = _Walk(()), template.known("dropped", dropped_in)
    walk.given(template.given)
    walk.drop(dropped.get(0, ()))
    for number, instr in enumerate(template.calls, 1):
        walk.call(instr, dropped.get(number, ()))
    return walk.found, [*walk.held]
