"""Which slots and inputs may hold any value: those from which no call computes what it checks.

A step is run on other values than those of its call to warm up, and to see what a compiled function keeps of its first
inputs. A call that checks its values raises there; on a GPU it leaves a device that answers nothing any more, and a
division of integers by zero ends the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ...tensors.aten import returns_view
from ..program import Instr, Program, Var

__all__ = ["Unchecked"]

_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})
# They check numbers of any kind: probabilities, a scale that is not negative. Beginnings of names.
_STRICT = (
    "multinomial",
    "bernoulli",
    "binomial",
    "poisson",
    "normal",
    "binary_cross_entropy",
    "fractional_max_pool",
    "_assert_async",
)
_DIVISIONS = ("div", "floor_divide", "remainder", "fmod")
# Calls that take any integers, though no call by call of their elements.
_CASTS = frozenset({"_to_copy", "copy_"})
_LENIENT = _CASTS | frozenset("cat stack sum cumsum amax amin any all max min repeat sort".split())
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
        """What a program leaves free.

        Its calls are read from the last to the first: what a checked value is computed from is checked, too.
        """
        checked: set[int] = set()  # storages
        for instr in reversed(program.instrs):
            made = (*instr.writes, *(var for var in instr.outputs() if not _is_position(instr, var)))
            if any(var.storage in checked for var in made):
                checked.update(var.storage for var in instr.inputs())
            checked.update(var.storage for var in _checked_by(instr))
        return cls(
            tuple(var.storage not in checked for var in program.slots),
            tuple(var.storage not in checked for var in program.inputs),
        )


def _is_position(instr: Instr, var: Var) -> bool:
    """Whether a result lies in a range whatever the arguments are: a flag, or integers that are no cast of numbers."""
    if var.spec.dtype is torch.bool:
        return True
    numbers = all(one.spec.dtype not in _INTEGERS for one in instr.inputs())
    return var.spec.dtype in _INTEGERS and numbers and not instr.by_element and instr.name not in _CASTS


def _checked_by(instr: Instr) -> Iterator[Var]:
    """The arguments of a call that it may refuse for their values."""
    if instr.op.namespace not in _OURS:
        yield from instr.inputs()  # nobody knows
        return
    name = instr.name
    if name.startswith(_STRICT):
        yield from instr.inputs()
    elif name.startswith(_DIVISIONS) or not (instr.by_element or name in _LENIENT or returns_view(instr.op)):
        yield from (var for var in instr.inputs() if var.spec.dtype in _INTEGERS)
