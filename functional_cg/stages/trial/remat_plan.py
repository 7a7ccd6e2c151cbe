"""Plan a run under a memory budget: values dropped before their last use are recomputed, or wait on the host.

The values of a forward pass wait for the backward, and together they take most of a program's memory. Those that cost
little to recompute from the others are dropped by the forward. If the rest does not fit, the value dropped is the one
that is cheapest to recompute relative to its size and the time until its next use: a choice at each call that, along a
deep network, may drop what all others are made of. What cannot be recomputed, or for more than a copy costs, is set
aside in host memory. All sizes and uses are known in advance, so the whole order is planned before anything runs.

Source: Kirisame et al. 2021, "Dynamic Tensor Rematerialization"; with next uses instead of last uses.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from ...shards.transfers import is_between_ranks
from ..lifetimes import storage_bytes
from ..program import Instr, Var, written_storages

__all__ = ["Action", "in_order", "within"]

_MOST_RUNS = 5  # limit on the calls to run, as a multiple of the program's
_FEW = 2**10  # values smaller than this fraction of the budget are not considered
_PRODUCTS = ("mm", "attention", "convolution")
_DEAR = 8  # cost of a product relative to the bytes it moves
_FAR = 100  # cost of moving a byte to the host and back, relative to one in the memory of a GPU


@dataclass(slots=True)
class Action:
    """A call to run, and what happens to variables before it.

    Attributes:
      instr: The call; None if there is none.
      forget: Variables to forget, first.
      aside: Variables to move to the host, each list those of one storage.
      back: Variables to bring back, at last: those of one storage.
    """

    instr: Instr | None
    forget: list[Var] = field(default_factory=list)
    aside: list[list[Var]] = field(default_factory=list)
    back: list[Var] = field(default_factory=list)


def in_order(instrs: Sequence[Instr]) -> list[Action]:
    """Run each call once, in order; forget a variable after the last call that reads it."""
    born = {var for instr in instrs for var in instr.outputs()}
    last: dict[Var, int] = {}
    for number, instr in enumerate(instrs):
        last |= dict.fromkeys((*instr.inputs(), *instr.outputs()), number)
    actions = [Action(instr) for instr in (*instrs, None)]
    for var, number in last.items():
        if var in born:
            actions[number + 1].forget.append(var)
    return actions


def within(
    instrs: Sequence[Instr], static: Iterable[int], budget: int, again: Collection[int] = (), host: int = 0
) -> list[Action] | None:
    """Return an order that takes at most ``budget`` bytes besides the static buffers; None if none is found.

    Args:
      instrs: The calls.
      static: Storages of the static buffers.
      budget: Bytes.
      again: Storages that the backward recomputes in any case, if it needs them.
      host: Bytes that may be set aside at a time.
    """
    plan = _Plan(instrs, frozenset(static), budget, again, host)
    try:
        return plan.made()
    except _NoRoomError:
        return None


class _NoRoomError(Exception):
    """No order within the budget was found."""


class _Plan:
    """Simulates a program and tracks which values are in memory."""

    def __init__(
        self, instrs: Sequence[Instr], static: frozenset[int], budget: int, again: Collection[int], host: int
    ) -> None:
        self._instrs, self._budget, self._again, self._host = instrs, budget, again, host
        self._inputs = {instr: instr.inputs() for instr in instrs}
        self._outputs = {instr: instr.outputs() for instr in instrs}
        self._maker: dict[Var, Instr] = {}
        self._price = {instr: _price(instr) for instr in instrs}
        self._size = {one: size for one, size in storage_bytes(instrs).items() if one not in static}
        self._uses: dict[int, list[int]] = {}
        written = written_storages(instrs)
        self._stays = set(written)  # storages that cannot be recomputed
        for number, instr in enumerate(instrs):
            for var in self._inputs[instr]:
                self._uses.setdefault(var.storage, []).append(number)
            # Other ranks take part once. What is made from such a storage cannot be recomputed either, once that is
            # gone, nor what is made together with it: the call would make it again as it was before it was written.
            fixed = is_between_ranks(instr.op) or any(
                var.storage in self._stays for var in (*self._inputs[instr], *self._outputs[instr])
            )
            for var in self._outputs[instr]:
                if var.storage not in static:
                    self._maker.setdefault(var, instr)
                    if fixed:
                        self._stays.add(var.storage)
        end = next((n for n, instr in enumerate(instrs) if instr.backward), len(instrs))
        self._forward = {var.storage for instr in instrs[:end] for var in self._outputs[instr]}
        self._there: dict[int, dict[Var, None]] = {}  # what is in memory, by storage
        self._aside: dict[int, dict[Var, None]] = {}  # what waits on the host
        self._droppable: dict[int, int] = {}  # sizes of what is worth dropping
        self._next: dict[int, int | None] = {}  # next uses; looked up again once they are past
        self._readers: dict[Var, list[Instr]] = {}
        self._lacks: dict[Instr, int] = {}  # arguments that are not in memory: they must be recomputed first
        for instr in instrs:
            computed = [var for var in self._inputs[instr] if var in self._maker]
            self._lacks[instr] = len(computed)
            for var in computed:
                self._readers.setdefault(var, []).append(instr)
        self._used = 0
        self._now = 0
        self._actions: list[Action] = []
        self._forget: list[Var] = []  # before the next action
        self._going: list[list[Var]] = []

    def made(self) -> list[Action]:
        if max(map(self._needs, self._instrs), default=0) > self._budget:
            raise _NoRoomError
        for number, instr in enumerate(self._instrs):
            self._now = number
            self._need(self._inputs[instr], instr)
            self._run(instr)
            self._tidy(instr)
        self._act(None)
        return self._actions

    def _act(self, instr: Instr | None, back: Iterable[Var] = ()) -> None:
        self._actions.append(Action(instr, self._forget, self._going, [*back]))
        self._forget, self._going = [], []
        if len(self._actions) > _MOST_RUNS * len(self._instrs) + 1:
            raise _NoRoomError

    def _tidy(self, instr: Instr, protected: Collection[int] = ()) -> None:
        """Drop what need not wait for its next use, after a call that has read or made it."""
        for storage in {var.storage for var in (*self._inputs[instr], *self._outputs[instr])}:
            if storage not in protected and self._is_done_with(storage):
                self._drop(storage)

    def _is_done_with(self, storage: int) -> bool:
        use = self._next_use(storage)
        if use is None:
            return True
        later = self._instrs[use].backward and not self._instrs[self._now].backward
        return later and storage in self._again and storage not in self._stays

    def _needs(self, instr: Instr) -> int:
        """Return the bytes of a call's own arguments and results."""
        storages = {var.storage for var in (*self._inputs[instr], *self._outputs[instr])}
        return sum(self._size.get(storage, 0) for storage in storages)

    def _is_there(self, var: Var) -> bool:
        return var not in self._maker or var in self._there.get(var.storage, ())

    def _need(self, wanted: Sequence[Var], reader: Instr) -> None:
        """Bring back or recompute missing values and their dependencies, without dropping any of the wanted ones."""
        waiting: list[Instr] = []
        protected = [wanted]  # values, then the arguments of each call that waits
        while True:
            missing = next((var for var in protected[-1] if not self._is_there(var)), None)
            if missing is not None and missing in self._aside.get(missing.storage, ()):
                self._bring_back(missing.storage, {var.storage for group in protected for var in group})
            elif missing is not None:
                maker = self._maker[missing]
                if maker is reader or maker in waiting:
                    raise _NoRoomError
                waiting.append(maker)
                protected.append(self._inputs[maker])
            elif waiting:
                protected.pop()
                made, held = waiting.pop(), {var.storage for group in protected for var in group}
                self._run(made, held)
                self._tidy(made, held)
            else:
                return

    def _run(self, instr: Instr, protected: Collection[int] = ()) -> None:
        """Add a call, after dropping values to make room for its results."""
        outputs = [var for var in self._outputs[instr] if var in self._maker]
        new = {var.storage for var in outputs} - {var.storage for var in self._inputs[instr]}
        for storage in new:  # of a call that runs again, the result that is there is made again, too
            self._aside.pop(storage, None)
            self._drop(storage)
        self._make_room(
            sum(self._size[storage] for storage in new),
            {*protected} | {var.storage for var in (*self._inputs[instr], *outputs)},
        )
        self._act(instr)
        self._hold(outputs)

    def _make_room(self, size: int, stays: set[int]) -> None:
        while self._used + size > self._budget:
            storage, moved = self._victim(stays)
            if moved:
                self._aside[storage] = self._there[storage]
                self._going.append(self._take_out(storage))
            else:
                self._drop(storage)
        self._used += size

    def _hold(self, made: Iterable[Var]) -> None:
        for var in made:
            there = self._there.setdefault(var.storage, {})
            if var not in there:
                there[var] = None
                self._count(var, -1)
            if self._size[var.storage] * _FEW >= self._budget:
                self._droppable.setdefault(var.storage, self._size[var.storage])

    def _bring_back(self, storage: int, stays: set[int]) -> None:
        self._make_room(self._size[storage], stays)
        back = self._aside.pop(storage)
        self._act(None, back)
        self._hold(back)

    def _drop(self, storage: int) -> None:
        if storage in self._there:
            self._forget += self._take_out(storage)

    def _take_out(self, storage: int) -> list[Var]:
        gone = [*self._there.pop(storage)]
        self._droppable.pop(storage, None)
        self._used -= self._size[storage]
        for var in gone:
            self._count(var, 1)
        return gone

    def _count(self, var: Var, lacking: int) -> None:
        for reader in self._readers.get(var, ()):
            self._lacks[reader] += lacking

    def _next_use(self, storage: int) -> int | None:
        known = self._next.get(storage, -1)
        if known is not None and known <= self._now:
            uses = self._uses.get(storage, [])
            place = bisect_right(uses, self._now)
            known = self._next[storage] = uses[place] if place < len(uses) else None
        return known

    def _victim(self, stays: set[int]) -> tuple[int, bool]:
        """Choose a storage to drop: large, not needed for long, and cheap to recompute, or else to set aside.

        What is made later than the forward is recomputed only where nothing else can be dropped: what a gradient is
        made of is gone soon after it, so to recompute it may take the whole backward.

        Returns:
          The storage, and whether it is set aside.
        """
        found: tuple[bool, float] = (False, 0.0)
        best = None
        left = self._host - sum(self._size[storage] for storage in self._aside)
        for storage, size in self._droppable.items():
            if storage in stays:
                continue
            use = self._next_use(storage)
            if use is None:
                return storage, False
            far = float(_FAR * size) if self._is_movable(storage, left) else math.inf
            near = math.inf if storage in self._stays else self._cost(storage)
            cost, moved = min((near, False), (far, True))
            worth = moved or storage in self._forward, size * (use - self._now) / cost
            if worth > found and cost < math.inf:
                best, found = (storage, moved), worth
        if best is None:
            raise _NoRoomError
        return best

    def _is_movable(self, storage: int, left: int) -> bool:
        """Whether a storage may be set aside: views of complex numbers may be conjugates, which bytes do not tell."""
        return self._size[storage] <= left and not any(
            var.spec.dtype.is_complex for var in self._there[storage]
        )

    def _cost(self, storage: int) -> float:
        """Estimate the cost of recomputing a storage."""
        makers = (self._maker[var] for var in self._there[storage])
        return max(1.0, *(self._price[maker] * (1 + self._lacks[maker]) for maker in makers))


def _price(instr: Instr) -> float:
    """Estimate the cost of a call by the bytes that it moves."""
    moved = sum(var.spec.nbytes for var in (*instr.inputs(), *instr.outputs()))
    return float(moved * (_DEAR if any(word in str(instr.op) for word in _PRODUCTS) else 1))
