"""Rematerialization: the backward recomputes cheap values, the forward stores the rest in buffers.

Which values are recomputed is the choice of :mod:`min_cut`. The same op runs on the same values, so no bit changes; the
result of a normalization is recomputed from its statistics, by the formula that a compiler uses for it, too.

Kept values are stored in buffers. A compiler that sees both passes at once would not store a sum that is cheap to
compute: it would keep all its terms, add them up in each kernel that reads the sum, and store in fp32 what the backward
makes of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..fx_passes.old_values import KEPT, LATER
from ..program import Instr, Program, Var
from .changes import Fresh, behind_needs
from .min_cut import Choice, Forward, recomputed, stored

__all__ = ["keep_as_buffers", "recompute"]

_FEW = 4  # values that a compiler reads again for each reader of what it computes from them
_PRICES = (1e6, 8.0, 4.0, 2.0, 1.0, 0.6, 0.4, 0.25, 0.125, 0.0)
_PRICE = 0.6  # bytes of memory for which one byte of memory traffic is worth saving


def recompute(program: Program, *, budget: float | None = None, large: int) -> None:
    """Rewrite a program in place so that its backward recomputes what costs less than keeping it.

    Args:
      program: A rewritten program.
      budget: What the forward keeps, as a fraction of the way from the least to what moves the fewest bytes; None to
        keep what costs less than recomputing it.
      large: Bytes from which a value is worth a kernel.
    """
    forward = Forward.of(program)
    choices = recomputed(program, forward, prices=(_PRICE,) if budget is None else _PRICES, large=large)
    choice = choices[0] if budget is None else _within(budget, choices)
    fresh = _Remade(program, forward, choice.again)
    out: list[Instr] = []
    latest: Var | None = None
    for instr in program.instrs:
        if instr.backward:
            for var in dict.fromkeys(instr.inputs()):
                out += fresh.remade(var, latest)
            instr = instr.again(fresh.name)
            latest = next(iter(instr.outputs()), latest)
        out.append(instr)
    program.instrs = out


def _within(budget: float, choices: Sequence[Choice]) -> Choice:
    """Return the first choice within a budget; the first of all keeps the most, the last the least."""
    most, least = choices[0].kept, choices[-1].kept
    return next(one for one in choices if one.kept <= least + budget * (most - least))


def keep_as_buffers(program: Program, *, large: int) -> None:
    """Rewrite a program in place so that forward elementwise results read by the backward are stored in memory.

    Each goes through ``fcg::kept``: a compiler stores the value, laid out as it likes, and copies nothing.

    Args:
      program: A rewritten program.
      large: Bytes from which a value is stored.
    """
    forward = Forward.of(program)
    fresh, names = Fresh(program), dict[Var, Var]()
    out: list[Instr] = []
    for instr in program.instrs:
        out.append(instr.again(lambda var: names.get(var, var)))
        made = instr.out
        kept = not instr.backward and isinstance(made, Var) and instr.by_element
        if kept and made.storage in forward.needed.keys() - forward.written and made.spec.nbytes >= large:
            names[made] = fresh.like(made, storage=made.storage)
            out.append(replace(instr, op=KEPT, args=(made,), kwargs={}, out=names[made], writes=()))
    program.instrs = out


class _Remade:
    """Recomputes values, each once, into new variables.

    A compiler could compute a value again in the kernel that computes it first, which would keep it. Values that it
    stores in memory wait for a value of the backward, by ``fcg::later``.
    """

    def __init__(self, program: Program, forward: Forward, again: set[int]) -> None:
        self._forward, self._again = forward, again
        self._fresh, self._names = Fresh(program), dict[Var, Var]()
        self._storages: dict[int, int] = {}
        self._in_memory = stored(program, forward)[1] | _read_by_several(program, forward, again)

    def name(self, var: Var) -> Var:
        """Return the new variable for one that was recomputed; others as they are."""
        return self._names.get(var, var)

    def remade(self, var: Var, latest: Var | None) -> list[Instr]:
        """Return the calls that recompute a variable and its dependencies, skipping what was recomputed already.

        Args:
          var: The variable.
          latest: A value of the backward that is there by now.
        """

        def missing(one: Var) -> list[Var]:
            return list(filter(self._is_missing, self._forward.maker[one].inputs()))

        return [
            call
            for one in (behind_needs([var], missing) if self._is_missing(var) else ())
            for call in self._made(one, latest)
        ]

    def _is_missing(self, var: Var) -> bool:
        return var.storage in self._again and var not in self._names

    def _made(self, var: Var, latest: Var | None) -> list[Instr]:
        new = self._names[var] = self._like(var)
        calls = [replace(self._forward.maker[var], backward=True).again(self.name)]
        if var is self._forward.root[var.storage] and var.storage in self._in_memory and latest is not None:
            self._names[var] = self._like(var)
            wait = replace(calls[0], op=LATER, args=(new, latest), kwargs={}, out=self._names[var], writes=())
            calls.append(wait)
        return calls

    def _like(self, var: Var) -> Var:
        """Return a new variable, in the new memory for that of another one."""
        made = self._fresh.like(var)
        made.storage = self._storages.setdefault(var.storage, made.storage)
        return made


def _read_by_several(program: Program, forward: Forward, again: set[int]) -> set[int]:
    """Return the recomputed storages that several calls read and that are made from several kept values."""
    readers: dict[int, int] = {}
    sources: dict[int, set[int]] = {}
    for storage in sorted(again, key=forward.place.__getitem__):
        inputs = {var.storage for var in forward.maker[forward.root[storage]].inputs()}
        sources[storage] = {leaf for one in inputs for leaf in sources.get(one, {one})}
        for one in inputs:
            readers[one] = readers.get(one, 0) + 1
    for instr in program.instrs:
        if instr.backward:
            for one in {var.storage for var in instr.inputs()}:
                readers[one] = readers.get(one, 0) + 1
    return {one for one in again if readers.get(one, 0) > 1 and len(sources[one]) > _FEW}
