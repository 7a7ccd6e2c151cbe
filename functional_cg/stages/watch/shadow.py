"""The shadow of a frame: a stack on which each instruction, before it runs, puts what it loads.

What an instruction loads is recorded as read; what it computes is seen in the frame itself once it has run.
"""

from __future__ import annotations

import builtins
import contextvars
import dis
import functools
import logging
import operator
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from importlib.util import resolve_name
from queue import SimpleQueue
from types import (
    CodeType,
    FrameType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ...messages.source import is_installed, is_user_file
from .evaluation import CODES, EMPTY, Evaluation, instructions_of
from .host_reads import GETTERS, HostReads
from .kinds import BUILTINS, LOCKS, UNKNOWN, inside, is_key
from .places import ITEM, Step
from .values import holds, in_classes, is_array, is_container, is_value

__all__ = ["Shadow"]

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
_WRITES = frozenset("append appendleft insert add __setitem__ __setattr__ __init__".split())
_COPIES = frozenset({"extend", "extendleft", "update"})  # write what their arguments hold
_LOOKUPS = frozenset({"get", "setdefault", "__getitem__"})
# Their answers depend on hidden state, and asking changes nothing.
_QUERIES: frozenset[Any] = frozenset(
    {threading.Event.is_set, logging.Logger.isEnabledFor, logging.Logger.getEffectiveLevel}
)
_COMPILED_QUERIES = frozenset(
    {(SimpleQueue, "empty"), (SimpleQueue, "qsize"), *((kind, "locked") for kind in LOCKS)}
)
_SAYS_ALL = frozenset({"__reduce_ex__", "__reduce__", "__getstate__"})
_TYPES_OF_TENSORS = ((FakeTensor, torch.Tensor), (torch.Tensor, FakeTensor))
_METHODS_BY_FLAG = sys.version_info >= (3, 12)


class Shadow:
    """Interprets the instructions of a frame, on a stack of its own.

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

    def call(self, callee: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Handle a call: Python code is seen in its frames; for other code, record the arguments as read."""
        handler = _BUILTINS.get(callee) if type(callee) in (*BUILTINS, type) else None
        if handler is not None:
            self.push(handler(self, *args))
            return
        function = callee.__func__ if type(callee) is MethodType else callee
        if type(function) in GETTERS and args:
            self.push(self._get(function, args[0]))
            return
        if type(callee) is type and callee in GETTERS and not any(one is UNKNOWN for one in args):
            self.push(callee(*args))
            return
        if self.own and function is threading.Thread.start:
            self.reads.starts_thread()
        if args and _is_dispatched(function):
            kind = type(args[0])
            self.reads.holds(function, functools.partial(_dispatched, kind), _dispatched(kind, function))
        if type(callee) is functools.partial:
            self.call(callee.func, [*callee.args, *args], {**callee.keywords, **kwargs})
            return
        if type(callee) is weakref.ReferenceType:
            self.push(self.reads.holds(callee, operator.call, callee()))
            return
        if type(function) is functools._lru_cache_wrapper:
            callee, args = function, [callee.__self__, *args] if function is not callee else args
            self.hand_on(*args, *kwargs.values())
            self.await_kept(callee, args, kwargs)
            return
        if type(callee) is MethodType and type(function) is FunctionType and function in _QUERIES:
            self.push(self._asked(callee.__self__, function.__name__, args))
            return
        if type(callee) in (MethodDescriptorType, WrapperDescriptorType) and args:
            self.push(self._method(args[0], callee.__name__, args[1:], kwargs))
            return
        if type(callee) is MethodType and inside(callee.__self__) is not None:
            self.use(callee.__self__)
        if type(callee) in (*BUILTINS, MethodWrapperType) and type(callee.__self__) is not ModuleType:
            self.push(self._method(callee.__self__, callee.__name__, args, kwargs))
            return
        if type(function) is not FunctionType or not is_user_file(function.__code__.co_filename):
            self.hand_on(*args, *kwargs.values())
        if _is_python(callee):
            self.await_result()
        else:
            self.push(UNKNOWN)

    def hand_on(self, *values: Any) -> None:
        """Record values that are passed to unseen code, which may read all of a container."""
        for value in values:
            self.use(value, deep=True)
        for value in values:
            if _is_compiled(value):  # what calls it is not seen
                self._handed_on(value, [one for one in values if one is not value])

    def _handed_on(self, callee: Any, others: list[Any]) -> None:
        """Record a compiled callable passed to unseen code, which may call it on what the others hold."""
        parts = [part for one in others for part in self.reads.held_by(one)]
        if type(callee) in GETTERS:
            for part in parts:
                self._get(callee, part)
        elif type(callee) is functools.partial:
            self.hand_on(callee.func, *callee.args, *callee.keywords.values(), *others)
        elif callee is next:
            for part in parts:
                self.use(part)
        elif callee is getattr:
            for part in (*others, *parts):
                self._all_attributes(part)
        elif callee.__name__ == "__getattribute__":
            self._all_attributes(callee.__self__)
        elif type(callee.__self__) is not ModuleType:
            self._method(callee.__self__, callee.__name__, [], {})

    def _method(self, owner: Any, name: str, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
        """Handle a call of a compiled method."""
        if type(owner) is contextvars.ContextVar and name in ("get", "set", "reset"):
            return self._of_context(owner, name, args)
        if name == "__getattribute__" and args:  # as it is stored, bypassing the class's own lookup
            return self.stored(owner, args[0])
        if (type(owner), name) in _COMPILED_QUERIES or name == "__subclasses__":
            return self._asked(owner, name, args)
        if type(owner) is SimpleQueue and name.startswith(("get", "put")):
            self.reads.goes_on(owner)
        if type(owner) is str and name.startswith("format"):  # its fields may name attributes
            for value in (*args, *kwargs.values()):
                self._all_attributes(value)
        if not is_container(owner):
            self.use(owner)
            self.changes(owner)
            if name in _SAYS_ALL:
                self._all_attributes(owner)
        elif name in _WRITES:
            self.changes(owner)
            return UNKNOWN
        elif name in _COPIES:
            self.changes(owner)
        elif name in _LOOKUPS and args:
            return self.item(owner, args[0])
        else:
            self.use(owner)
            self.changes(owner)
            for value in (
                args if self.own else ()
            ):  # such as `index` looks for; containers are compared by contents
                if not is_container(value):
                    self.reads.identity(value)
        self.hand_on(*args, *kwargs.values())
        return UNKNOWN

    def _of_context(self, variable: contextvars.ContextVar[Any], name: str, args: list[Any]) -> Any:
        """Handle a call of a context variable: what it holds is read, unless the step itself has set it."""
        if name != "get":
            self.reads.contexts[variable] += 1 if name == "set" else -1
            return UNKNOWN
        held = _held_by(*args, variable)
        if self.reads.contexts[variable] > 0:
            return held
        return self.reads.holds(variable, functools.partial(_held_by, *args), held)

    def _ask(self, owner: Any = UNKNOWN, name: Any = UNKNOWN, *default: Any) -> Any:
        if type(name) is str:
            lacks = is_container(owner) and not hasattr(type(owner), name)
            return default[0] if default and lacks else self.attribute(owner, name)
        self._all_attributes(owner)
        return UNKNOWN

    def _all_attributes(self, owner: Any) -> None:
        self.use(self.attribute(owner, "__dict__"), deep=True)
        for cls in type(owner).__mro__:
            for name, found in vars(cls).items():
                if type(found) is MemberDescriptorType:
                    self.use(self.attribute(owner, name), deep=True)

    def use_compared(self, owner: Any) -> None:
        """Record what a comparison in C reads: attributes, as of namespaces; one in Python is seen in its frame."""
        if self._reads_from(owner) and self.reads.has_parts(owner) and not is_container(owner):
            how = in_classes(type(owner).__mro__, "__eq__")
            if type(how) is not FunctionType and how is not object.__eq__:
                self._all_attributes(owner)

    def _asked(self, owner: Any, name: str, args: list[Any]) -> Any:
        """Record and return the answer to a query of hidden state, which can be repeated."""
        if not all(map(is_key, args)):
            return UNKNOWN
        ask = operator.methodcaller(name, *args)
        return self.reads.says(owner, ask, ask(owner), f"{name}({', '.join(map(repr, args))})")

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

    def _can_be_called(self, owner: Any = UNKNOWN) -> Any:
        self.use_class(owner)
        return UNKNOWN

    def _instance(self, owner: Any = UNKNOWN, *classes: Any) -> Any:
        self.use_class(owner)
        return UNKNOWN

    def _type(self, owner: Any = UNKNOWN, *more: Any) -> Any:
        return UNKNOWN if owner is UNKNOWN or more else type(owner)

    def _globals(self) -> Any:
        self.reads.root(self.frame.f_globals, "globals()")
        return self.frame.f_globals

    def _super(self, *given: Any) -> Any:
        names, held = self.code.co_varnames, self.frame.f_locals
        return (
            parent(*given) if given else parent(held.get("__class__"), held.get(names[0]) if names else None)
        )

    def _nothing(self, *given: Any) -> Any:
        return UNKNOWN

    def _which(self, owner: Any = UNKNOWN) -> Any:
        if self.own:
            self.reads.identity(owner)
        return UNKNOWN

    def _get(self, getter: Any, owner: Any) -> Any:
        return self.reads.got(getter, owner) if self._reads_from(owner) else UNKNOWN

    def _subclass(self, cls: Any = UNKNOWN, *classes: Any) -> Any:
        if self.own and issubclass(type(cls), type):
            self.reads.shape_of(cls)
        return UNKNOWN

    # -- names ----------------------------------------------------------------------------------------------------

    def op_push_null(self, ins: dis.Instruction) -> None:
        self.push(NULL)

    def op_load_const(self, ins: dis.Instruction) -> None:
        self.push(ins.argval)

    op_load_small_int = op_load_const

    def op_load_global(self, ins: dis.Instruction) -> None:
        with_null = ins.arg is not None and ins.arg & 1 and ins.opname == "LOAD_GLOBAL"
        value = self._global(ins.argval)
        self.stack += [NULL, value] if with_null else [value]

    def _global(self, name: str) -> Any:
        if self.own:
            return self.reads.from_globals(self.frame, name)
        value = self.frame.f_globals.get(name, getattr(builtins, name, UNKNOWN))
        if is_container(value) and name.startswith("_global_"):  # torch's global module hooks
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
        if key is UNKNOWN or type(key) is slice:
            self._resizes(owner)
        self.reads.put(owner, key)

    def op_store_slice(self, ins: dis.Instruction) -> None:
        _, owner, _, _ = self.take(4)
        self._resizes(owner)
        self.changes(owner)

    def _resizes(self, owner: Any) -> None:
        """Record how long a container is of which the step replaces a slice, by one that may be longer or shorter."""
        if is_container(owner) and not issubclass(type(owner), dict) and not is_array(owner):
            self.size(owner)

    def op_delete_subscr(self, ins: dis.Instruction) -> None:
        owner, _ = self.take(2)
        if is_container(owner) and not issubclass(type(owner), dict):
            self.use(owner)  # all that follows moves up
        self.changes(owner)

    def op_delete_attr(self, ins: dis.Instruction) -> None:
        self.changes(self.pop())

    def op_import_name(self, ins: dis.Instruction) -> None:
        level, names = self.take(2)
        dots = level if type(level) is int else 0
        name = ins.argval
        if dots:
            name = resolve_name("." * dots + name, self.frame.f_globals.get("__package__"))
        elif names is None:  # as in `import a.b`, which is one way to say `a`
            name = name.partition(".")[0]
        module = sys.modules.get(name, UNKNOWN)
        if self.own and module is not UNKNOWN:
            self.reads.imported(name, module)
        self.push(module)

    def op_import_from(self, ins: dis.Instruction) -> None:
        module = self.peek()
        self.push(self.attribute(module, ins.argval))

    # -- parts ----------------------------------------------------------------------------------------------------

    def op_load_attr(self, ins: dis.Instruction) -> None:
        as_method = ins.opname == "LOAD_METHOD" or (_METHODS_BY_FLAG and (ins.arg or 0) & 1)
        self._attribute(self.pop(), ins.argval, as_method=bool(as_method))

    op_load_method = op_load_attr

    def _attribute(self, owner: Any, name: str, *, as_method: bool) -> None:
        found = self.attribute(owner, name)
        if as_method:
            self.push(NULL)
        if found is UNKNOWN:
            self.await_result()
        else:
            self.push(found)

    def op_load_super_attr(self, ins: dis.Instruction) -> None:
        _, cls, instance = self.take(3)
        above = parent(cls, instance)
        self._attribute(above, ins.argval, as_method=bool((ins.arg or 0) & 1))

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
            if ins.argrepr.endswith("=") and len(self.stack) > 1:
                self.changes(self.stack[-2])
            self.other(ins)

    def op_is_op(self, ins: dis.Instruction) -> None:
        one, other = self.take(2)
        self._compared(one, other, differ=one is not other)
        self.push(UNKNOWN)

    def op_compare_op(self, ins: dis.Instruction) -> None:
        pair = self.stack[-2:]
        if len(pair) == 2 and any(in_classes(type(one).__mro__, "__eq__") is object.__eq__ for one in pair):
            self._compared(*pair)
        for one, other in zip(pair, reversed(pair), strict=True):
            self.use_compared(one)
            if is_container(one) and not is_array(one) and holds(one, FakeTensor):
                self.asks_for_type(FakeTensor, among=other)
        if holds(
            pair, FakeTensor
        ):  # beside any other class than `torch.Tensor`, the answer is that of an ordinary tensor
            self.take(2)
            self.push(UNKNOWN)
        else:
            self.other(ins)

    def _compared(self, one: Any, other: Any, *, differ: bool = False) -> None:
        """Record that it matters which objects these are; beside ``None`` and the like, it does not."""
        if self.own and not (is_value(one) or is_value(other)):
            if differ:
                self.reads.unlike(one, other)
            else:
                self.reads.identity(one)
                self.reads.identity(other)
            if any(one is a and other is b for a, b in _TYPES_OF_TENSORS):
                self.reads.asks_for_type()

    def op_contains_op(self, ins: dis.Instruction) -> None:
        key, owner = self.take(2)
        if self._reads_from(owner):
            self.asks_for_type(key, among=owner)
            self.reads.has(owner, key)
        self.push(UNKNOWN)

    def op_get_len(self, ins: dis.Instruction) -> None:
        self.size(self.peek())
        self.push(UNKNOWN)

    def op_get_iter(self, ins: dis.Instruction) -> None:
        self.use(self.pop())
        self.await_result()

    op_get_yield_from_iter = op_get_iter

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
        placed = self.attribute(cls, "__match_args__") if issubclass(type(cls), type) else ()
        placed = placed[: ins.arg or 0] if type(placed) is tuple else ()
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
        self.push(UNKNOWN if any(part is UNKNOWN or part is NULL for part in parts) else tuple(parts))

    def op_build_list(self, ins: dis.Instruction) -> None:
        parts = self.take(ins.arg or 0)
        self.push(UNKNOWN if not parts or any(part is UNKNOWN or part is NULL for part in parts) else parts)

    def op_build_set(self, ins: dis.Instruction) -> None:
        self.take(ins.arg or 0)
        self.push(UNKNOWN)

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
        if owner is not UNKNOWN and owner is not NULL:
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
        if first is NULL or second is NULL:
            callee = second if first is NULL else first
        else:
            callee, args = first, [second, *args]
        split = len(args) - len(names)
        self.call(callee, args[:split], dict(zip(names, args[split:], strict=True)))

    def op_call_function_ex(self, ins: dis.Instruction) -> None:
        keywords = self.pop() if (ins.arg or 0) & 1 or sys.version_info >= (3, 14) else UNKNOWN
        given = self.pop()
        first, second = self.take(2) if NULL in self.stack[-2:] else (self.pop(), NULL)
        for value in (given, keywords):
            self.use(value)
        callee = second if first is NULL else first
        args = list(given) if type(given) in (tuple, list) else [UNKNOWN]
        self.call(callee, args, keywords if type(keywords) is dict else {})


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


# What builtins read of their arguments: not all contents, but a part of them or nothing.
_BUILTINS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        getattr: Shadow._ask,
        hasattr: Shadow._ask_whether,
        vars: Shadow._vars,
        dir: Shadow._ask,
        len: Shadow._len,
        bool: Shadow._bool,
        type: Shadow._type,
        globals: Shadow._globals,
        super: Shadow._super,
        id: Shadow._which,
        hash: Shadow._which,
        print: Shadow._nothing,
        callable: Shadow._can_be_called,
        isinstance: Shadow._instance,
        issubclass: Shadow._subclass,
        setattr: Shadow._nothing,
    }
)


def _is_dispatched(function: Any) -> bool:
    """Whether ``functools.singledispatch`` made a function."""
    of_functools = type(function) is FunctionType and function.__code__.co_filename == functools.__file__
    return of_functools and "registry" in vars(function)


def _dispatched(kind: type, function: Any) -> Any:
    return function.dispatch(kind)


def _is_compiled(value: Any) -> bool:
    """Whether a value is a callable whose work is not seen."""
    return type(value) in (*BUILTINS, MethodWrapperType, functools.partial, *GETTERS)


def _held_by(*args: Any) -> Any:
    *default, variable = args
    return contextvars.ContextVar.get(variable, *default)


def parent(cls: Any, instance: Any) -> Any:
    """Return ``super(cls, instance)``; UNKNOWN if it raises."""
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
