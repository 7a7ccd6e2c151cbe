"""Read the evaluation stack of a running frame: what an instruction is about to use.

Python exposes the names of a frame, but not its stack, so this follows CPython's own layout of a frame
(`Include/internal/pycore_frame.h`; from 3.14 on `pycore_interpframe_structs.h`). How deep the stack is at each
instruction follows from the code alone.
"""

from __future__ import annotations

import ctypes
import dis
import functools
import itertools
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from types import CodeType, FrameType, FunctionType, MappingProxyType
from typing import Any

from .kinds import UNKNOWN

__all__ = ["CODES", "Evaluation", "depths_of", "function_of", "instructions_of", "readable"]

CODES = 512  # whose instructions are remembered: every trace asks for those of the same modules
_WORD = 8  # bytes
_INNER = 3 * _WORD  # offset of `f_frame` in a frame object: after the object's head and `f_back`
# By version, of an inner frame: which word is its function, words in front of `localsplus`, bits that tag a slot.
_LAYOUTS = MappingProxyType({(3, 11): (0, 9, 0), (3, 12): (2, 9, 0), (3, 13): (2, 9, 0), (3, 14): (2, 10, 3)})
_CALLS_IN_TWO = sys.version_info[:2] == (3, 11)
_ENDS = frozenset({"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"})


def readable() -> bool:
    """Whether the layout of this interpreter's frames is known here."""
    plain = not (sysconfig.get_config_var("Py_GIL_DISABLED") or hasattr(sys, "getobjects"))
    known = sys.implementation.name == "cpython" and sys.version_info[:2] in _LAYOUTS
    return plain and known and ctypes.sizeof(ctypes.c_void_p) == _WORD


class Evaluation:
    """The evaluation stack of all frames of one code.

    Args:
      code: The code.
    """

    def __init__(self, code: CodeType) -> None:
        names = set(code.co_varnames)
        cells = sum(name not in names for name in code.co_cellvars)
        _, before, self._tag = _LAYOUTS[sys.version_info[:2]]
        self._first = _WORD * (before + len(code.co_varnames) + cells + len(code.co_freevars))
        self._depths = depths_of(code)

    def top(self, frame: FrameType, offset: int, count: int) -> list[Any]:
        """Return what the uppermost slots hold before the instruction at ``offset``, the deepest first.

        The frame must be in a trace function, or in a callback of ``sys.monitoring``. A slot without an object gives
        UNKNOWN.
        """
        address = _inner(frame) + self._first + _WORD * (self._depths[offset] - count)
        if not self._tag:
            try:
                return list(_slots(ctypes.py_object, count).from_address(address))
            except ValueError:  # one of them is empty
                pass
        held = _slots(ctypes.c_size_t, count).from_address(address)
        return [_object(one, self._tag) for one in held]


def function_of(frame: FrameType) -> FunctionType:
    """Return the function that a frame runs."""
    word, _, tag = _LAYOUTS[sys.version_info[:2]]
    found = _object(ctypes.c_size_t.from_address(_inner(frame) + _WORD * word).value, tag)
    assert type(found) is FunctionType
    return found


def _inner(frame: FrameType) -> int:
    return ctypes.c_size_t.from_address(id(frame) + _INNER).value


def _object(held: int, tag: int) -> Any:
    if held & ~tag == 0 or (tag and held & tag == tag):  # empty, or a small number
        return UNKNOWN
    return ctypes.cast(held & ~tag, ctypes.py_object).value


@functools.cache
def _slots(kind: Any, count: int) -> Any:
    return kind * count


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
