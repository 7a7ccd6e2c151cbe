"""Rematerialization: the backward recomputes cheap values, the forward stores the rest in buffers.

The result of an activation function or a cast is as large as its input, and both are kept: one for the gradient of the
next weight, the other for the activation's own gradient. The first can be recomputed from the second by a kernel that
runs at memory speed. A value is recomputed only from values that are alive anyway, or that together are smaller than
it, so the kept memory does not grow. The same op runs on the same values: no bit changes.

Kept values are stored in buffers. A compiler that sees both passes at once would not store a sum that is cheap to
compute: it would keep all its terms, add them up in each kernel that reads the sum, and store in fp32 what the backward
makes of it.

Source of the idea: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from ..program import Instr, Program, Var, highest, map_vars, storage_bytes, written_storages
from .old_values import KEPT

__all__ = ["keep_as_buffers", "recompute"]

_LARGE = 2**20  # bytes: for a smaller value, a kernel costs more than the memory is worth
_FEW = 8  # calls to recompute one value
_VIEWS = frozenset(
    {
        torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default, torch.ops.aten.t.default,
        torch.ops.aten.transpose.int, torch.ops.aten.permute.default, torch.ops.aten.unsqueeze.default,
        torch.ops.aten.squeeze.dim, torch.ops.aten.expand.default,
    }
)  # fmt: skip
_CAST = torch.ops.aten._to_copy.default


def recompute(program: Program, *, large: int = _LARGE) -> None:
    """Rewrite a program in place so that its backward recomputes cheap values.

    Args:
      program: A rewritten program.
      large: Bytes from which a value is worth a kernel.
    """
    lives = _Lives.of(program)
    recipes = _recipes(program, lives, large)
    fresh = _Fresh(program)
    out: list[Instr] = []
    for place, instr in enumerate(program.instrs):
        if place >= lives.start:
            for var in dict.fromkeys(instr.inputs()):
                if var.storage in recipes:
                    out += fresh.remade(var, lives, recipes)
            instr = _renamed(instr, fresh.names)
        out.append(instr)
    program.instrs = out


def keep_as_buffers(program: Program, *, large: int = _LARGE) -> None:
    """Rewrite a program in place so that forward elementwise results read by the backward are stored in memory.

    Each goes through ``fcg::kept``: a compiler stores the value, laid out as it likes, and copies nothing.

    Args:
      program: A rewritten program.
      large: Bytes from which a value is stored.
    """
    lives = _Lives.of(program)
    index, _ = highest(program)
    names: dict[Var, Var] = {}
    out: list[Instr] = []
    for place, instr in enumerate(program.instrs):
        out.append(_renamed(instr, names))
        made = instr.out
        kept = place < lives.start and isinstance(made, Var) and instr.by_element
        if kept and made.storage in lives.first_read.keys() - lives.written and made.spec.nbytes >= large:
            index += 1
            names[made] = replace(made, index=index)
            out.append(Instr(KEPT, (made,), {}, names[made], (), instr.site))
    program.instrs = out


@dataclass(slots=True)
class _Lives:
    """Lifetimes: where the values of a program are made, and when they are read.

    Attributes:
      start: Number of the first call of the backward.
      maker: The call that makes each variable.
      place: The number of each call.
      first_read: First read in the backward of each storage that the forward makes.
      last_read: Last read of each storage.
      size: Bytes of each storage.
      written: Storages that some call writes in place.
    """

    start: int
    maker: dict[Var, Instr]
    place: dict[Instr, int]
    first_read: dict[int, int]
    last_read: dict[int, int]
    size: dict[int, int]
    written: set[int]

    @classmethod
    def of(cls, program: Program) -> _Lives:
        instrs, end = program.instrs, len(program.instrs)
        start = next((i for i, instr in enumerate(instrs) if instr.backward), end)
        outside = [*program.slots, *program.inputs, *(c.var for c in program.constants)]
        last = {var.storage: i for i, instr in enumerate(instrs) for var in instr.inputs()}
        last |= {var.storage: end for var in (*outside, *program.new_state, *program.results)}
        first: dict[int, int] = {}
        made = {var.storage for instr in instrs[:start] for var in instr.outputs()}
        size = storage_bytes(instrs)
        for i, instr in enumerate(instrs[start:], start):
            for var in instr.inputs():
                if var.storage in made:
                    first.setdefault(var.storage, i)
        return cls(
            start,
            {var: instr for instr in instrs for var in instr.outputs()},
            {instr: i for i, instr in enumerate(instrs)},
            first,
            last,
            size,
            written_storages(instrs),
        )


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How to recompute a storage.

    Attributes:
      sources: The values that the computation starts from.
      calls: How many calls it takes.
    """

    sources: frozenset[Var]
    calls: int


