"""A code object, read instruction by instruction: which chains of names it follows and what it calls with them."""

from __future__ import annotations

import dis
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import CodeType, MappingProxyType
from typing import Any, Protocol

from .refs import Ref, Step

__all__ = ["Reader", "Visitor"]

_UNCONDITIONAL = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT")

# How many values an instruction takes from the stack, where its result is of no interest.
_TAKES = MappingProxyType(
    {
        name: taken
        for taken, names in (
            (0, "RESUME NOP NOT_TAKEN PRECALL CACHE COPY_FREE_VARS MAKE_CELL"),
            (0, "PUSH_NULL LOAD_CLOSURE LOAD_BUILD_CLASS LOAD_COMMON_CONSTANT"),
            (
                1,
                "UNARY_NEGATIVE UNARY_INVERT UNARY_NOT TO_BOOL GET_ITER POP_TOP CALL_INTRINSIC_1 LIST_TO_TUPLE",
            ),
            (2 if sys.version_info < (3, 13) else 1, "END_FOR"),
            (1, "FORMAT_SIMPLE CONVERT_VALUE LIST_EXTEND SET_UPDATE DICT_UPDATE"),
            (1, "DICT_MERGE LIST_APPEND SET_ADD STORE_GLOBAL STORE_NAME"),
            (
                2,
                "COMPARE_OP IS_OP CONTAINS_OP BINARY_OP STORE_ATTR MAP_ADD FORMAT_WITH_SPEC SET_FUNCTION_ATTRIBUTE",
            ),
            (3, "STORE_SUBSCR BINARY_SLICE"),
        )
        for name in names.split()
    }
)
_TAKES_BY_ARGUMENT: Mapping[str, Callable[[Any], int]] = MappingProxyType(
    {
        "BUILD_TUPLE": lambda n: n,
        "BUILD_LIST": lambda n: n,
        "BUILD_SET": lambda n: n,
        "BUILD_STRING": lambda n: n,
        "BUILD_SLICE": lambda n: n,
        "BUILD_MAP": lambda n: 2 * n,
        "BUILD_CONST_KEY_MAP": lambda n: n + 1,
        "FORMAT_VALUE": lambda flags: 2 if flags & 4 else 1,
        "MAKE_FUNCTION": lambda flags: 1 + (flags or 0).bit_count(),
    }
)


class Visitor(Protocol):
    """What a `Reader` tells of."""

    def reach(self, ref: Ref | None, /) -> Ref | None:
        """A name or a chain leads to this."""

    def offer(self, ref: Ref | None, /) -> None:
        """This is handed on to something unknown, which may call it."""

    def enter(
        self, ref: Ref, args: Sequence[Ref | None] = (), kwargs: Mapping[str, Ref | None] = ..., /
    ) -> bool:
        """This is called; returns whether what becomes of the arguments is known then."""


