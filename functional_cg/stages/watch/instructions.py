"""Follow the instructions of a frame: record, before each runs, what it reads of its operands."""

from __future__ import annotations

import builtins
import contextvars
import dis
import functools
import logging
import operator
import re
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from types import (
    BuiltinFunctionType,
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

from ...messages.source import is_installed
from ...pytree.sameness import same
from .evaluation import CODES, Evaluation, instructions_of
from .host_reads import GETTERS, HostReads
from .kinds import BUILTINS, UNKNOWN, inside, is_key, is_user_function, takes_arguments
from .places import ATTRIBUTE, ITEM, Step, parts_of
from .values import holds, in_classes, is_array, is_container, is_value

__all__ = ["Instructions"]

# What a program asks of a class to tell it from others.
_NAMES_OF_CLASSES = frozenset({"__name__", "__qualname__", "__module__"})
_WRITES = frozenset("append appendleft insert add __setitem__ __setattr__ __init__".split())
_COPIES = frozenset({"extend", "extendleft", "update"})  # write what their arguments hold
_LOOKUPS = frozenset({"get", "setdefault", "__getitem__"})
_TELLS = frozenset(  # say something of a container and leave it as it is
    """keys values items copy index count union intersection difference isdisjoint issubset issuperset
    __contains__ __iter__ __len__ __reversed__""".split()
)
# Their answers depend on hidden state, and asking changes nothing.
_QUERIES: frozenset[Any] = frozenset(
    {threading.Event.is_set, logging.Logger.isEnabledFor, logging.Logger.getEffectiveLevel}
)
# Compiled getters: what may be asked of a module, and of an object, where to get may be to take.
_GETS = re.compile("(^|_)(is|are|get|has|initial)")
_ASKS = re.compile("(is|are|has|initial)_|(locked|empty|qsize|__subclasses__)$")
_OF_THE_STEP = re.compile(
    "grad|inference|autocast"
)  # a step sets these modes itself, and its calls' do not apply
_SAYS_ALL = frozenset({"__reduce_ex__", "__reduce__", "__getstate__"})
_TYPES_OF_TENSORS = ((FakeTensor, torch.Tensor), (torch.Tensor, FakeTensor))


class Instructions:
    """Records what the instructions of a frame read.

    Args:
      frame: The frame, at its start.
      reads: Records what is read.
      own: Whether the code is the user's. In a library's code, only reads from known objects count.
    """

    def __init__(self, frame: FrameType, reads: HostReads, *, own: bool) -> None:
        self.frame, self.reads, self.own = frame, reads, own
        self.code = frame.f_code
        self._evaluation, self._readers = Evaluation(self.code), _readers(self.code)
        self._asks = own or not takes_arguments(self.code)  # else it asks for itself, not for the user's code
        self._handled: int | None = None
        self._kept: tuple[Any, Callable[[Any], Any], int] | None = None
        self._keywords: tuple[str, ...] = ()
        self._cells = reads.enter(frame) if own else {}

    @property
    def is_fresh(self) -> bool:
        """Whether a generator whose frame starts has not yielded before."""
        ins = next((one for one in instructions_of(self.code) if one.offset == self.frame.f_lasti), None)
        return ins is None or not (
            ins.opname in ("YIELD_VALUE", "SEND") or (ins.opname == "RESUME" and ins.arg)
        )

    def step(self, offset: int) -> bool:
        """Handle an instruction that is about to run; return whether it is of a kind that reads."""
        reader = self._readers.get(offset)
        if reader is None:
            return False
        ins, count, read = reader
        handled, self._handled = self._handled, ins.offset if offset != ins.offset else None
        if offset == handled:  # at its EXTENDED_ARG
            return True
        self.look_at_kept()
        self._ins, self.reads.frame = ins, self.frame
        read(self, *self._evaluation.top(self.frame, ins.offset, count))
        return True

    def look_at_kept(self) -> None:
        """Record what a cached function gave that was called last, if it was the result of an earlier call."""
        if self._kept is not None:
            callee, ask, hits = self._kept
            self._kept = None
            if callee.cache_info().hits > hits:
                self.reads.holds(callee, ask, ask(callee))

    # -- what is asked of a value -----------------------------------------------------------------------------------

    def changes(self, owner: Any) -> None:
        """Record that the step may change an object in place; of tensors, its ops tell."""
        if self._reads_from(owner) and not issubclass(type(owner), Tensor):
            self.reads.changed(owner)

    def use(self, value: Any, *, deep: bool = False) -> None:
        """Record that a value is iterated or passed to unseen code."""
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
            self.reads.asked_types.append(self.reads.site)

    def attribute(self, owner: Any, name: str) -> Any:
        """Return ``owner.name`` and record the read; UNKNOWN if the read does not count."""
        if self.own and issubclass(type(owner), ModuleType):
            self.reads.of_library(owner, name)
        if name in _NAMES_OF_CLASSES:
            self.asks_for_type(owner)
        return self.reads.attribute(owner, name) if self._reads_from(owner) else UNKNOWN

    def item(self, owner: Any, key: Any) -> None:
        """Record a read of ``owner[key]``."""
        self.asks_for_type(key, among=owner)
        if self._reads_from(owner):
            self.reads.item(owner, key)

    def size(self, owner: Any = UNKNOWN, *, truth: bool = False) -> None:
        """Record a read of ``len(owner)``, or of its truth value."""
        if self._reads_from(owner):
            self.reads.size(owner, truth=truth)

    def _reads_from(self, owner: Any) -> bool:
        if owner is UNKNOWN:
            return False
        known = self.reads.known(owner)
        return self.own or known is not None or type(owner) is super

    # -- calls ----------------------------------------------------------------------------------------------------

    def call(self, callee: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Handle a call: Python code is seen in its frames; for other code, record the arguments as read."""
        handler = _BUILTINS.get(callee) if type(callee) in (*BUILTINS, type) else None
        function = callee.__func__ if type(callee) is MethodType else callee
        if self.own and function is threading.Thread.start:
            self.reads.threads.append(self.reads.site)
        if type(callee) is MethodType and inside(callee.__self__) is not None:
            self.use(callee.__self__)
        if handler is not None:
            handler(self, *args)
        elif type(function) in GETTERS and args:
            self._get(function, args[0])
        elif type(callee) is functools.partial:
            self.call(callee.func, [*callee.args, *args], {**callee.keywords, **kwargs})
        elif type(callee) is weakref.ReferenceType:
            self.reads.holds(callee, operator.call, callee())
        elif type(function) is functools._lru_cache_wrapper:
            args = [callee.__self__, *args] if function is not callee else args
            self.hand_on(*args, *kwargs.values())
            if all(map(_is_found_again, (*args, *kwargs.values()))):
                again = operator.methodcaller("__call__", *args, **kwargs)
                self._kept = function, again, function.cache_info().hits
        elif type(callee) is MethodType and type(function) is FunctionType and function in _QUERIES:
            self._asked(callee.__self__, function.__name__, args)
        elif type(callee) in (MethodDescriptorType, WrapperDescriptorType) and args:
            self._method(args[0], callee.__name__, args[1:], kwargs)
        elif type(callee) in (*BUILTINS, MethodWrapperType) and type(callee.__self__) is not ModuleType:
            self._method(callee.__self__, callee.__name__, args, kwargs)
        elif type(callee) is BuiltinFunctionType and not (args or kwargs):
            self._get_flag(callee)
        elif not is_user_function(function):
            self.hand_on(*args, *kwargs.values())

    def hand_on(self, *values: Any) -> None:
        """Record values that are passed to unseen code, which may read all of a container."""
        for value in values:
            self.use(value, deep=True)
        for value in values:
            if _is_compiled(value):  # what calls it is not seen
                self._handed_on(value, [one for one in values if one is not value])

    def _handed_on(self, callee: Any, others: list[Any]) -> None:
        """Record a compiled callable passed to unseen code, which may call it on what the others hold."""
        if type(callee) is functools.partial:
            self.hand_on(callee.func, *callee.args, *callee.keywords.values(), *others)
            return
        if type(callee) not in GETTERS and type(callee.__self__) is not ModuleType:
            self._all_attributes(callee.__self__)
            self._method(callee.__self__, callee.__name__, [], {})
            return
        parts = [part for one in others if is_container(one) for _, part in parts_of(one)]
        for part in (*others, *parts):
            self._get(callee, part)
            if callee in (next, getattr):
                self.use(part)
                self._all_attributes(part)

    def _method(self, owner: Any, name: str, args: list[Any], kwargs: Mapping[str, Any]) -> None:
        """Handle a call of a compiled method."""
        if type(owner) is contextvars.ContextVar and name in ("get", "set", "reset"):
            self._of_context(owner, name, args)
        elif name == "__getattribute__" and args:  # as it is stored, bypassing the class's own lookup
            if type(args[0]) is str and self._reads_from(owner):
                self.reads.attribute(owner, args[0], stored=True)
        elif is_container(owner):
            self._method_of_container(owner, name, args, kwargs)
        elif _ASKS.match(name) and not (is_value(owner) or issubclass(type(owner), Tensor)):
            self._asked(owner, name, args)
        else:
            if type(owner) is SimpleQueue and name.startswith(("get", "put")):
                self.reads.goes_on(self.reads.place(owner))
            if type(owner) is str and name.startswith("format"):  # its fields may name attributes
                for value in (*args, *kwargs.values()):
                    self._all_attributes(value)
            self.use(owner)
            self.changes(owner)
            if name in _SAYS_ALL:
                self._all_attributes(owner)
            self.hand_on(*args, *kwargs.values())

    def _method_of_container(self, owner: Any, name: str, args: list[Any], kwargs: Mapping[str, Any]) -> None:
        if name in _LOOKUPS and args:
            self.item(owner, args[0])
            return
        if name not in _WRITES | _COPIES:
            self.use(owner)
            for value in (
                args if self.own else ()
            ):  # such as `index` looks for; containers are compared by contents
                if not is_container(value):
                    self.reads.identity(value)
        if name not in _TELLS:
            self.changes(owner)
        if name not in _WRITES:
            self.hand_on(*args, *kwargs.values())

    def _of_context(self, variable: contextvars.ContextVar[Any], name: str, args: list[Any]) -> None:
        """Handle a call of a context variable: what it holds is read, unless the step itself has set it."""
        if name != "get":
            self.reads.contexts[variable] += 1 if name == "set" else -1
        elif self.reads.contexts[variable] <= 0:
            get = operator.methodcaller("get", *args)
            self.reads.holds(variable, get, get(variable), ".get")

    def _ask(self, owner: Any = UNKNOWN, name: Any = UNKNOWN, *default: Any) -> None:
        if type(name) is str:
            self.attribute(owner, name)
        else:
            self._all_attributes(owner)

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

    def _asked(self, owner: Any, name: str, args: list[Any]) -> None:
        """Record the answer to a query of hidden state, which can be repeated."""
        if self._asks and all(map(is_key, args)):
            ask = operator.methodcaller(name, *args)
            place = self.reads.place(owner)
            shown = f"{place.name}.{name}({', '.join(map(repr, args))})"
            self.reads.part(place, ask, ask(owner), shown)

    def _get_flag(self, getter: Any) -> None:
        """Record what a compiled getter says: a plain value, and the same again, unless the step sets it itself."""
        name = getter.__name__
        if self._asks and _GETS.search(name) and not _OF_THE_STEP.search(name):
            value = getter()
            if value is not None and is_value(value) and same(getter(), value):
                self.reads.answers(getter, value)

    def _vars(self, owner: Any = UNKNOWN) -> None:
        self.attribute(owner, "__dict__")

    def _truth_of(self, owner: Any = UNKNOWN) -> None:
        self.size(owner, truth=True)

    def _class_of(self, owner: Any = UNKNOWN, *classes: Any) -> None:
        if self._reads_from(owner):
            self.reads.shape_of(type(owner))

    def _globals(self) -> None:
        self.reads.root(self.frame.f_globals, "globals()")

    def _nothing(self, *given: Any) -> None:
        """Read nothing: what the builtin gives is seen where it is used."""

    def _which(self, owner: Any = UNKNOWN) -> None:
        if self.own:
            self.reads.identity(owner)

    def _get(self, getter: Any, owner: Any) -> None:
        if self._reads_from(owner):
            self.reads.got(getter, owner)

    def _subclass(self, cls: Any = UNKNOWN, *classes: Any) -> None:
        if self.own and issubclass(type(cls), type):
            self.reads.shape_of(cls)

    # -- instructions: names ----------------------------------------------------------------------------------------

    def _read_global(self) -> None:
        name = self._ins.argval
        if self._ins.opname == "LOAD_NAME" and name in self.frame.f_locals:
            return
        if self.own:
            self.reads.from_globals(self.frame, name)
            return
        value = self.frame.f_globals.get(name, getattr(builtins, name, UNKNOWN))
        if is_container(value) and name.startswith("_global_"):  # torch's global module hooks
            self.reads.root(value, name)

    def _read_cell(self) -> None:
        value, cell = self.frame.f_locals.get(self._ins.argval, UNKNOWN), self._cells.get(self._ins.argval)
        if cell is not None and value is not UNKNOWN:
            self.reads.found(*cell, value, self._ins.argval)

    def _write_cell(self) -> None:
        if self._ins.argval in self._cells:
            place, step = self._cells[self._ins.argval]
            self.reads.wrote(place.value, step)

    def _write_global(self) -> None:
        self.reads.wrote(self.frame.f_globals, Step(ITEM, self._ins.argval))

    # -- instructions: parts ----------------------------------------------------------------------------------------

    def _read_attribute(self, owner: Any) -> None:
        self.attribute(owner, self._ins.argval)

    def _read_above(self, _: Any, cls: Any, instance: Any) -> None:
        self.attribute(parent(cls, instance), self._ins.argval)

    def _enter(self, owner: Any) -> None:
        for name in ("__enter__", "__exit__"):
            self.attribute(owner, name)

    def _write_attribute(self, value: Any, owner: Any) -> None:
        self.reads.wrote(owner, Step(ATTRIBUTE, self._ins.argval))

    def _read_item(self, owner: Any, key: Any) -> None:
        self.use(key)
        self.item(owner, key)

    def _write_item(self, value: Any, owner: Any, key: Any) -> None:
        if type(key) is slice:
            self._resizes(owner)
        self.reads.put(owner, key)

    def _write_slice(self, value: Any, owner: Any, start: Any, stop: Any) -> None:
        self._write_item(value, owner, slice(start, stop))

    def _resizes(self, owner: Any) -> None:
        """Record how long a container is of which the step replaces a slice, by one that may be longer or shorter."""
        if is_container(owner) and not issubclass(type(owner), dict) and not is_array(owner):
            self.size(owner)

    def _delete_item(self, owner: Any, key: Any) -> None:
        if is_container(owner) and not issubclass(type(owner), dict):
            self.use(owner)  # all that follows moves up
        self.changes(owner)

    def _match_class(self, owner: Any, cls: Any, names: Any) -> None:
        placed = self.attribute(cls, "__match_args__") if issubclass(type(cls), type) else ()
        placed = placed[: self._ins.arg or 0] if type(placed) is tuple else ()
        for name in (*placed, *names):
            self.attribute(owner, name)

    def _match_keys(self, owner: Any, keys: Any) -> None:
        for key in keys:
            self.item(owner, key)

    # -- instructions: whole values -----------------------------------------------------------------------------------

    def _read_whole(self, *values: Any) -> None:
        for value in values:
            self.use(value, deep=True)

    def _compute(self, one: Any, other: Any) -> None:
        if self._ins.argrepr == "[]":
            self._read_item(one, other)
            return
        if self._ins.argrepr.endswith("="):
            self.changes(one)
        self._operate(self._ins.argrepr, one, other)
        self._read_whole(one, other)

    def _operate(self, symbol: str, one: Any, other: Any) -> None:
        """Record which methods of tensors an operator calls."""
        name = _OPERATORS.get(symbol.rstrip("=") if self.own else "", "")
        for owner, method in ((one, f"__{name}__"), (other, f"__r{name}__")) if name else ():
            if issubclass(type(owner), Tensor):
                self.reads.method_of_tensors(method)

    def _compare(self, *pair: Any) -> None:
        if any(in_classes(type(one).__mro__, "__eq__") is object.__eq__ for one in pair):
            self._compared(*pair)
        for one, other in zip(pair, reversed(pair), strict=True):
            self.use_compared(one)
            if is_container(one) and not is_array(one) and holds(one, FakeTensor):
                self.asks_for_type(FakeTensor, among=other)
        if not holds(
            pair, FakeTensor
        ):  # beside any class but `torch.Tensor`, its answer is that of an ordinary one
            self._read_whole(*pair)

    def _compared(self, one: Any, other: Any) -> None:
        """Record that it matters which objects these are; beside ``None`` and the like, it does not."""
        if self.own and not (is_value(one) or is_value(other)):
            self.reads.identity(one)
            self.reads.identity(other)
            if any(one is a and other is b for a, b in _TYPES_OF_TENSORS):
                self.reads.asked_types.append(self.reads.site)

    def _contains(self, key: Any, owner: Any) -> None:
        if self._reads_from(owner):
            self.asks_for_type(key, among=owner)
            self.reads.has(owner, key)

    # -- instructions: calls ------------------------------------------------------------------------------------------

    def _name_keywords(self) -> None:
        self._keywords = self.code.co_consts[self._ins.arg or 0]

    def _call_with_keywords(self, *operands: Any) -> None:
        self._keywords = operands[-1]
        self._call(*operands[:-1])

    def _call(self, *operands: Any) -> None:
        callee, args = _callee(*operands)
        names, self._keywords = self._keywords, ()
        split = len(args) - len(names)
        self.call(callee, args[:split], dict(zip(names, args[split:], strict=True)))

    def _call_unpacked(self, *operands: Any) -> None:
        first, second, given, *keywords = operands
        for value in (given, *keywords):
            self.use(value)
        args = list(given) if type(given) in (tuple, list) else [UNKNOWN]
        named = keywords[0] if keywords and type(keywords[0]) is dict else {}
        self.call(second if first is UNKNOWN else first, args, named)


def _callee(first: Any, second: Any, *args: Any) -> tuple[Any, list[Any]]:
    """Return what is called, and its arguments; beside it on the stack lies nothing, or the first of them."""
    if first is UNKNOWN or second is UNKNOWN:
        return (second if first is UNKNOWN else first), list(args)
    if type(first) in (FunctionType, functools._lru_cache_wrapper):
        return MethodType(first, second), list(args)
    return first, [second, *args]


# Who looks at the operands of an instruction -> how many it looks at, perhaps by the argument; which instructions.
_READERS: tuple[tuple[Callable[..., None], int | Callable[[int], int], str], ...] = (
    (Instructions._read_global, 0, "LOAD_GLOBAL LOAD_NAME LOAD_FROM_DICT_OR_GLOBALS"),
    (Instructions._read_cell, 0, "LOAD_DEREF LOAD_CLASSDEREF LOAD_FROM_DICT_OR_DEREF"),
    (Instructions._write_cell, 0, "STORE_DEREF"),
    (Instructions._write_global, 0, "STORE_GLOBAL"),
    (Instructions._read_attribute, 1, "LOAD_ATTR LOAD_METHOD IMPORT_FROM"),
    (Instructions._read_above, 3, "LOAD_SUPER_ATTR"),
    (Instructions._enter, 1, "BEFORE_WITH LOAD_SPECIAL"),
    (Instructions._write_attribute, 2, "STORE_ATTR"),
    (Instructions.changes, 1, "DELETE_ATTR"),
    (Instructions._read_item, 2, "BINARY_SUBSCR"),
    (Instructions._write_item, 3, "STORE_SUBSCR"),
    (Instructions._write_slice, 4, "STORE_SLICE"),
    (Instructions._delete_item, 2, "DELETE_SUBSCR"),
    (Instructions._match_class, 3, "MATCH_CLASS"),
    (Instructions._match_keys, 2, "MATCH_KEYS"),
    (Instructions.size, 1, "GET_LEN"),
    (
        Instructions._truth_of,
        1,
        """UNARY_NOT TO_BOOL JUMP_IF_TRUE_OR_POP JUMP_IF_FALSE_OR_POP POP_JUMP_IF_TRUE POP_JUMP_IF_FALSE
        POP_JUMP_FORWARD_IF_TRUE POP_JUMP_FORWARD_IF_FALSE POP_JUMP_BACKWARD_IF_TRUE POP_JUMP_BACKWARD_IF_FALSE""",
    ),
    (Instructions.use, 1, "GET_ITER GET_YIELD_FROM_ITER FOR_ITER UNPACK_SEQUENCE UNPACK_EX"),
    (Instructions._compared, 2, "IS_OP"),
    (Instructions._compare, 2, "COMPARE_OP"),
    (Instructions._contains, 2, "CONTAINS_OP"),
    (Instructions._compute, 2, "BINARY_OP"),
    (Instructions._name_keywords, 0, "KW_NAMES"),
    (Instructions._call, lambda given: given + 2, "CALL"),
    (Instructions._call_with_keywords, lambda given: given + 3, "CALL_KW"),
    (
        Instructions._call_unpacked,
        lambda flags: 4 if flags & 1 or sys.version_info >= (3, 14) else 3,
        "CALL_FUNCTION_EX",
    ),
    (Instructions._read_whole, 2, "FORMAT_WITH_SPEC"),
    (Instructions._read_whole, 3, "BINARY_SLICE"),
    (Instructions._read_whole, lambda flags: 2 if flags & 4 else 1, "FORMAT_VALUE"),
)
_OPERATORS: Mapping[str, str] = MappingProxyType(
    {
        "+": "add",
        "-": "sub",
        "*": "mul",
        "/": "truediv",
        "//": "floordiv",
        "%": "mod",
        "**": "pow",
        "@": "matmul",
        "&": "and",
        "|": "or",
        "^": "xor",
        "<<": "lshift",
        ">>": "rshift",
    }
)
# These move or make values, or control where the frame goes on.
_READ_NOTHING = frozenset(
    """BUILD_CONST_KEY_MAP BUILD_LIST BUILD_MAP BUILD_SET BUILD_SLICE BUILD_STRING BUILD_TUPLE CACHE CHECK_EG_MATCH
    CHECK_EXC_MATCH CLEANUP_THROW COPY COPY_FREE_VARS DELETE_DEREF DELETE_FAST DELETE_GLOBAL DELETE_NAME END_ASYNC_FOR
    END_FOR END_SEND EXTENDED_ARG GET_AITER GET_ANEXT GET_AWAITABLE IMPORT_NAME INTERPRETER_EXIT LIST_APPEND
    LOAD_ASSERTION_ERROR
    LOAD_BUILD_CLASS LOAD_CLOSURE LOAD_COMMON_CONSTANT LOAD_CONST LOAD_FAST LOAD_FAST_AND_CLEAR LOAD_FAST_BORROW
    LOAD_FAST_BORROW_LOAD_FAST_BORROW LOAD_FAST_CHECK LOAD_FAST_LOAD_FAST LOAD_LOCALS LOAD_SMALL_INT MAKE_CELL
    MAKE_FUNCTION MAP_ADD MATCH_MAPPING MATCH_SEQUENCE NOP NOT_TAKEN POP_EXCEPT POP_ITER POP_TOP PRECALL
    PREP_RERAISE_STAR PUSH_EXC_INFO PUSH_NULL RAISE_VARARGS RERAISE RESUME RETURN_CONST RETURN_GENERATOR RETURN_VALUE
    SEND SET_ADD SET_FUNCTION_ATTRIBUTE SETUP_ANNOTATIONS STORE_FAST STORE_FAST_LOAD_FAST STORE_FAST_STORE_FAST
    STORE_NAME SWAP
    WITH_EXCEPT_START YIELD_VALUE BEFORE_ASYNC_WITH ASYNC_GEN_WRAP""".split()
)
_BY_NAME = MappingProxyType(
    {name: (read, count) for read, count, names in _READERS for name in names.split()}
)


@functools.lru_cache(maxsize=CODES)
def _readers(code: CodeType) -> Mapping[int, tuple[dis.Instruction, int, Callable[..., None]]]:
    """Return by offset the instructions that read, with how many operands they read and who looks at them.

    An ``EXTENDED_ARG`` maps to the instruction that it belongs to. One that is in no table reads all that it takes.
    """
    found: dict[int, tuple[dis.Instruction, int, Callable[..., None]]] = {}
    prefixes: list[int] = []
    for ins in instructions_of(code):
        if ins.opname == "EXTENDED_ARG":
            prefixes.append(ins.offset)
            continue
        if ins.opname in _BY_NAME:
            read, count = _BY_NAME[ins.opname]
            reader = ins, count if isinstance(count, int) else count(ins.arg or 0), read
        elif ins.opname not in _READ_NOTHING and "JUMP" not in ins.opname:
            arg = ins.arg if ins.opcode >= dis.HAVE_ARGUMENT else None
            taken = max(1, -dis.stack_effect(ins.opcode, arg, jump=False))
            reader = ins, taken, Instructions._read_whole
        else:
            reader = None
        if reader is not None:
            found.update(dict.fromkeys((*prefixes, ins.offset), reader))
        prefixes.clear()
    return found


def _is_found_again(arg: Any) -> bool:
    """Whether a cached call with this argument can be repeated without running user code for the lookup."""
    return arg is not UNKNOWN and (
        is_key(arg) or in_classes(type(arg).__mro__, "__hash__") is object.__hash__
    )


# What builtins read of their arguments: not all contents, but a part of them or nothing.
_BUILTINS: Mapping[Any, Callable[..., None]] = MappingProxyType(
    {
        getattr: Instructions._ask,
        hasattr: Instructions._ask,
        dir: Instructions._ask,
        vars: Instructions._vars,
        len: Instructions.size,
        bool: Instructions._truth_of,
        globals: Instructions._globals,
        id: Instructions._which,
        hash: Instructions._which,
        callable: Instructions._class_of,
        isinstance: Instructions._class_of,
        issubclass: Instructions._subclass,
        type: Instructions._nothing,
        super: Instructions._nothing,
        print: Instructions._nothing,
        setattr: Instructions._nothing,
        operator.attrgetter: Instructions._nothing,
        operator.itemgetter: Instructions._nothing,
    }
)


def _is_compiled(value: Any) -> bool:
    """Whether a value is a callable whose work is not seen."""
    return type(value) in (*BUILTINS, MethodWrapperType, functools.partial, *GETTERS)


def parent(cls: Any, instance: Any) -> Any:
    """Return ``super(cls, instance)``; UNKNOWN if it raises."""
    try:
        return super(cls, instance)
    except TypeError:
        return UNKNOWN