def _recipes(program: Program, lives: _Lives, large: int) -> dict[int, _Recipe]:
    """Return recipes for storages that are not kept for the backward, in the order that the forward makes them."""
    out: dict[int, _Recipe] = {}
    results = {var.storage for var in (*program.new_state, *program.results)}
    for instr in program.instrs[: lives.start]:
        made = instr.out
        if not isinstance(made, Var) or not _is_cheap(instr) or instr.writes:
            continue
        if made.storage in results | lives.written:
            continue
        parts = [
            out[var.storage] if var.storage in out else _Recipe(frozenset({var}), 0) for var in instr.inputs()
        ]
        recipe = _Recipe(
            frozenset(var for part in parts for var in part.sources), 1 + sum(part.calls for part in parts)
        )
        if recipe.calls > _FEW:
            continue
        first = lives.first_read.get(made.storage)
        if first is None:  # not read by the backward itself, though a value made from it may be
            out[made.storage] = recipe
        elif made.spec.nbytes >= large and _pays(program, lives, made, first, recipe):
            out[made.storage] = recipe
            for var in recipe.sources:  # now kept until that read
                lives.last_read[var.storage] = max(lives.last_read.get(var.storage, -1), first)
    return out


def _pays(program: Program, lives: _Lives, made: Var, first: int, recipe: _Recipe) -> bool:
    """Whether recomputing a value saves memory: its sources are alive anyway, or smaller to keep."""
    sources = {var.storage for var in recipe.sources}
    kept_for_it = sum(lives.size.get(one, 0) for one in sources if lives.last_read.get(one, -1) < first)
    return (
        any(
            var in lives.maker for var in recipe.sources
        )  # rereading a weight costs more than keeping its cast
        and sources.isdisjoint(lives.written)
        and kept_for_it < made.spec.nbytes
        and all(_by_views(lives, var, made) for var in _read_in_backward(program, lives, made.storage))
    )


def _is_cheap(instr: Instr) -> bool:
    """Whether a call makes a single pass over its arguments: an elementwise op or a cast."""
    return instr.op not in _VIEWS and (instr.by_element or instr.op is _CAST)


def _read_in_backward(program: Program, lives: _Lives, storage: int) -> Iterable[Var]:
    return {
        var for instr in program.instrs[lives.start :] for var in instr.inputs() if var.storage == storage
    }


def _by_views(lives: _Lives, var: Var, root: Var) -> bool:
    """Whether a variable is ``root``, or is made from it by views alone."""
    while var is not root:
        maker = lives.maker.get(var)
        if maker is None or maker.op not in _VIEWS:
            return False
        var = maker.inputs()[0]
    return True


class _Fresh:
    """Recomputes values, each once, into new variables.

    Attributes:
      names: The new variable for each variable that was recomputed.
    """

    def __init__(self, program: Program) -> None:
        self._index, self._storage = highest(program)
        self._storages: dict[int, int] = {}
        self.names: dict[Var, Var] = {}

    def remade(self, var: Var, lives: _Lives, recipes: dict[int, _Recipe]) -> list[Instr]:
        """Return the calls that recompute a variable and its dependencies, skipping what was recomputed already."""
        if var in self.names or var.storage not in recipes:
            return []
        instr = lives.maker[var]
        calls = [call for needed in instr.inputs() for call in self.remade(needed, lives, recipes)]
        self._index += 1
        if var.storage not in self._storages:
            self._storage += 1
            self._storages[var.storage] = self._storage
        self.names[var] = replace(var, index=self._index, storage=self._storages[var.storage])
        return [*calls, _renamed(replace(instr, backward=True), self.names)]


def _renamed(instr: Instr, names: dict[Var, Var]) -> Instr:
    def new(var: Var) -> Var:
        return names.get(var, var)

    kwargs = {name: map_vars(new, value) for name, value in instr.kwargs.items()}
    args: Sequence[object] = map_vars(new, instr.args)
    return replace(instr, args=tuple(args), kwargs=kwargs, out=map_vars(new, instr.out))
