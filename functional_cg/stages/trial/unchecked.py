"""Find the slots and inputs that may hold any value: no call checks a value that is computed from them.

A step also runs on values other than those of its call: to warm up, and to reveal what a compiled function keeps of its
first inputs. A call that checks its values may raise there. On a GPU a failed check makes the device unusable, and on a
CPU an integer division by zero kills the process.

There are two kinds of checks. An index must be in range; one made from a comparison or from ``argmax`` of floats always
is, so the walk stops there. An assertion, or a check of probabilities, may fail for any reason, so the walk continues
through comparisons, too: it is the strict one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ..program import Instr, Program, Var
from ..template import Template

__all__ = ["Unchecked"]

_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})
# Prefixes of ops that check numbers of any dtype (probabilities, a nonnegative scale, a matrix to be decomposed), or
# that read where these say: a sample of an image at NaN ends the process on a host, as may what a mask lets through.
_STRICT = (
    "multinomial",
    "bernoulli",
    "binomial",
    "poisson",
    "normal",
    "binary_cross_entropy",
    "fractional_max_pool",
    "grid_sampler",
    "_unsafe_masked_index",
    "linalg_eig",
    "_linalg_",
    "_assert_async",
)
_DIVISIONS = ("div", "floor_divide", "remainder", "fmod")
# Calls that accept any integers although they are not elementwise; for attention, they are keys and bits of a mask.
_CASTS = frozenset({"_to_copy", "copy_"})
_LENIENT = _CASTS | frozenset(
    "cat stack sum cumsum amax amin any all max min repeat sort"
    " scaled_dot_product_dropout_attention scaled_dot_product_dropout_attention_backward".split()
)
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
        of_inputs, of_slots = set[int](), set[int]()  # storages
        for strict in (False, True):
            calls = _in_reverse(program.instrs, strict=strict)
            checked = _computed_from(calls, set())
            of_inputs |= checked
            known: set[int] = set()
            while known != checked:
                kept = zip(program.slots, program.new_state, strict=False)
                new = {new.storage for old, new in kept if old.storage in checked}
                known, checked = checked, _computed_from(calls, checked | new)
            of_slots |= checked
        return cls(
            tuple(var.storage not in of_slots for var in program.slots),
            tuple(var.storage not in of_inputs for var in program.inputs),
        )


@dataclass(frozen=True, slots=True)
class _Call:
    """What a call does with memory.

    Attributes:
      made: The storages of the arguments from which it computes each storage that it makes or writes. If not strict,
        results that are in range for any arguments are left out.
      checked: The storages of the arguments that it may refuse because of their values.
    """

    made: Mapping[int, Collection[int]]
    checked: Collection[int]

    @classmethod
    def of(cls, instr: Instr, *, strict: bool) -> _Call:
        if isinstance(instr.op, Template):
            checked, made = instr.op.known(f"unchecked, {strict}", partial(_summary, strict=strict))
            given = [var.storage for var in instr.args[0]]
            pairs = ((instr.out[place].storage, [given[one] for one in of]) for place, of in made)
            return cls(dict(pairs), [given[one] for one in checked])
        written = (*instr.writes, *(var for var in instr.outputs() if strict or not _is_position(instr, var)))
        read = {var.storage for var in instr.inputs()}
        refused = _asserted_by(instr) if strict else _in_range_for(instr)
        return cls(dict.fromkeys((var.storage for var in written), read), [var.storage for var in refused])


def _in_reverse(instrs: Sequence[Instr], *, strict: bool) -> list[_Call]:
    """Return what calls do, last call first. If strict, they check any values; else, whether indices are in range."""
    return [_Call.of(instr, strict=strict) for instr in reversed(instrs)]


def _summary(template: Template, *, strict: bool) -> tuple[Sequence[int], list[tuple[int, Sequence[int]]]]:
    """Return which arguments a template checks, and from which it computes each storage of its results, by place."""
    calls, given = _in_reverse(template.calls, strict=strict), [var.storage for var in template.given]

    def among(storages: set[int]) -> Sequence[int]:
        return [number for number, one in enumerate(given) if one in storages]

    places = {var.storage: place for place, var in enumerate(template.results)}
    made = [(place, among(_computed_from(calls, {storage}))) for storage, place in places.items()]
    return among(_computed_from(calls, set())), made


def _computed_from(calls: Iterable[_Call], checked: set[int]) -> set[int]:
    """Add to checked storages those that the calls check, and all from which these are computed; return the set.

    Args:
      calls: The calls, the last one first.
      checked: Storages that are checked after the calls; written.
    """
    for call in calls:
        for made in call.made.keys() & checked:
            checked.update(call.made[made])
        checked.update(call.checked)
    return checked


def _is_position(instr: Instr, var: Var) -> bool:
    """Whether a result is in range for any arguments: a flag, or integers from floats without a cast.

    How a decomposition went, which those ending with ``_ex`` return, is checked by a call of its own.
    """
    if var.spec.dtype is torch.bool:
        return True
    if (
        var.spec.dtype not in _INTEGERS
        or instr.by_element
        or instr.name in _CASTS
        or instr.name.endswith("_ex")
    ):
        return False
    return all(one.spec.dtype not in _INTEGERS for one in instr.inputs())


def _asserted_by(instr: Instr) -> Iterator[Var]:
    """Yield the arguments that a call may refuse because of their values; a custom op may check anything."""
    if instr.op.namespace not in _OURS or instr.name.startswith(_STRICT):
        yield from instr.inputs()


def _in_range_for(instr: Instr) -> Iterator[Var]:
    """Yield the arguments that have to be in range for a call."""
    name = instr.name
    if name.startswith(_DIVISIONS) or not (instr.by_element or name in _LENIENT or instr.is_view):
        yield from (var for var in instr.inputs() if var.spec.dtype in _INTEGERS)
