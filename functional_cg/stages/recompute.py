"""Compute cheap values anew in the backward, in place of keeping them from the forward.

What an activation function or a cast returns is as large as what it read, and both are kept: one by the next matrix
product for its weight's gradient, the other by the activation's own. The first can be had from the second, by a kernel
that runs at the speed of memory. A value is computed anew only where all that it is computed from is alive anyway, so
memory never grows; it is the same op on the same values, so no bit changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from .program import Instr, Program, Var, map_vars

__all__ = ["recompute"]

_LARGE = 2**20  # bytes: below, a kernel costs more than it frees
_FEW = 4  # calls in a row
_VIEWS = frozenset(
    {
        torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default, torch.ops.aten.t.default,
        torch.ops.aten.transpose.int, torch.ops.aten.permute.default, torch.ops.aten.unsqueeze.default,
        torch.ops.aten.squeeze.dim, torch.ops.aten.expand.default,
    }
)  # fmt: skip


@dataclass(slots=True)
class _Lives:
    """Where the storages of a program are made and read."""

    maker: dict[Var, Instr]
    place: dict[Instr, int]
    last_read: dict[int, int]
    written: set[int]

    @classmethod
    def of(cls, program: Program) -> _Lives:
        instrs = program.instrs
        end = len(instrs)
        last = {var.storage: i for i, instr in enumerate(instrs) for var in instr.inputs()}
        outside = [*program.slots, *program.inputs, *(c.var for c in program.constants)]
        last |= {var.storage: end for var in (*outside, *program.new_state, *program.results)}
        return cls(
            {var: instr for instr in instrs for var in instr.outputs()},
            {instr: i for i, instr in enumerate(instrs)},
            last,
            {var.storage for instr in instrs for var in instr.writes},
        )


def recompute(program: Program) -> None:
    """Rewrite a program in place: its backward computes cheap values anew."""
    lives = _Lives.of(program)
    start = next((i for i, instr in enumerate(program.instrs) if instr.backward), len(program.instrs))
    readers: dict[int, list[int]] = {}  # of storages made in the forward, their reads in the backward
    for i, instr in enumerate(program.instrs[start:], start):
        for var in instr.inputs():
            if var in lives.maker and lives.place[lives.maker[var]] < start:
                readers.setdefault(var.storage, []).append(i)
    number, kept = len(program.instrs), frozenset[int]()
    before: dict[int, list[Instr]] = {}
    renamed: dict[int, dict[Var, Var]] = {}
    fresh = _Fresh(program)
    for storage, places in sorted(readers.items(), key=lambda item: item[1][0]):
        first = places[0]
        wanted = {v for i in set(places) for v in program.instrs[i].inputs() if v.storage == storage}
        chain = _chain(lives, wanted)
        if chain is None or lives.last_read[storage] == number or storage in kept:
            continue
        sources = {var for instr in chain for var in instr.inputs() if lives.maker.get(var) not in chain}
        if not all(_alive(lives, var, first, wanted) for var in sources):
            continue
        kept |= {var.storage for var in sources}  # something is computed from it now
        copies: dict[Var, Var] = {}
        before.setdefault(first, []).extend(fresh.copies(chain, copies))
        for i in set(places):
            renamed.setdefault(i, {}).update(copies)
    program.instrs = [
        one
        for i, instr in enumerate(program.instrs)
        for one in (*before.get(i, ()), _renamed(instr, renamed.get(i, {})))
    ]


def _chain(lives: _Lives, wanted: set[Var]) -> list[Instr] | None:
    """The calls that make some variables of one storage: one elementwise op, and views of its result."""
    found: set[Instr] = set()
    stack = list(wanted)
    while stack:
        instr = lives.maker.get(stack.pop())
        if instr is None or instr in found:
            continue
        found.add(instr)
        if (
            len(found) > _FEW
            or instr.writes
            or not isinstance(instr.out, Var)
            or instr.out.storage in lives.written
        ):
            return None
        if instr.op in _VIEWS:
            stack.extend(instr.inputs())
        elif torch.Tag.pointwise not in instr.op.tags or instr.out.spec.nbytes < _LARGE:
            return None
    chain = sorted(found, key=lives.place.__getitem__)
    return chain if chain and chain[0].op not in _VIEWS else None


def _alive(lives: _Lives, source: Var, first: int, wanted: set[Var]) -> bool:
    """Whether a value is kept until ``first`` anyway, or is too small to matter."""
    if source.storage in lives.written:
        return False
    small = 16 * source.spec.nbytes <= max(var.spec.nbytes for var in wanted)
    return small or lives.last_read.get(source.storage, -1) >= first


class _Fresh:
    """Makes new variables like old ones."""

    def __init__(self, program: Program) -> None:
        known = [var for instr in program.instrs for var in instr.outputs()]
        known += [*program.slots, *program.inputs, *(c.var for c in program.constants)]
        self._index = max((var.index for var in known), default=-1)
        self._storage = max((var.storage for var in known), default=-1)

    def copies(self, chain: Sequence[Instr], copies: dict[Var, Var]) -> Iterator[Instr]:
        """The same calls with results of their own, which share one storage as the old ones do."""
        self._storage += 1
        for instr in chain:
            self._index += 1
            copies[instr.out] = replace(instr.out, index=self._index, storage=self._storage)
            yield _renamed(replace(instr, backward=True), copies)


def _renamed(instr: Instr, names: dict[Var, Var]) -> Instr:
    if not names:
        return instr

    def new(var: Var) -> Var:
        return names.get(var, var)

    kwargs = {name: map_vars(new, value) for name, value in instr.kwargs.items()}
    return replace(instr, args=map_vars(new, instr.args), kwargs=kwargs, out=map_vars(new, instr.out))
