"""The stack of a running frame: what its instructions load, and what they compute."""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable, Mapping
from types import CodeType, FrameType, MappingProxyType, ModuleType
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ...messages.source import is_installed
from .evaluation import CODES, EMPTY, Evaluation, instructions_of
from .kinds import UNKNOWN, is_key
from .names import HostReads
from .values import holds, in_classes, is_container

__all__ = ["NULL", "Stack"]

NULL: Any = object()  # the empty slot beside a callee

# How many values an instruction pops. One that is in no table and has no method `op_...` clears the stack.
_TAKES = MappingProxyType(
    {
        name: taken
        for taken, names in (
            (0, "RESUME NOP NOT_TAKEN PRECALL CACHE COPY_FREE_VARS MAKE_CELL RETURN_GENERATOR JUMP_FORWARD"),
            (
                0,
                "JUMP_BACKWARD JUMP_BACKWARD_NO_INTERRUPT LOAD_CLOSURE LOAD_BUILD_CLASS LOAD_COMMON_CONSTANT",
            ),
            (0, "LOAD_ASSERTION_ERROR SETUP_ANNOTATIONS GEN_START DELETE_FAST DELETE_GLOBAL DELETE_NAME"),
            (1, "UNARY_NEGATIVE UNARY_INVERT UNARY_POSITIVE UNARY_NOT TO_BOOL CALL_INTRINSIC_1"),
            (1, "POP_JUMP_IF_TRUE POP_JUMP_IF_FALSE POP_JUMP_IF_NONE POP_JUMP_IF_NOT_NONE"),
            (1, "POP_JUMP_FORWARD_IF_TRUE POP_JUMP_FORWARD_IF_FALSE POP_JUMP_FORWARD_IF_NONE"),
            (1, "POP_JUMP_BACKWARD_IF_TRUE POP_JUMP_BACKWARD_IF_FALSE POP_JUMP_BACKWARD_IF_NONE"),
            (1, "POP_JUMP_FORWARD_IF_NOT_NONE POP_JUMP_BACKWARD_IF_NOT_NONE"),
            (1, "LIST_TO_TUPLE FORMAT_SIMPLE CONVERT_VALUE LIST_EXTEND SET_UPDATE DICT_UPDATE DICT_MERGE"),
            (2, "COMPARE_OP BINARY_OP FORMAT_WITH_SPEC"),
            (3, "BINARY_SLICE"),
        )
        for name in names.split()
    }
)
_TAKES_BY_ARGUMENT: Mapping[str, Callable[[int], int]] = MappingProxyType(
    {
        "BUILD_STRING": lambda n: n,
        "BUILD_SLICE": lambda n: n,
        "BUILD_LIST": lambda n: n,
        "BUILD_SET": lambda n: n,
        "BUILD_MAP": lambda n: 2 * n,
        "BUILD_CONST_KEY_MAP": lambda n: n + 1,
        "FORMAT_VALUE": lambda flags: 2 if flags & 4 else 1,
    }
)
# What a program asks of a class to tell it from others.
_NAMES_OF_CLASSES = frozenset({"__name__", "__qualname__", "__module__"})
# These move or drop values and read nothing.
_MOVES = MappingProxyType({"POP_TOP": 1, "BUILD_LIST": 1, "END_FOR": 1})


def _is_found_again(arg: Any) -> bool:
    """Whether a cached call with this argument can be repeated without running user code for the lookup."""
    return arg is not UNKNOWN and (
        is_key(arg) or in_classes(type(arg).__mro__, "__hash__") is object.__hash__
    )


def _called(args: list[Any], kwargs: dict[str, Any], callee: Any) -> Any:
    return callee(*args, **kwargs)


@functools.lru_cache(maxsize=CODES)
def _steps(code: CodeType) -> Mapping[int, tuple[dis.Instruction, int, str]]:
    """Return by offset an instruction, the offset of the next, and the name of the method that handles it.

    An ``EXTENDED_ARG`` maps to the instruction that it belongs to.
    """
    known: dict[int, tuple[dis.Instruction, int, str]] = {}
    following = -1
    for ins in reversed(instructions_of(code)):
        extends = ins.opname == "EXTENDED_ARG"
        known[ins.offset] = known[following] if extends else (ins, following, f"op_{ins.opname.lower()}")
        following = ins.offset
    return known


