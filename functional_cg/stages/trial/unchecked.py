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
from dataclasses import dataclass

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
        calls, checked, known = calls_of(program.instrs)[::-1], dict[int, bool](), dict[int, bool]()
        _add_checked(calls, checked)
        of_inputs = frozenset(checked)
        while known != checked:  # it only grows
            known = dict(checked)
            for old, new in zip(program.slots, program.new_state, strict=False):
                if old.storage in checked:
                    checked[new.storage] = checked[old.storage] or checked.get(new.storage, False)
            _add_checked(calls, checked)
        return cls(
            tuple(var.storage not in checked for var in program.slots),
            tuple(var.storage not in of_inputs for var in program.inputs),
        )


def _add_checked(calls: Iterable[Instr], checked: dict[int, bool]) -> None:
    """Add the storages that calls check, the last one first, and all that these are computed from.

    Args:
      calls: The calls, the last one first.
      checked: By storage, whether a call may refuse it because of any of its values, not only one out of range.
    """
    for instr in calls:
        made = [*instr.writes, *instr.outputs()]
        asserts = any(checked.get(var.storage, False) for var in made)
        indexes = any(var.storage in checked and not _is_position(instr, var) for var in made)
        if asserts or indexes:
            # A count may be out of range whatever is counted: any of those values may have to be another one.
            anything = asserts or row_of(instr.op).counts
            checked |= {var.storage: anything or checked.get(var.storage, False) for var in instr.inputs()}
        checked |= {var.storage: checked.get(var.storage, False) for var in _in_range_for(instr)}
        checked |= dict.fromkeys((var.storage for var in _asserted_by(instr)), True)


def moved_checks(instrs: Iterable[Instr]) -> dict[Instr, list[Var]]:
    """Return the arguments that calls check, of those that rounding moves, by call; not what is in range anyway."""
    moved, positions, found = set[int](), set[int](), dict[Instr, list[Var]]()
    for instr in instrs:
        checked = dict.fromkeys([*_asserted_by(instr), *_in_range_for(instr)])
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
    row = row_of(instr.op)
    return var not in instr.writes and (
        var.spec.dtype is torch.bool
        or (
            var.spec.dtype in INTEGERS
            and not (instr.by_element or row.casts or row.counts or instr.name.endswith("_ex"))
            and not any(one.spec.dtype in INTEGERS for one in instr.inputs())
        )
    )


def _asserted_by(instr: Instr) -> Iterator[Var]:
    """Yield the arguments that a call may refuse because of their values; a custom op may check anything."""
    if instr.op.namespace not in _OURS or row_of(instr.op).checks:
        yield from instr.inputs()


def _in_range_for(instr: Instr) -> Iterator[Var]:
    """Yield the arguments that have to be in range for a call."""
    row = row_of(instr.op)
    if row.divides or not (instr.by_element or row.lenient or row.casts or instr.is_view):
        yield from (var for var in instr.inputs() if var.spec.dtype in INTEGERS)
