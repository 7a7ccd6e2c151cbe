"""Find the slots and inputs that may hold any value: no call checks a value that is computed from them.

A step also runs on values other than those of its call: to warm up, and to reveal what a compiled function keeps of its
first inputs. A call that checks its values may raise there. On a GPU a failed check makes the device unusable, and on a
CPU an integer division by zero kills the process.

There are two kinds of checks. An index must be in range; one made from a comparison or from ``argmax`` of floats always
is, so the walk stops there. An assertion, or a check of probabilities, may fail for any reason, so the walk continues
through comparisons, too. So it does behind a number that is counted: how many flags are set may be out of range.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from ...tensors.op_table import row_of
from ...tensors.ulps import MOVABLE
from ..program import Instr, Program, Var
from ..sub_programs import calls_of
from .ulps import INTEGERS, ORDERED

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
        calls, checked = calls_of(program.instrs)[::-1], _Checked()
        of_slots = of_inputs = checked.by(calls)
        sizes = -1, -1
        while sizes != (sizes := (len(checked.indices), len(checked.asserted))):  # they only grow
            for old, new in zip(program.slots, program.new_state, strict=False):
                for known in (checked.indices, checked.asserted):
                    if old.storage in known:
                        known.add(new.storage)
            of_slots = checked.by(calls)
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

    def by(self, calls: Iterable[Instr]) -> set[int]:
        """Add what calls check, the last one first, and all that is computed from; return all checked storages."""
        for instr in calls:
            read, made = {var.storage for var in instr.inputs()}, [*instr.writes, *instr.outputs()]
            if any(var.storage in self.asserted for var in made):
                self.asserted |= read
            if any(var.storage in self.indices for var in made if not _is_position(instr, var)):
                # A count may be out of range whatever is counted: any of those values may have to be another one.
                (self.asserted if row_of(instr.op).counts else self.indices).update(read)
            self.indices.update(var.storage for var in _in_range_for(instr))
            self.asserted.update(var.storage for var in _asserted_by(instr))
        return self.indices | self.asserted


def moved_checks(instrs: Iterable[Instr]) -> dict[Instr, list[Var]]:
    """Return the arguments that calls check, of those that rounding moves, by call; not what is in range anyway."""
    moved, positions, found = set[int](), set[int](), dict[Instr, list[Var]]()
    for instr in instrs:
        checked = {*_asserted_by(instr), *_in_range_for(instr)}
        found[instr] = [
            var
            for var in checked
            if var.storage in moved
            and var.storage not in positions
            and var.spec.numel
            and var.spec.dtype in ORDERED
        ]
        depends = any(var.storage in moved for var in instr.inputs())
        for var in (*instr.outputs(), *instr.writes):
            if depends or var.spec.dtype in MOVABLE:
                moved.add(var.storage)
                if var.spec.dtype in INTEGERS and _is_position(instr, var):
                    positions.add(var.storage)
    return {instr: checked for instr, checked in found.items() if checked}


def _is_position(instr: Instr, var: Var) -> bool:
    """Whether a new result is in range for any arguments: a flag, or integers from floats, neither cast nor counted.

    How a decomposition went, which those ending with ``_ex`` return, is checked by a call of its own.
    """
    if var in instr.writes:
        return False
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
