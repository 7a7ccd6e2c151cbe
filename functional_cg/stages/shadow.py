"""The shadow of a frame: what lies on its stack, as far as it can be told, while its instructions run one by one.

Python shows the names of a running frame, not its stack. What an instruction puts there is told from what it loads;
what is computed is unknown until it is stored under a name, or returned by a frame that is seen.
"""

from __future__ import annotations

import builtins
import dis
import operator
import sys
from collections.abc import Callable, Mapping
from importlib.util import resolve_name
from types import (
    BuiltinFunctionType,
    CodeType,
    FrameType,
    FunctionType,
    MappingProxyType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any

from ..source import Location, is_user_file
from .places import ITEM, Step
from .reads import UNKNOWN, Reads
from .values import in_classes, is_container

__all__ = ["Instructions", "Shadow"]

_NULL: Any = object()  # the empty place beside a function that is called
_BY_VERSION = sys.version_info >= (3, 12)

# How many values an instruction takes from the stack. Others than these and the `op_...` below empty the shadow.
_TAKES = MappingProxyType(
    {
        name: taken
        for taken, names in (
            (0, "RESUME NOP NOT_TAKEN PRECALL CACHE COPY_FREE_VARS MAKE_CELL RETURN_GENERATOR JUMP_FORWARD"),
            (0, "JUMP_BACKWARD JUMP_BACKWARD_NO_INTERRUPT LOAD_CLOSURE LOAD_BUILD_CLASS LOAD_COMMON_CONSTANT"),
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
# Those that put values elsewhere, or drop them: they read nothing.
_MOVES = MappingProxyType({"POP_TOP": 1, "BUILD_LIST": 1, "DELETE_ATTR": 1, "DELETE_SUBSCR": 2, "END_FOR": 1})
_WRITES = frozenset("append appendleft extend extendleft insert add __setitem__ __setattr__ __init__".split())
_LOOKUPS = frozenset({"get", "setdefault", "__getitem__"})
_GETTERS = (operator.attrgetter, operator.itemgetter)
_SAYS_ALL = frozenset({"__reduce_ex__", "__reduce__", "__getstate__"})


class Instructions:
    """The instructions of code, by offset, each with the offset of the one after it."""

    def __init__(self) -> None:
        self._known: dict[CodeType, dict[int, tuple[dis.Instruction, int]]] = {}

    def of(self, code: CodeType) -> dict[int, tuple[dis.Instruction, int]]:
        """Those of `code`; a long argument counts to the instruction that it belongs to."""
        known = self._known.get(code)
        if known is None:
            known = self._known[code] = {}
            following = -1
            for ins in reversed(list(dis.get_instructions(code))):
                if ins.opname == "EXTENDED_ARG":
                    known[ins.offset] = known[following]
                else:
                    known[ins.offset] = ins, following
                following = ins.offset
        return known


class Shadow:
    """What lies on the stack of one frame.

    Args:
      frame: The frame, at its start.
      reads: Is told what is read.
      instructions: Those of all code.
      own: Whether the code is the user's. Of a library's, only what is read of known objects is of interest.
    """

    def __init__(self, frame: FrameType, reads: Reads, instructions: Instructions, *, own: bool) -> None:
        self.frame, self.reads, self.own = frame, reads, own
        self.code, self.stack = frame.f_code, list[Any]()
        self.result: Any = UNKNOWN  # of the frame that this one has called last
        self._instructions = instructions.of(self.code)
        self._last: tuple[dis.Instruction, int] | None = None
        self._awaits = False
        self._keywords: tuple[str, ...] = ()
        self._cells = reads.enter(frame) if own else {}

    def leave(self) -> None:
        """Let go of the frame, which has ended."""
        del self.frame
        self.stack.clear()

    @property
    def is_fresh(self) -> bool:
        """Whether a generator that starts now has not yielded before."""
        ins = self._instructions[self.frame.f_lasti][0] if self.frame.f_lasti in self._instructions else None
        went_on = ins is not None and (ins.opname in ("YIELD_VALUE", "SEND") or (ins.opname == "RESUME" and ins.arg))
        return not went_on

    def step(self, offset: int) -> None:
        """An instruction is about to run."""
        here = self._instructions.get(offset)
        if here is None or here is self._last:  # an argument that is long comes in two
            return
        self._finish(here[0].offset)
        self._last, self.result = here, UNKNOWN
        ins, self.reads.frame = here[0], self.frame
        getattr(self, f"op_{ins.opname.lower()}", self.other)(ins)

    def _finish(self, offset: int) -> None:
        """The last instruction has run, and led here."""
        if self._last is None:
            return
        ins, following = self._last
        after = self._instructions.get(following)
        falls = offset == following or (after is not None and after[0].offset == offset)
        if self._awaits and self.stack and falls:
            self.stack[-1] = self.result
        self._awaits = False
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
        """What comes is what the frame that is called now returns."""
        self.push(UNKNOWN)
        self._awaits = True

    def use(self, value: Any, *, deep: bool = False) -> None:
        if self._reads_from(value):
            self.reads.use(value, deep=deep)

    def other(self, ins: dis.Instruction) -> None:
        name, arg = ins.opname, ins.arg or 0
        if name in _TAKES_BY_ARGUMENT:
            count = _TAKES_BY_ARGUMENT[name](arg)
            deep = False
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

    # -- names ----------------------------------------------------------------------------------------------------

    def op_push_null(self, ins: dis.Instruction) -> None:
        self.push(_NULL)

    def op_load_const(self, ins: dis.Instruction) -> None:
        self.push(ins.argval)

    op_load_small_int = op_load_const

    def op_load_global(self, ins: dis.Instruction) -> None:
        with_null = ins.arg is not None and ins.arg & 1 and ins.opname == "LOAD_GLOBAL"
        value = self._global(ins.argval)
        self.stack += [_NULL, value] if with_null else [value]

    def _global(self, name: str) -> Any:
        if self.own:
            return self.reads.from_globals(self.frame, name)
        value = self.frame.f_globals.get(name, getattr(builtins, name, UNKNOWN))
        if is_container(value) and name.startswith("_global_"):  # torch's hooks on all modules
            self.reads.root(value, name)
        return value

    def op_load_name(self, ins: dis.Instruction) -> None:
        held = self.frame.f_locals
        self.push(held[ins.argval] if ins.argval in held else self._global(ins.argval))

    def op_load_fast(self, ins: dis.Instruction) -> None:
        held = self.frame.f_locals
        cells = self.code.co_cellvars + self.code.co_freevars
        for name in ins.argval if type(ins.argval) is tuple else (ins.argval,):
            closure = name in cells and "DEREF" not in ins.opname  # the cell itself, for an inner function
            self.push(UNKNOWN if closure else held.get(name, UNKNOWN))

    op_load_fast_check = op_load_fast_borrow = op_load_fast_load_fast = op_load_fast
    op_load_fast_borrow_load_fast_borrow = op_load_fast_and_clear = op_load_fast

    def op_load_deref(self, ins: dis.Instruction) -> None:
        name = ins.argval
        value = self.frame.f_locals.get(name, UNKNOWN)
        if value is not UNKNOWN:
            for place, step in self._cells.get(name, ()):
                self.reads.found(place, step, value, name)
        self.push(value)

    op_load_classderef = op_load_from_dict_or_deref = op_load_deref

    def _store(self, count: int = 1) -> None:
        self.take(count)

    def op_store_fast(self, ins: dis.Instruction) -> None:
        self._store(len(ins.argval) if type(ins.argval) is tuple else 1)

    op_store_name = op_store_fast_store_fast = op_store_fast

    def op_store_fast_load_fast(self, ins: dis.Instruction) -> None:
        self.take(1)
        self.push(UNKNOWN)

    def op_store_deref(self, ins: dis.Instruction) -> None:
        self.take(1)
        for place, step in self._cells.get(ins.argval, ()):
            self.reads.wrote(place.value, step)

    def op_store_global(self, ins: dis.Instruction) -> None:
        self.take(1)
        self.reads.wrote(self.frame.f_globals, Step(ITEM, ins.argval))

    def op_store_attr(self, ins: dis.Instruction) -> None:
        _, owner = self.take(2)
        self.reads.assigned(owner, ins.argval)

    def op_store_subscr(self, ins: dis.Instruction) -> None:
        _, owner, key = self.take(3)
        self.reads.put(owner, key)

    def op_import_name(self, ins: dis.Instruction) -> None:
        level, _ = self.take(2)
        dots = level if type(level) is int else 0
        name = ins.argval
        if dots:
            name = resolve_name("." * dots + name, self.frame.f_globals.get("__package__"))
        self.push(sys.modules.get(name if dots else name.partition(".")[0], UNKNOWN))

    def op_import_from(self, ins: dis.Instruction) -> None:
        module = self.peek()
        self.push(self.attribute(module, ins.argval))

    # -- parts ----------------------------------------------------------------------------------------------------

    def op_load_attr(self, ins: dis.Instruction) -> None:
        as_method = ins.opname == "LOAD_METHOD" or (_BY_VERSION and (ins.arg or 0) & 1)
        self._attribute(self.pop(), ins.argval, as_method=bool(as_method))

    op_load_method = op_load_attr

    def _attribute(self, owner: Any, name: str, *, as_method: bool) -> None:
        found = self.attribute(owner, name)
        if as_method:
            self.push(_NULL)
        if found is UNKNOWN:
            self.await_result()
        else:
            self.push(found)

    def op_load_super_attr(self, ins: dis.Instruction) -> None:
        _, cls, instance = self.take(3)
        parent = _parent(cls, instance)
        self._attribute(parent, ins.argval, as_method=bool((ins.arg or 0) & 1))

    def op_binary_subscr(self, ins: dis.Instruction) -> None:
        owner, key = self.take(2)
        self.use(key)
        found = self.item(owner, key)
        if found is UNKNOWN:
            self.await_result()
        else:
            self.push(found)

    def op_binary_op(self, ins: dis.Instruction) -> None:
        if ins.argrepr == "[]":
            self.op_binary_subscr(ins)
        else:
            self.other(ins)

    def op_is_op(self, ins: dis.Instruction) -> None:
        self.take(2)
        self.push(UNKNOWN)

    def op_contains_op(self, ins: dis.Instruction) -> None:
        key, owner = self.take(2)
        if self._reads_from(owner):
            self.reads.has(owner, key)
        self.push(UNKNOWN)

    def op_get_len(self, ins: dis.Instruction) -> None:
        self.size(self.peek())
        self.push(UNKNOWN)

    def op_get_iter(self, ins: dis.Instruction) -> None:
        self.use(self.pop())
        self.await_result()

    def op_for_iter(self, ins: dis.Instruction) -> None:
        self.use(self.peek())

    def op_jump_if_true_or_pop(self, ins: dis.Instruction) -> None:
        self.size(self.peek(), truth=True)

    op_jump_if_false_or_pop = op_jump_if_true_or_pop

    def op_unpack_sequence(self, ins: dis.Instruction) -> None:
        self.use(self.pop())
        self.stack += [UNKNOWN] * (ins.arg or 0)

    def op_unpack_ex(self, ins: dis.Instruction) -> None:
        self.use(self.pop())
        self.stack += [UNKNOWN] * (((ins.arg or 0) & 0xFF) + ((ins.arg or 0) >> 8) + 1)

    def op_match_class(self, ins: dis.Instruction) -> None:
        owner, cls, names = self.take(3)
        placed = getattr(cls, "__match_args__", ())[: ins.arg or 0] if type(cls) is type else ()
        for name in (*placed, *(names if type(names) is tuple else ())):
            self.attribute(owner, name)
        self.push(UNKNOWN)

    def op_match_mapping(self, ins: dis.Instruction) -> None:
        self.push(UNKNOWN)

    op_match_sequence = op_match_mapping

    def op_match_keys(self, ins: dis.Instruction) -> None:
        owner, keys = self.stack[-2:] if len(self.stack) > 1 else (UNKNOWN, UNKNOWN)
        for key in keys if type(keys) is tuple else ():
            self.item(owner, key)
        self.push(UNKNOWN)

    # -- moves ----------------------------------------------------------------------------------------------------

    def op_copy(self, ins: dis.Instruction) -> None:
        depth = ins.arg or 0
        self.push(self.stack[-depth] if depth <= len(self.stack) else UNKNOWN)

    def op_swap(self, ins: dis.Instruction) -> None:
        depth = ins.arg or 0
        if depth > len(self.stack):
            self.stack.clear()
        else:
            self.stack[-1], self.stack[-depth] = self.stack[-depth], self.stack[-1]

    def op_build_tuple(self, ins: dis.Instruction) -> None:
        parts = self.take(ins.arg or 0)
        self.push(UNKNOWN if any(part is UNKNOWN or part is _NULL for part in parts) else tuple(parts))

    def op_build_list(self, ins: dis.Instruction) -> None:
        self.take(ins.arg or 0)
        self.push(UNKNOWN)

    op_build_set = op_build_list

    def op_build_map(self, ins: dis.Instruction) -> None:
        self.take(2 * (ins.arg or 0))
        self.push(UNKNOWN)

    def op_build_const_key_map(self, ins: dis.Instruction) -> None:
        self.take((ins.arg or 0) + 1)
        self.push(UNKNOWN)

    def op_list_append(self, ins: dis.Instruction) -> None:
        self.take(1)

    op_set_add = op_list_append

    def op_map_add(self, ins: dis.Instruction) -> None:
        self.take(2)

    def op_make_function(self, ins: dis.Instruction) -> None:
        code = self.pop()
        self.take((ins.arg or 0).bit_count() if not sys.version_info >= (3, 13) else 0)
        if type(code) is CodeType and self.own:
            self.reads.made(code, self._cells)
        self.push(UNKNOWN)

    def op_set_function_attribute(self, ins: dis.Instruction) -> None:
        self.take(2)
        self.push(UNKNOWN)

    def op_before_with(self, ins: dis.Instruction) -> None:
        owner = self.pop()
        if owner is not UNKNOWN and owner is not _NULL:
            for name in ("__enter__", "__exit__"):
                self.attribute(owner, name)
        self.push(UNKNOWN)
        self.await_result()

    def op_return_value(self, ins: dis.Instruction) -> None:
        self.stack.clear()

    op_return_const = op_return_value

    def op_yield_value(self, ins: dis.Instruction) -> None:
        self.take(1)
        self.push(UNKNOWN)

    # -- calls ----------------------------------------------------------------------------------------------------

    def op_kw_names(self, ins: dis.Instruction) -> None:
        self._keywords = self.code.co_consts[ins.arg or 0]

    def op_call_kw(self, ins: dis.Instruction) -> None:
        names = self.pop()
        self._keywords = names if type(names) is tuple else ()
        self.op_call(ins)

    def op_call(self, ins: dis.Instruction) -> None:
        args = self.take(ins.arg or 0)
        names, self._keywords = self._keywords, ()
        first, second = self.take(2)
        if first is _NULL or second is _NULL:
            callee = second if first is _NULL else first
        else:
            callee, args = first, [second, *args]
        split = len(args) - len(names)
        self.call(callee, args[:split], dict(zip(names, args[split:], strict=True)))

    def op_call_function_ex(self, ins: dis.Instruction) -> None:
        keywords = self.pop() if (ins.arg or 0) & 1 or sys.version_info >= (3, 14) else UNKNOWN
        given = self.pop()
        first, second = self.take(2) if _NULL in self.stack[-2:] else (self.pop(), _NULL)
        for value in (given, keywords):
            self.use(value)
        callee = second if first is _NULL else first
        self.call(callee, list(given) if type(given) is tuple else [UNKNOWN], {})

    def call(self, callee: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Something is called: the frames of what is written in Python are seen, of the rest what is handed to it."""
        handler = _BUILTINS.get(callee) if type(callee) in (BuiltinFunctionType, type) else None
        if handler is not None:
            self.push(handler(self, *args))
            return
        function = callee.__func__ if type(callee) is MethodType else callee
        if type(function) in _GETTERS and args:
            self.push(self._get(function, args[0]))
            return
        if callee in _GETTERS and UNKNOWN not in args:
            self.push(callee(*args))
            return
        if type(callee) in (BuiltinFunctionType, MethodWrapperType) and type(callee.__self__) is not ModuleType:
            self.push(self._method(callee.__self__, callee.__name__, args, kwargs))
            return
        if type(function) is not FunctionType or not is_user_file(function.__code__.co_filename):
            self.hand_on(*args, *kwargs.values())
        if _is_python(callee):
            self.await_result()
        else:
            self.push(UNKNOWN)

    def hand_on(self, *values: Any) -> None:
        """Values are given to what is not seen, which may read all of a container."""
        for value in values:
            self.use(value, deep=True)
        for getter in values:
            if type(getter) in _GETTERS:  # what calls it is not seen
                for value in values:
                    for part in self.reads.held_by(value):
                        self._get(getter, part)

    def _method(self, owner: Any, name: str, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
        """A method that is not written in Python."""
        if not is_container(owner):
            self.use(owner)
            if name in _SAYS_ALL:
                self.use(self.attribute(owner, "__dict__"), deep=True)
        elif name in _WRITES:
            return UNKNOWN
        elif name in _LOOKUPS and args:
            return self.item(owner, args[0])
        else:
            self.use(owner)
        self.hand_on(*args, *kwargs.values())
        return UNKNOWN

    def attribute(self, owner: Any, name: str) -> Any:
        """What ``owner.name`` is, noted if it is read of what the user has."""
        return self.reads.attribute(owner, name) if self._reads_from(owner) else UNKNOWN

    def item(self, owner: Any, key: Any) -> Any:
        """What ``owner[key]`` is."""
        return self.reads.item(owner, key) if self._reads_from(owner) else UNKNOWN

    def size(self, owner: Any, *, truth: bool = False) -> None:
        """``len(owner)``, or whether there is anything in it."""
        if self._reads_from(owner):
            self.reads.size(owner, truth=truth)

    def _reads_from(self, owner: Any) -> bool:
        if owner is UNKNOWN or owner is _NULL:
            return False
        known = self.reads.known(owner)
        return self.own or (known is not None and known.root.outlives) or type(owner) is super

    def _ask(self, owner: Any = UNKNOWN, name: Any = UNKNOWN, *default: Any) -> Any:
        if type(name) is str:
            return self.attribute(owner, name)
        self.use(self.attribute(owner, "__dict__"), deep=True)
        return UNKNOWN

    def _ask_whether(self, owner: Any = UNKNOWN, name: Any = UNKNOWN) -> Any:
        self._ask(owner, name)
        return UNKNOWN

    def _vars(self, owner: Any = UNKNOWN) -> Any:
        return self.attribute(owner, "__dict__")

    def _len(self, owner: Any = UNKNOWN) -> Any:
        self.size(owner)
        return UNKNOWN

    def _bool(self, owner: Any = UNKNOWN) -> Any:
        self.size(owner, truth=True)
        return UNKNOWN

    def _type(self, owner: Any = UNKNOWN, *more: Any) -> Any:
        return UNKNOWN if owner is UNKNOWN or more else type(owner)

    def _globals(self) -> Any:
        self.reads.root(self.frame.f_globals, "globals()")
        return self.frame.f_globals

    def _super(self, *given: Any) -> Any:
        names, held = self.code.co_varnames, self.frame.f_locals
        return _parent(*given) if given else _parent(held.get("__class__"), held.get(names[0]) if names else None)

    def _nothing(self, *given: Any) -> Any:
        return UNKNOWN

    def _get(self, getter: Any, owner: Any) -> Any:
        found, keys = UNKNOWN, getter.__reduce__()[1]
        for key in keys:
            found = owner
            if type(getter) is operator.itemgetter:
                found = self.item(found, key)
            else:
                for name in key.split("."):
                    found = self.attribute(found, name)
        return found if len(keys) == 1 else UNKNOWN


# What builtins read of their arguments: not what they hold, but a part of it, or nothing.
_BUILTINS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        getattr: Shadow._ask,
        hasattr: Shadow._ask_whether,
        vars: Shadow._vars,
        len: Shadow._len,
        bool: Shadow._bool,
        type: Shadow._type,
        globals: Shadow._globals,
        super: Shadow._super,
        **dict.fromkeys((id, print, callable, isinstance, issubclass, setattr, repr), Shadow._nothing),
    }
)


def _parent(cls: Any, instance: Any) -> Any:
    try:
        return super(cls, instance)
    except TypeError:
        return UNKNOWN


def _is_python(callee: Any) -> bool:
    kind = type(callee)
    if kind is MethodType:
        return _is_python(callee.__func__)
    if kind is FunctionType:
        return not callee.__code__.co_flags & 0x20  # it yields
    return type(in_classes(kind.__mro__, "__call__")) is FunctionType
