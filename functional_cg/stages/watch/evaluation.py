"""Read the evaluation stack of a running frame: where a computed value is until it has a name.

Python exposes the names of a frame, but not its stack, so this follows CPython's own layout of a frame (3.11 to 3.13;
`Include/internal/pycore_frame.h`). How deep the stack is at each instruction follows from the code alone. Elsewhere
nothing is read: a computed value is then unknown until it is stored under a name.
"""

from __future__ import annotations

import ctypes
import dis
import functools
import itertools
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from types import CodeType, FrameType
from typing import Any

__all__ = ["CODES", "EMPTY", "Evaluation", "depths_of", "instructions_of", "readable"]

EMPTY: Any = object()  # a slot that holds no object
CODES = 512  # whose instructions are remembered: every trace asks for those of the same modules
_WORD = 8  # bytes
_INNER = 3 * _WORD  # offset of `f_frame` in a frame object: after the object's head and `f_back`
_LOCALS = 9 * _WORD  # offset of `localsplus` in an inner frame
_CALLS_IN_TWO = sys.version_info[:2] == (3, 11)
_ENDS = frozenset({"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"})


def readable() -> bool:
    """Whether this interpreter has a layout that is known here."""
    plain = not (sysconfig.get_config_var("Py_GIL_DISABLED") or hasattr(sys, "getobjects"))
    known = sys.implementation.name == "cpython" and (3, 11) <= sys.version_info[:2] <= (3, 13)
    return plain and known and ctypes.sizeof(ctypes.c_void_p) == _WORD


class Evaluation:
    """The evaluation stack of all frames of one code.

    Args:
      code: The code.
    """

    def __init__(self, code: CodeType) -> None:
        names = set(code.co_varnames)
        cells = sum(name not in names for name in code.co_cellvars)
        self._first = _LOCALS + _WORD * (len(code.co_varnames) + cells + len(code.co_freevars))
        self._depths = depths_of(code)

    def depth(self, offset: int) -> int | None:
        """Return how many slots are in use before the instruction at ``offset``; None if that is not known."""
        return self._depths.get(offset)

    def value(self, frame: FrameType, slot: int) -> Any:
        """Return what a slot in use holds, counted from the bottom; the frame must be in a trace function."""
        inner = ctypes.c_void_p.from_address(id(frame) + _INNER).value
        assert inner is not None
        address = inner + self._first + _WORD * slot
        if not ctypes.c_void_p.from_address(address).value:
            return EMPTY
        return ctypes.py_object.from_address(address).value


@functools.lru_cache(maxsize=CODES)
def instructions_of(code: CodeType) -> tuple[dis.Instruction, ...]:
    """Return the instructions of a code, in order."""
    return tuple(dis.get_instructions(code))


@functools.lru_cache(maxsize=CODES)
def depths_of(code: CodeType) -> Mapping[int, int]:
    """Return the depth of the stack before each instruction; nothing if unknown, or if two ways to one disagree."""
    if not readable():
        return {}
    instructions = instructions_of(code)
    following = {one.offset: after for one, after in itertools.pairwise(instructions)}
    by_offset = {one.offset: one for one in instructions}
    found: dict[int, int] = {}
    left = [(0, 0), *_handlers(code)]
    while left:
        offset, depth = left.pop()
        if offset not in found:
            found[offset] = depth
            left += _next(by_offset[offset], following.get(offset), depth)
        elif found[offset] != depth:
            return {}
    return found


def _next(ins: dis.Instruction, after: dis.Instruction | None, depth: int) -> Iterator[tuple[int, int]]:
    """Yield the offsets to which an instruction leads, each with the depth there."""
    arg = ins.arg if ins.opcode >= dis.HAVE_ARGUMENT else None
    jumps = ins.opcode in dis.hasjrel or ins.opcode in dis.hasjabs
    if jumps:
        yield ins.argval, depth + dis.stack_effect(ins.opcode, arg, jump=True)
    if ins.opname in _ENDS or (jumps and "IF" not in ins.opname and ins.opname not in ("FOR_ITER", "SEND")):
        return
    if after is not None:
        yield after.offset, depth + _effect(ins, arg)


def _effect(ins: dis.Instruction, arg: int | None) -> int:
    """Return by how much the stack grows where an instruction does not jump."""
    effect = dis.stack_effect(ins.opcode, arg, jump=False)
    if ins.opname == "RETURN_GENERATOR":
        return effect + 1  # when it goes on, what is sent is there
    if _CALLS_IN_TWO and ins.opname == "PRECALL":
        return 0  # `dis` lets it take the arguments that the call takes
    return effect - (arg or 0) if _CALLS_IN_TWO and ins.opname == "CALL" else effect


def _handlers(code: CodeType) -> Iterator[tuple[int, int]]:
    """Yield where exceptions are handled, each with the depth there."""
    for entry in dis._parse_exception_table(code):  # type: ignore[attr-defined]
        yield entry.target, entry.depth + entry.lasti + 1
