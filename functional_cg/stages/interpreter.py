"""Runs a code object on references in place of values: its stack, its names, and where branches join."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Mapping
from types import CodeType, MappingProxyType
from typing import Any

from . import calls
from .calls import Visitor
from .refs import Made, Refs, either
from .values import KIND, TRUTH

__all__ = ["OPERATORS", "Interpreter"]

_UNCONDITIONAL = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT")

# How many values an instruction takes from the stack, where it reads them and its result is of no interest.
_TAKES = MappingProxyType(
    {
        name: taken
        for taken, names in (
            (0, "RESUME NOP NOT_TAKEN PRECALL CACHE COPY_FREE_VARS MAKE_CELL"),
            (0, "PUSH_NULL LOAD_CLOSURE LOAD_BUILD_CLASS LOAD_COMMON_CONSTANT"),
            (1, "UNARY_NEGATIVE UNARY_INVERT UNARY_NOT CALL_INTRINSIC_1 LIST_TO_TUPLE"),
            (2 if sys.version_info < (3, 13) else 1, "END_FOR"),
            (1, "FORMAT_SIMPLE CONVERT_VALUE LIST_EXTEND SET_UPDATE DICT_UPDATE DICT_MERGE"),
            (2, "COMPARE_OP BINARY_OP FORMAT_WITH_SPEC"),
            (3, "BINARY_SLICE"),
        )
        for name in names.split()
    }
)
_TAKES_BY_ARGUMENT: Mapping[str, Callable[[Any], int]] = MappingProxyType(
    {
        "BUILD_STRING": lambda n: n,
        "BUILD_SLICE": lambda n: n,
        "FORMAT_VALUE": lambda flags: 2 if flags & 4 else 1,
    }
)
# Those that put values elsewhere, or drop them: they read nothing.
_MOVES = MappingProxyType(
    {"POP_TOP": 1, "STORE_GLOBAL": 1, "STORE_NAME": 1, "STORE_ATTR": 2, "STORE_SUBSCR": 3, "DELETE_SUBSCR": 2}
)
OPERATORS = MappingProxyType(
    {
        "+": "__add__", "-": "__sub__", "*": "__mul__", "/": "__truediv__", "//": "__floordiv__", "%": "__mod__",
        "**": "__pow__", "@": "__matmul__", "==": "__eq__", "!=": "__ne__", "<": "__lt__", "<=": "__le__",
        ">": "__gt__", ">=": "__ge__",
    }
)  # fmt: skip
_GENERATOR = 0x20  # the flag of a code object that yields


def _taken(ins: dis.Instruction) -> tuple[int | None, bool]:
    """How many values an instruction takes, or None if it is not known here; and whether it reads them."""
    if ins.opname in _MOVES:
        return _MOVES[ins.opname], False
    if ins.opname in _TAKES_BY_ARGUMENT:
        return _TAKES_BY_ARGUMENT[ins.opname](ins.arg), True
    return _TAKES.get(ins.opname), True


class Interpreter:
    """Runs a code object once, in the order in which it is written; `op_...` of a subclass are the instructions.

    Any other empties the stack, and where branches join a place may stand for what it is in each: what is taken from
    an empty stack is unknown, so that only less is found then.

    Attributes:
      ever: What each local name stands for at one time or another.
    """

    def __init__(
        self, visitor: Visitor, code: CodeType, names: Mapping[str, Refs], namespace: dict[str, Any]
    ) -> None:
        self.visitor, self.code, self.namespace = visitor, code, namespace
        self.names, self.ever = dict(names), dict(names)
        self.stack: list[Refs] = []
        self.falls = True  # whether the instruction before leads to this one
        self.jumps: dict[int, list[tuple[list[Refs], dict[str, Refs]]]] = {}
        self.keywords: tuple[str, ...] = ()
        self.returned: Refs = ()

    def run(self) -> Refs:
        """Read the code; returns what a call of it stands for."""
        for ins in dis.get_instructions(self.code):
            self.join(ins.offset)
            if ins.opcode in dis.hasjrel:
                self.jump(ins)
            else:
                name = f"op_{ins.opname.lower()}"
                handler: Callable[[dis.Instruction], None] = getattr(self, name, self.other)
                handler(ins)
        self.clear()
        return Made.of(self.returned) if self.code.co_flags & _GENERATOR else self.returned

    def jump(self, ins: dis.Instruction) -> None:
        step = calls.elements(self.visitor, self.peek()) if ins.opname == "FOR_ITER" else ()
        if ins.argval > ins.offset:
            effect = dis.stack_effect(ins.opcode, ins.arg, jump=True)
            self.jumps.setdefault(ins.argval, []).append((_grown(self.stack, effect), dict(self.names)))
        if "IF_" in ins.opname:
            self.test(self.peek(), by_kind="NONE" in ins.opname)
        self.falls = ins.opname not in _UNCONDITIONAL
        if self.falls:
            self.stack = _grown(self.stack, dis.stack_effect(ins.opcode, ins.arg, jump=False))
            if step:
                self.stack[-1] = step
        else:
            self.stack = []

    def join(self, offset: int) -> None:
        ways = self.jumps.pop(offset, []) + ([(self.stack, self.names)] if self.falls else [])
        if len(ways) == 1:
            self.stack, self.names = ways[0]
        elif ways:
            depth = min(len(stack) for stack, _ in ways)
            kept = [stack[len(stack) - depth :] for stack, _ in ways]
            self.stack = [either(*places) for places in zip(*kept, strict=True)]
            known = {name for _, names in ways for name in names}
            self.names = {name: either(*(names.get(name, ()) for _, names in ways)) for name in known}
        else:  # a handler of exceptions: anything that was assigned so far
            self.stack, self.names = [], dict(self.ever)
        self.falls = True

    def test(self, refs: Refs, *, by_kind: bool = False) -> None:
        for ref in refs:
            if by_kind:
                self.visitor.note(ref, KIND)
            else:
                calls.length(self.visitor, ref, TRUTH)

    def push(self, refs: Refs) -> None:
        self.stack.append(tuple(map(self.visitor.reach, refs)))

    def peek(self) -> Refs:
        return self.stack[-1] if self.stack else ()

    def pop(self) -> Refs:
        return self.stack.pop() if self.stack else ()

    def take(self, count: int) -> list[Refs]:
        return [self.pop() for _ in range(count)][::-1]

    def clear(self) -> None:
        for refs in self.stack:
            self.visitor.offer(refs)
        self.stack.clear()

    def other(self, ins: dis.Instruction) -> None:
        count, read = _taken(ins)
        if count is None:
            self.clear()
            return
        for refs in self.take(count):
            (self.visitor.use if read else self.visitor.offer)(refs)
        self.stack += [()] * (dis.stack_effect(ins.opcode, ins.arg) + count)


def _grown(stack: list[Refs], effect: int) -> list[Refs]:
    return [*stack, *[()] * effect] if effect >= 0 else stack[:effect]