class Stack:
    """The stack of one frame.

    Args:
      frame: The frame, at its start.
      reads: Records what is read.
      own: Whether the code is the user's. In a library's code, only reads from known objects count.
    """

    def __init__(self, frame: FrameType, reads: HostReads, *, own: bool) -> None:
        self.frame, self.reads, self.own = frame, reads, own
        self.code, self.stack = frame.f_code, list[Any]()
        self.result: Any = UNKNOWN  # of the last frame that this one called
        self._instructions, self._evaluation = _steps(self.code), Evaluation(self.code)
        self._last: tuple[dis.Instruction, int, str] | None = None
        self._awaits = False
        self._kept: tuple[Any, Callable[[Any], Any], int] | None = None
        self._keywords: tuple[str, ...] = ()
        self._cells = reads.enter(frame) if own else {}

    def leave(self) -> None:
        """Release the frame."""
        del self.frame
        self.stack.clear()

    @property
    def is_fresh(self) -> bool:
        """Whether a generator whose frame starts has not yielded before."""
        ins = self._instructions[self.frame.f_lasti][0] if self.frame.f_lasti in self._instructions else None
        went_on = ins is not None and (
            ins.opname in ("YIELD_VALUE", "SEND") or (ins.opname == "RESUME" and ins.arg)
        )
        return not went_on

    def step(self, offset: int) -> None:
        """Handle an instruction that is about to run."""
        here = self._instructions.get(offset)
        if here is None or here is self._last:  # was handled at its EXTENDED_ARG
            return
        self._finish(here[0].offset)
        self._look(offset)
        self._last, self.result = here, UNKNOWN
        ins, _, method = here
        self.reads.frame = self.frame
        getattr(self, method, self.other)(ins)

    def _look(self, offset: int) -> None:
        """See in the frame itself what the shadow does not know: computed values, and all after it lost track."""
        depth = self._evaluation.depth(offset)
        if depth is None:
            return
        if len(self.stack) != depth:
            self.stack = [UNKNOWN] * depth
        for slot in reversed(range(depth)):
            if self.stack[slot] is not UNKNOWN:
                break
            self.stack[slot] = self._seen(slot)

    def _seen(self, slot: int) -> Any:
        value = self._evaluation.value(self.frame, slot)
        if value is EMPTY:
            return NULL
        if slot and self.stack[slot - 1] is NULL:  # a method lies there as two: function and instance
            function = self._evaluation.value(self.frame, slot - 1)
            return value if function is EMPTY else function.__get__(value, type(value))
        return value

    def _finish(self, offset: int) -> None:
        """Complete the last instruction, which has run and led here."""
        if self._last is None:
            return
        ins, following, _ = self._last
        after = self._instructions.get(following)
        falls = offset == following or (after is not None and after[0].offset == offset)
        if self._awaits and self.stack and falls:
            self.stack[-1] = self._answer()
        self._awaits, self._kept = False, None
        if "FOR_ITER" in ins.opname:
            if falls:
                self.stack.append(UNKNOWN)
            else:
                self.pop()
        elif "OR_POP" in ins.opname:
            if falls:
                self.pop()
        elif not falls and ins.opcode not in dis.hasjrel:
            self.stack.clear()  # an exception led here

    # -- the stack ------------------------------------------------------------------------------------------------

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        return self.stack.pop() if self.stack else UNKNOWN

    def peek(self) -> Any:
        return self.stack[-1] if self.stack else UNKNOWN

    def take(self, count: int) -> list[Any]:
        return [self.pop() for _ in range(count)][::-1]

    def await_result(self) -> None:
        """Push a placeholder for what the frame that is now called returns."""
        self.push(UNKNOWN)
        self._awaits = True

    def await_kept(self, callee: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Push a placeholder for a cached result of an earlier call, else for what the frame returns."""
        self.await_result()
        if all(map(_is_found_again, (*args, *kwargs.values()))):
            self._kept = callee, functools.partial(_called, args, kwargs), callee.cache_info().hits

    def _answer(self) -> Any:
        """Return the result of the call that has just ended."""
        kept, self._kept = self._kept, None
        if kept is None:
            return self.result
        callee, ask, hits = kept
        value = ask(callee) if callee.cache_info().hits > hits else self.result
        return value if value is UNKNOWN else self.reads.holds(callee, ask, value)

    def use_class(self, owner: Any) -> None:
        """Record that the class of an object, with its bases, matters."""
        if self._reads_from(owner):
            self.reads.shape_of(type(owner))

    def changes(self, owner: Any) -> None:
        """Record that the step may change an object in place; of tensors, its ops tell."""
        if self._reads_from(owner) and not issubclass(type(owner), Tensor):
            self.reads.changed(owner)

    def use(self, value: Any, *, deep: bool = False) -> None:
        if self._reads_from(value):
            self.asks_for_type(value)
            self.reads.use(value, deep=deep)

    def asks_for_type(self, value: Any, *, among: Any = UNKNOWN) -> None:
        """Record that the user's code uses the type of a traced tensor, which is not that of ordinary ones.

        An installed library may ask for its name or look it up in a table: it is written for tensors of any class,
        and falls back on ``isinstance`` where it finds none. To ask whether it is one of a few is to compare.

        Args:
          value: What is used: matters if it is that type.
          among: A container that it is looked for in; does not matter if it holds neither of the two.
        """
        if not self.own or value is not FakeTensor:
            return
        if is_installed(self.code.co_filename):
            asks = issubclass(type(among), list | tuple | set | frozenset) and holds(among, Tensor)
        else:
            opaque = among is UNKNOWN or not is_container(among)
            asks = opaque or holds(among, Tensor) or holds(among, FakeTensor)
        if asks:
            self.reads.asks_for_type()

    def other(self, ins: dis.Instruction) -> None:
        name, arg = ins.opname, ins.arg or 0
        if name in _TAKES_BY_ARGUMENT:
            count = _TAKES_BY_ARGUMENT[name](arg)
            deep = name == "FORMAT_VALUE"
        elif name in _MOVES:
            count, deep = _MOVES[name], False
        elif name in _TAKES:
            count, deep = _TAKES[name], True
        else:
            self.stack.clear()
            return
        for value in self.take(count):
            if "IF_" in name or name in ("UNARY_NOT", "TO_BOOL"):
                if "NONE" not in name:
                    self.size(value, truth=True)
            elif deep:
                self.use(value, deep=True)
        for _ in range(dis.stack_effect(ins.opcode, ins.arg, jump=False) + count):
            self.push(UNKNOWN)

    def attribute(self, owner: Any, name: str) -> Any:
        """Return ``owner.name`` and record the read; UNKNOWN if the read does not count."""
        if self.own and type(owner) is ModuleType:
            self.reads.of_library(owner, name)
        if name in _NAMES_OF_CLASSES:
            self.asks_for_type(owner)
        return self.reads.attribute(owner, name) if self._reads_from(owner) else UNKNOWN

    def stored(self, owner: Any, name: Any) -> Any:
        """Return ``object.__getattribute__(owner, name)``, as :meth:`attribute` does."""
        known = type(name) is str and self._reads_from(owner)
        return self.reads.attribute(owner, name, stored=True) if known else UNKNOWN

    def item(self, owner: Any, key: Any) -> Any:
        """Return ``owner[key]``, as :meth:`attribute` does."""
        self.asks_for_type(key, among=owner)
        return self.reads.item(owner, key) if self._reads_from(owner) else UNKNOWN

    def size(self, owner: Any, *, truth: bool = False) -> None:
        """Record a read of ``len(owner)``, or of its truth value."""
        if self._reads_from(owner):
            self.reads.size(owner, truth=truth)

    def _reads_from(self, owner: Any) -> bool:
        if owner is UNKNOWN or owner is NULL:
            return False
        known = self.reads.known(owner)
        return self.own or (known is not None and known.root.outlives) or type(owner) is super
