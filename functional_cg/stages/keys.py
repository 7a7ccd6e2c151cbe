"""Find the draws of a program: those that share a random key, and what is made of nothing else.

A key is a value, and two computations may produce the same value, so values are numbered: every pair found is real, but
some may be missed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType

import torch

from ..random.attention import ATTENTION
from ..random.samplers import DERIVE
from ..tensors.aten import named_arguments
from ..tensors.numbering import Numbers
from .program import Instr, Program, Var, live
from .sub_programs import calls_of, each_once

__all__ = ["draws_among", "inputs_behind", "is_drawn", "shared_keys"]

_DRAWS: Mapping[str, str] = MappingProxyType(
    {"fcg::random_bits": "key", ATTENTION: "draws"}
)  # what they draw from


def draws_among(program: Program) -> tuple[Sequence[Instr], set[Instr]]:
    """Return all calls of a program, and those that draw random numbers; if none does, no calls.

    Deriving a key is not a draw. A sub-program draws if its calls do.
    """
    if not any(map(_is_draw, each_once(program.instrs))):
        return (), set()
    calls = calls_of(program.instrs)
    return calls, set(filter(_is_draw, calls))


def is_drawn(program: Program, variables: Iterable[Var]) -> bool:
    """Whether values are computed from draws, and beside these from nothing but keys and counters."""
    calls = [instr for instr in calls_of(program.instrs) if not instr.checks]
    makers, used = live(calls, variables)
    given = used & {*program.slots, *program.inputs}
    return any(map(_is_draw, makers)) and all(var.spec.dtype == torch.int64 for var in given)


def shared_keys(program: Program) -> Iterator[tuple[str, str]]:
    """Yield pairs of draws with the same key and stream: one starts with the same words as the other.

    Draws in the backward do not count: a checkpoint repeats the draws of the forward.
    """
    calls, every = draws_among(program)
    drawn = {instr for instr in every if not instr.backward}
    makers, _ = live(calls, [_drawn_from(instr)[0] for instr in drawn])
    numbers, relevant = Numbers(Var, attrgetter("storage")), drawn.union(makers)
    first: dict[tuple[int, int], Instr] = {}
    for instr in calls:
        if instr in drawn:
            key, stream = _drawn_from(instr)
            earlier = first.setdefault((numbers.of(key), stream), instr)
            if earlier is not instr:
                yield str(earlier.site or earlier.op), str(instr.site or instr.op)
        if instr in relevant:
            numbers.call(instr.op, instr.args, instr.kwargs, instr.outputs(), instr.writes)


def _is_draw(instr: Instr) -> bool:
    return instr.op._schema.name in _DRAWS and _drawn_from(instr)[1] != DERIVE


def _drawn_from(instr: Instr) -> tuple[Var, int]:
    """Return the key and the stream of a draw."""
    named = named_arguments(instr.op, instr.args, instr.kwargs)
    return named[_DRAWS[instr.op._schema.name]], named["stream"]


def inputs_behind(program: Program, names: Iterable[str], variables: Iterable[Var]) -> list[str]:
    """Return the names of the inputs that variables are computed from; none if part of the state plays a part."""
    _, used = live([instr for instr in program.instrs if not instr.checks], variables)
    return (
        []
        if used & {*program.slots}
        else [n for n, var in zip(names, program.inputs, strict=True) if var in used]
    )