class Reader:
    """Runs a code object on references in place of values, once and in the order in which it is written.

    It knows the instructions that make chains and calls. Any other empties the stack, and where branches join only
    what they agree on is kept: what is taken from an empty stack is unknown, so nothing wrong is found, only less.
    """

    def __init__(
        self, visitor: Visitor, code: CodeType, names: dict[str, Ref], namespace: dict[str, Any]
    ) -> None:
        self.visitor, self.code, self.names, self.namespace = visitor, code, names, namespace
        self.stack: list[Ref | None] = []
        self.falls = True  # whether the instruction before leads to this one
        self.jumps: dict[int, list[list[Ref | None]]] = {}
        self.keywords: tuple[str, ...] = ()
        self.stores: Counter[str] = Counter()

    def run(self) -> None:
        """Read the code; `names` gains what local variables stand for."""
        instructions = list(dis.get_instructions(self.code))
        for ins in instructions:
            if ins.opname.startswith(("STORE_FAST", "STORE_DEREF")):
                self.stores.update(ins.argval if isinstance(ins.argval, tuple) else [ins.argval])
        for ins in instructions:
            self.join(ins.offset)
            if ins.opcode in dis.hasjrel:
                self.jump(ins)
            else:
                handler: Callable[[dis.Instruction], None] = getattr(
                    self, f"op_{ins.opname.lower()}", self.other
                )
                handler(ins)
        self.clear()

    # -- branches -----------------------------------------------------------------------------------------------

    def jump(self, ins: dis.Instruction) -> None:
        if ins.argval > ins.offset:
            effect = dis.stack_effect(ins.opcode, ins.arg, jump=True)
            self.jumps.setdefault(ins.argval, []).append(_grown(self.stack, effect))
        self.falls = ins.opname not in _UNCONDITIONAL
        if self.falls:
            effect = dis.stack_effect(ins.opcode, ins.arg, jump=False)
            self.spend(self.stack[len(self.stack) + effect :] if effect < 0 else ())
            self.stack = _grown(self.stack, effect)
        else:
            self.stack = []

    def join(self, offset: int) -> None:
        stacks = self.jumps.pop(offset, [])
        if stacks:
            stacks += [self.stack] if self.falls else []
            depth = min(map(len, stacks))
            kept = [stack[len(stack) - depth :] for stack in stacks]
            self.stack = [
                refs[0] if all(ref is refs[0] for ref in refs) else None for refs in zip(*kept, strict=True)
            ]
            self.spend(ref for stack in stacks for ref in stack if not any(ref is one for one in self.stack))
        self.falls = True

    # -- the stack ----------------------------------------------------------------------------------------------

    def push(self, ref: Ref | None) -> None:
        self.stack.append(self.visitor.reach(ref))

    def pop(self) -> Ref | None:
        return self.stack.pop() if self.stack else None

    def take(self, count: int) -> list[Ref | None]:
        return [self.pop() for _ in range(count)][::-1]

    def spend(self, refs: Iterable[Ref | None]) -> None:
        """What is handed on to something unknown may be called there."""
        for ref in refs:
            self.visitor.offer(ref)

    def clear(self) -> None:
        self.spend(self.stack)
        self.stack.clear()

    def other(self, ins: dis.Instruction) -> None:
        count = _TAKES.get(ins.opname)
        if count is None and ins.opname in _TAKES_BY_ARGUMENT:
            count = _TAKES_BY_ARGUMENT[ins.opname](ins.arg)
        if count is None:
            self.clear()
            return
        self.spend(self.take(count))
        self.stack += [None] * (dis.stack_effect(ins.opcode, ins.arg) + count)

    # -- names --------------------------------------------------------------------------------------------------

    def op_load_global(self, ins: dis.Instruction) -> None:
        if ins.arg is not None and ins.arg & 1 and ins.opname == "LOAD_GLOBAL":
            self.stack.append(None)
        name = ins.argval
        if name in self.namespace:
            value = self.namespace[name]
            self.push(Ref(value, self.namespace, (Step(name, item=True),), name))
        else:
            self.push(Ref(super) if name == "super" else None)

    op_load_name = op_load_global

    def op_load_fast(self, ins: dis.Instruction) -> None:
        # From Python 3.13 on LOAD_FAST of a cell loads the cell, for the closure of an inner function.
        cells = self.code.co_cellvars + self.code.co_freevars if ins.opname.startswith("LOAD_FAST") else ()
        for name in ins.argval if isinstance(ins.argval, tuple) else (ins.argval,):
            self.push(None if name in cells else self.names.get(name))

    op_load_deref = op_load_classderef = op_load_fast_check = op_load_fast_and_clear = op_load_fast
    op_load_fast_borrow = op_load_fast_load_fast = op_load_fast_borrow_load_fast_borrow = op_load_fast

    def op_load_const(self, ins: dis.Instruction) -> None:
        self.push(Ref(ins.argval))

    op_load_small_int = op_load_const

    def store(self, name: str) -> None:
        ref = self.pop()
        # The text is read once, in its order: a name that is assigned twice stands for nothing known.
        if ref is not None and self.stores[name] == 1:
            self.names[name] = ref
        else:
            self.spend([ref])
            self.names.pop(name, None)

    def op_store_fast(self, ins: dis.Instruction) -> None:
        for name in ins.argval if isinstance(ins.argval, tuple) else (ins.argval,):
            self.store(name)

    op_store_deref = op_store_fast_store_fast = op_store_fast

    def op_store_fast_load_fast(self, ins: dis.Instruction) -> None:
        self.store(ins.argval[0])
        self.push(self.names.get(ins.argval[1]))

    # -- chains -------------------------------------------------------------------------------------------------

    def op_load_attr(self, ins: dis.Instruction) -> None:
        owner = self.pop()
        found = owner.attribute(ins.argval) if owner is not None else None
        if found is not None and isinstance(found.value, property):
            self.visitor.enter(found)
            found = None
        elif found is None and owner is not None and owner.computes_attributes is not None:
            self.visitor.enter(owner.computes_attributes, [Ref(ins.argval)])
        self.push(found)
        # From Python 3.12 on a flag says that a method is loaded, which fills two places.
        if ins.opname == "LOAD_METHOD" or (
            sys.version_info >= (3, 12) and ins.arg is not None and ins.arg & 1
        ):
            self.stack.append(None)

    op_load_method = op_load_attr

    def op_load_super_attr(self, ins: dis.Instruction) -> None:
        _, cls, instance = self.take(3)
        self.stack.append(_super(cls, instance))
        self.op_load_attr(ins)

    def op_binary_subscr(self, ins: dis.Instruction) -> None:
        owner, key = self.take(2)
        self.push(owner.item(key.value) if owner is not None and key is not None else None)

    def op_binary_op(self, ins: dis.Instruction) -> None:
        if ins.argrepr == "[]":
            self.op_binary_subscr(ins)
        else:
            self.other(ins)

    def op_copy(self, ins: dis.Instruction) -> None:
        depth = ins.arg or 0
        self.stack.append(self.stack[-depth] if depth <= len(self.stack) else None)

    def op_swap(self, ins: dis.Instruction) -> None:
        depth = ins.arg or 0
        if depth > len(self.stack):
            self.clear()
        else:
            self.stack[-1], self.stack[-depth] = self.stack[-depth], self.stack[-1]

    # -- calls --------------------------------------------------------------------------------------------------

    def op_kw_names(self, ins: dis.Instruction) -> None:
        self.keywords = self.code.co_consts[ins.arg or 0]

    def op_call_kw(self, ins: dis.Instruction) -> None:
        names = self.pop()
        self.keywords = names.value if names is not None else ()
        self.op_call(ins)

    def op_call(self, ins: dis.Instruction) -> None:
        args = self.take(ins.arg or 0)
        names, self.keywords = self.keywords, ()
        split = len(args) - len(names)
        self.call(args[:split], dict(zip(names, args[split:], strict=True)))

    def op_call_function_ex(self, ins: dis.Instruction) -> None:
        given = 2 if sys.version_info >= (3, 14) else 1 + ((ins.arg or 0) & 1)
        self.spend(self.take(given))
        self.call([], {})

    def call(self, args: list[Ref | None], kwargs: dict[str, Ref | None]) -> None:
        """Call what lies under the arguments: two places, of which one is empty or, for a method, its ``self``."""
        first, second = self.take(2)
        callee = first or second
        result = None
        if callee is not None and callee.value is super:
            cls, instance = self.names.get("__class__"), self.names.get(next(iter(self.code.co_varnames), ""))
            result = _super(cls, instance)
        elif callee is not None and callee.value is dict.get and callee.bound is not None:
            key = args[0] if args else None
            result = self.visitor.reach(callee.bound.item(key.value)) if key is not None else None
        elif callee is None or not self.visitor.enter(callee, args, kwargs):
            self.spend([*args, *kwargs.values()])
        self.stack.append(result)


def _super(cls: Ref | None, instance: Ref | None) -> Ref | None:
    if (
        cls is None
        or instance is None
        or not isinstance(cls.value, type)
        or not isinstance(instance.value, cls.value)
    ):
        return None
    return Ref(super(cls.value, instance.value), bound=instance)


def _grown(stack: list[Ref | None], effect: int) -> list[Ref | None]:
    return [*stack, *[None] * effect] if effect >= 0 else stack[:effect]
