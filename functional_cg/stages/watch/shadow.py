"""The shadow of a frame: a stack on which each instruction, before it runs, puts what it loads.

What an instruction loads is recorded as read; what it computes is seen in the frame itself once it has run.
"""

from __future__ import annotations

import builtins
import dis
import sys
from importlib.util import resolve_name
from types import CodeType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .calls import Calls, parent
from .kinds import UNKNOWN
from .places import ITEM, Step
from .stack import NULL
from .values import holds, in_classes, is_array, is_container, is_value

__all__ = ["Shadow"]

_TYPES_OF_TENSORS = ((FakeTensor, torch.Tensor), (torch.Tensor, FakeTensor))
_METHODS_BY_FLAG = sys.version_info >= (3, 12)


class Shadow(Calls):
    """Interprets the instructions of a frame."""

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
