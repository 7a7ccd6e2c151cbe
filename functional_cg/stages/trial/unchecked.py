"""Find the slots and inputs that may hold any value: no call checks a value that is computed from them.

A step also runs on values other than those of its call: to warm up, and to reveal what a compiled function keeps of its
first inputs. A call that checks its values may raise there. On a GPU a failed check makes the device unusable, and on a
CPU an integer division by zero kills the process.

There are two kinds of checks. An index must be in range; one made from a comparison or from ``argmax`` of floats always
is, so the walk stops there. An assertion, or a check of probabilities, may fail for any reason, so the walk continues
through comparisons, too. So it does behind a number that is counted: how many flags are set may be out of range.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ...tensors.op_table import row_of
from ...tensors.ulps import MOVABLE
from ..program import Instr, Program, Var
from ..sub_programs import SubProgram
from .ulps import INTEGERS

__all__ = ["Unchecked", "moved_checks"]

_OURS = frozenset({"aten", "prims", "fcg", "_c10d_functional", "c10d_functional"})


@dataclass(frozen=True, slots=True)
class Unchecked:
    """Whether each slot, and each input, may hold any value.

    Attributes:
      slots: One flag per slot of the program.
      inputs: One flag per input.
    """

    slots: tuple[bool, ...]
    inputs: tuple[bool, ...]

    @classmethod
    def of(cls, program: Program) -> Unchecked:
        """Find which slots and inputs of a program may hold any value.

        Walks the calls backwards: the values that a checked value is computed from count as checked, too. A warm-up
        runs more than once, so the new value of a checked slot counts as well; its inputs are those of the call.
        """
        calls, checked, known = _in_reverse(program.instrs), _Checked(), _Checked()
        checked.by(calls)
        of_inputs = checked.all
        while known != checked:
            known = _Checked({*checked.indices}, {*checked.asserted})
            for old, new in zip(program.slots, program.new_state, strict=False):
                checked.asserted |= {new.storage} if old.storage in checked.asserted else set()
                checked.indices |= {new.storage} if old.storage in checked.indices else set()
            checked.by(calls)
        of_slots = checked.all
        return cls(
            tuple(var.storage not in of_slots for var in program.slots),
            tuple(var.storage not in of_inputs for var in program.inputs),
        )


@dataclass(slots=True)
class _Checked:
    """Checked storages.

    Attributes:
      indices: Those that have to be in range.
      asserted: Those that a call may refuse because of any of their values.
    """

    indices: set[int] = field(default_factory=set)
    asserted: set[int] = field(default_factory=set)

    @property
    def all(self) -> set[int]:
        return self.indices | self.asserted

    def by(self, calls: Iterable[_Call | Instr]) -> None:
        """Add what calls check, and all that checked storages are computed from; see :func:`_in_reverse`."""
        for call in calls:
            if isinstance(call, Instr):
                self._by_sub_program(call)
                continue
            if not self.asserted.isdisjoint(call.made):
                self.asserted.update(call.read)
            if not self.indices.isdisjoint(call.ranged):
                (self.asserted if call.counts else self.indices).update(call.read)
            self.indices.update(call.in_range)
            self.asserted.update(call.asserted)

    def _by_sub_program(self, call: Instr) -> None:
        made = [(mine.storage, var.storage) for mine, var in zip(call.op.results, call.out, strict=True)]
        inside = _Checked(
            {mine for mine, its in made if its in self.indices},
            {mine for mine, its in made if its in self.asserted},
        )
        inside.by(call.op.known("unchecked", lambda one: _in_reverse(one.calls)))
        for mine, var in zip(call.op.given, call.args[0], strict=True):
            self.indices |= {var.storage} if mine.storage in inside.indices else set()
            self.asserted |= {var.storage} if mine.storage in inside.asserted else set()


@dataclass(frozen=True, slots=True)
class _Call:
    """What an ATen call does with memory, by storage.

    Attributes:
      read: What it reads.
      made: What it makes or writes.
      ranged: What of that may be out of range.
      counts: Whether that is so whatever the range of what it reads is: any value of that may have to be another one.
      in_range: What it reads that has to be in range.
      asserted: What it reads that it may refuse because of any of its values.
    """

    read: Collection[int]
    made: Collection[int]
    ranged: Collection[int]
    counts: bool
    in_range: Collection[int]
    asserted: Collection[int]

    @classmethod
    def of(cls, instr: Instr) -> _Call:
        ranged = (*instr.writes, *(var for var in instr.outputs() if not _is_position(instr, var)))
        every = (instr.inputs(), (*instr.writes, *instr.outputs()), ranged)
        read, made, moved = ({var.storage for var in some} for some in every)
        checked = ([var.storage for var in some] for some in (_in_range_for(instr), _asserted_by(instr)))
        return cls(read, made, moved, row_of(instr.op).counts, *checked)


def _in_reverse(instrs: Sequence[Instr]) -> list[_Call | Instr]:
    """Return calls, the last one first; those of sub-programs as they are."""
    return [one if isinstance(one.op, SubProgram) else _Call.of(one) for one in reversed(instrs)]


def moved_checks(instrs: Iterable[Instr]) -> dict[Instr, list[Var]]:
    """Return the arguments that calls check, of those that rounding moves, by call; not what is in range anyway."""
    moved, positions, found = set[int](), set[int](), dict[Instr, list[Var]]()
    for instr in instrs:
        checked = dict.fromkeys([*_asserted_by(instr), *_in_range_for(instr)])
        found[instr] = [var for var in checked if var.storage in moved and var.storage not in positions]
        depends = any(var.storage in moved for var in instr.inputs())
        for var in (*instr.outputs(), *instr.writes):
            if depends or var.spec.dtype in MOVABLE:
                moved.add(var.storage)
                if var.spec.dtype in INTEGERS and _is_position(instr, var):
                    positions.add(var.storage)
    return {instr: checked for instr, checked in found.items() if checked}


def _is_position(instr: Instr, var: Var) -> bool:
    """Whether a result is in range for any arguments: a flag, or integers from floats, neither cast nor counted.

    How a decomposition went, which those ending with ``_ex`` return, is checked by a call of its own.
    """
    if var.spec.dtype is torch.bool:
        return True
    row = row_of(instr.op)
    if (
        var.spec.dtype not in INTEGERS
        or instr.by_element
        or row.casts
        or row.counts
        or instr.name.endswith("_ex")
    ):
        return False
    return all(one.spec.dtype not in INTEGERS for one in instr.inputs())


def _asserted_by(instr: Instr) -> Iterator[Var]:
    """Yield the arguments that a call may refuse because of their values; a custom op may check anything."""
    if instr.op.namespace not in _OURS or row_of(instr.op).checks:
        yield from instr.inputs()


def _in_range_for(instr: Instr) -> Iterator[Var]:
    """Yield the arguments that have to be in range for a call."""
    row = row_of(instr.op)
    if row.divides or not (instr.by_element or row.lenient or row.casts or instr.is_view):
        yield from (var for var in instr.inputs() if var.spec.dtype in INTEGERS)
