"""What passes change a program with: fresh variables, names for others, orders in which calls may run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from ..program import Instr, Program, Var, highest, written_storages

__all__ = ["Fresh", "behind_needs", "final", "needs_of", "with_arguments"]

T = TypeVar("T")


class Fresh:
    """Makes variables with numbers that a program does not use.

    Args:
      program: The program.
    """

    def __init__(self, program: Program) -> None:
        self._indices, self._storages = (itertools.count(one + 1) for one in highest(program))

    def like(self, var: Var, **others: Any) -> Var:
        """Return a variable like another one, in memory of its own unless ``storage`` says where."""
        others.setdefault("storage", next(self._storages))
        return replace(var, index=next(self._indices), **others)


def with_arguments(instr: Instr, values: Mapping[str, Any]) -> Instr:
    """Return a call with other values for some of its arguments, by their names."""
    args, kwargs = list(instr.args), dict(instr.kwargs)
    for place, parameter in enumerate(instr.op._schema.arguments):
        if parameter.name in values and place < len(args):
            args[place] = values[parameter.name]
        elif parameter.name in values:
            kwargs[parameter.name] = values[parameter.name]
    return replace(instr, args=tuple(args), kwargs=kwargs)


def final(following: dict[T, T], at: T) -> T:
    """Return what stands for something in the end, and remember that: what stands for it may be replaced in turn."""
    passed = []
    while at in following:
        passed.append(at)
        at = following[at]
    following.update(dict.fromkeys(passed, at))
    return at


def needs_of(instrs: Sequence[Instr]) -> dict[Instr, list[Instr]]:
    """Return the calls that each call must follow.

    These are the ones that make what it reads, and the last one before it that touches memory which some call writes.
    """
    written = written_storages(instrs)
    makers: dict[Var, Instr] = {}
    last: dict[int, Instr] = {}
    needs: dict[Instr, list[Instr]] = {}
    for instr in instrs:
        touched = {var.storage for var in (*instr.inputs(), *instr.outputs())} & written
        needs[instr] = [makers[var] for var in instr.inputs() if var in makers]
        needs[instr] += [last[storage] for storage in sorted(touched) if storage in last]
        makers |= dict.fromkeys(instr.outputs(), instr)
        last |= dict.fromkeys(touched, instr)
    return needs


def behind_needs(goals: Iterable[T], needs: Callable[[T], Iterable[T]]) -> list[T]:
    """Return goals in their order, each behind all that it needs, directly or not.

    Args:
      goals: The goals.
      needs: What one needs.
    """
    done: dict[T, None] = {}
    for goal in goals:
        front = [goal]
        while front:
            missing = [one for one in needs(front[-1]) if one not in done]
            front += missing[::-1]
            if not missing:
                done[front.pop()] = None
    return list(done)
