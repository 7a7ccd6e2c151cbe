"""A code object, read instruction by instruction: which chains of names it follows and what it calls with them."""

from __future__ import annotations

import builtins
import dis
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import resolve_name
from types import CodeType, FunctionType
from typing import Any

from . import calls
from .interpreter import OPERATORS, Interpreter
from .refs import Made, Ref, Refs, Step, either, is_installed, is_user_module
from .values import has_key, in_classes, is_container, is_value

__all__ = ["Inner", "Reader"]


@dataclass(frozen=True, slots=True, eq=False)
class Inner:
    """A function that the code makes: its own code, what the names around it stand for, and its defaults."""

    code: CodeType
    names: dict[str, Refs]
    namespace: dict[str, Any]
    defaults: Refs = ()

    def parameters(self, args: Iterable[Refs], kwargs: Mapping[str, Refs]) -> dict[str, Refs]:
        """What its names stand for in a call."""
        positional = self.code.co_varnames[: self.code.co_argcount]
        known = dict(self.names)
        for made in self.defaults:
            if isinstance(made.value, Made) and len(made.value.parts) <= len(positional):
                names = positional[len(positional) - len(made.value.parts) :]
                known.update(zip(names, made.value.parts.values(), strict=True))
        known.update(zip(positional, args, strict=False))
        known.update({name: refs for name, refs in kwargs.items() if name in self.code.co_varnames})
        return known


class Reader(Interpreter):
    """What the instructions that make chains and calls do on references."""

    def op_load_global(self, ins: dis.Instruction) -> None:
        if ins.arg is not None and ins.arg & 1 and ins.opname == "LOAD_GLOBAL":
            self.stack.append(())
        name = ins.argval
        if name in self.namespace:
            if is_container(self.namespace[name]) and is_installed(self.namespace):
                self.stack.append(())  # a registry: others add to it, which is no change for this step
                return
            self.push((Ref(self.namespace[name], self.namespace, (Step(name, item=True),), name),))
        else:
            found = getattr(builtins, name, None)
            self.push((Ref(found),) if callable(found) else ())

    op_load_name = op_load_global

    def op_load_fast(self, ins: dis.Instruction) -> None:
        # From Python 3.13 on LOAD_FAST of a cell loads the cell, for the closure of an inner function.
        cells = self.code.co_cellvars + self.code.co_freevars if ins.opname.startswith("LOAD_FAST") else ()
        for name in ins.argval if isinstance(ins.argval, tuple) else (ins.argval,):
            self.push(() if name in cells else self.names.get(name, ()))

    op_load_deref = op_load_classderef = op_load_fast_check = op_load_fast_and_clear = op_load_fast
    op_load_fast_borrow = op_load_fast_load_fast = op_load_fast_borrow_load_fast_borrow = op_load_fast

    def op_load_const(self, ins: dis.Instruction) -> None:
        self.push((Ref(ins.argval),))

    op_load_small_int = op_load_const

    def store(self, name: str) -> None:
        refs = self.names[name] = self.pop()
        self.ever[name] = either(self.ever.get(name, ()), refs)

    def op_store_fast(self, ins: dis.Instruction) -> None:
        for name in ins.argval if isinstance(ins.argval, tuple) else (ins.argval,):
            self.store(name)

    op_store_deref = op_store_fast_store_fast = op_store_fast

    def op_store_fast_load_fast(self, ins: dis.Instruction) -> None:
        self.store(ins.argval[0])
        self.push(self.names.get(ins.argval[1], ()))

    def op_import_name(self, ins: dis.Instruction) -> None:
        level, _ = self.take(2)
        dots = level[0].value if level else 0
        name = (
            resolve_name("." * dots + ins.argval, self.namespace.get("__package__")) if dots else ins.argval
        )
        module = sys.modules.get(name)
        known = module is not None and is_user_module(module)
        self.push((Ref(module, sys.modules, (Step(name, item=True),), name) if known else Ref(module),))

    def op_import_from(self, ins: dis.Instruction) -> None:
        self.push(calls.attribute(self.visitor, self.peek(), ins.argval))

    def op_load_attr(self, ins: dis.Instruction) -> None:
        self.stack.append(calls.attribute(self.visitor, self.pop(), ins.argval))
        # From Python 3.12 on a flag says that a method is loaded, which fills two places.
        if ins.opname == "LOAD_METHOD" or (
            sys.version_info >= (3, 12) and ins.arg is not None and ins.arg & 1
        ):
            self.stack.append(())

    op_load_method = op_load_attr

    def op_load_super_attr(self, ins: dis.Instruction) -> None:
        _, cls, instance = self.take(3)
        self.stack.append(_super(cls, instance))
        self.op_load_attr(ins)

    def op_binary_subscr(self, ins: dis.Instruction) -> None:
        owner, key = self.take(2)
        self.stack.append(calls.item(self.visitor, owner, key))

    def op_binary_op(self, ins: dis.Instruction) -> None:
        if ins.argrepr == "[]":
            self.op_binary_subscr(ins)
        else:
            self.operate(ins)

    def operate(self, ins: dis.Instruction) -> None:
        """An operator: of the user's classes it calls a method."""
        name = OPERATORS.get(ins.argrepr.rstrip("=") if ins.opname == "BINARY_OP" else ins.argval)
        for ref in self.stack[-2] if len(self.stack) > 1 and name else ():
            method = in_classes(type(ref.value).__mro__, str(name))
            if isinstance(method, FunctionType):
                self.visitor.enter(Ref(method, bound=ref), [self.peek()])
        self.other(ins)

    op_compare_op = operate

    def op_is_op(self, ins: dis.Instruction) -> None:
        for refs in self.take(2):
            self.test(refs, by_kind=True)
        self.stack.append(())

    def op_to_bool(self, ins: dis.Instruction) -> None:
        self.test(self.pop())
        self.stack.append(())

    def op_unary_not(self, ins: dis.Instruction) -> None:
        self.op_to_bool(ins)

    def op_contains_op(self, ins: dis.Instruction) -> None:
        keys, owners = self.take(2)
        for owner in owners:
            method = in_classes(type(owner.value).__mro__, "__contains__")
            if isinstance(method, FunctionType) and owner.storage is owner:
                self.visitor.enter(Ref(method, bound=owner), [keys])
            elif keys and all(is_value(key.value) for key in keys):
                for key in keys:
                    self.visitor.note(owner, has_key(key.value))
            else:
                self.visitor.use((owner,))
        self.stack.append(())

    def op_copy(self, ins: dis.Instruction) -> None:
        depth = ins.arg or 0
        self.stack.append(self.stack[-depth] if depth <= len(self.stack) else ())

    def op_swap(self, ins: dis.Instruction) -> None:
        depth = ins.arg or 0
        if depth > len(self.stack):
            self.clear()
        else:
            self.stack[-1], self.stack[-depth] = self.stack[-depth], self.stack[-1]

    def op_build_tuple(self, ins: dis.Instruction) -> None:
        self.stack += [Made.of(*self.take(ins.arg or 0))]

    op_build_list = op_build_set = op_build_tuple

    def op_build_map(self, ins: dis.Instruction) -> None:
        taken = self.take(2 * (ins.arg or 0))
        parts = {
            key[0].value: value for key, value in zip(taken[::2], taken[1::2], strict=True) if _is_key(key)
        }
        self.stack.append((Ref(Made(parts)),))

    def op_build_const_key_map(self, ins: dis.Instruction) -> None:
        *values, keys = self.take((ins.arg or 0) + 1)
        self.stack.append((Ref(Made(dict(zip(keys[0].value, values, strict=True)))),) if keys else ())

    def op_list_append(self, ins: dis.Instruction) -> None:
        self.gather(ins.arg or 0, self.pop())

    op_set_add = op_list_append

    def op_map_add(self, ins: dis.Instruction) -> None:
        self.gather(ins.arg or 0, self.take(2)[1])

    def gather(self, depth: int, refs: Refs) -> None:
        """A comprehension adds to what it makes."""
        if refs and depth <= len(self.stack):
            held = [made.value.all for made in self.stack[-depth] if isinstance(made.value, Made)]
            self.stack[-depth] = Made.of(either(*held, refs))

    def op_get_iter(self, ins: dis.Instruction) -> None:
        self.stack.append(Made.of(calls.elements(self.visitor, self.pop())))

    def op_unpack_sequence(self, ins: dis.Instruction) -> None:
        owners, count = self.pop(), ins.arg or 0
        all_of_it = calls.elements(self.visitor, owners)
        parts: list[list[Refs]] = [[] for _ in range(count)]
        for owner in owners:
            held = (
                owner.value.parts if isinstance(owner.value, Made) else dict(enumerate(zip(owner.elements())))
            )
            for place in range(count):
                parts[place].append(held[place] if len(held) == count and place in held else all_of_it)
        self.stack += [either(*places) for places in parts][::-1]

    def op_unpack_ex(self, ins: dis.Instruction) -> None:
        found = calls.elements(self.visitor, self.pop())
        before, after = (ins.arg or 0) & 0xFF, (ins.arg or 0) >> 8
        self.stack += [*[found] * after, Made.of(found), *[found] * before]

    def op_match_class(self, ins: dis.Instruction) -> None:
        owners, cls, names = self.take(3)
        self.test(owners, by_kind=True)
        placed = [getattr(ref.value, "__match_args__", ())[: ins.arg or 0] for ref in cls]
        keys = [*(placed[0] if placed else ()), *(names[0].value if names else ())]
        self.stack.append(Made.of(*(calls.attribute(self.visitor, owners, key) for key in keys)))

    def op_make_function(self, ins: dis.Instruction) -> None:
        code = self.pop()
        *given, _ = [*self.take((ins.arg or 0).bit_count()), ()]
        defaults = given[0] if given and (ins.arg or 0) & 1 else ()
        inner = Inner(code[0].value, self.ever, self.namespace, defaults) if code else None
        self.stack.append((Ref(inner),) if inner is not None else ())

    def op_set_function_attribute(self, ins: dis.Instruction) -> None:
        given, function = self.take(2)
        made = [ref.value for ref in function if isinstance(ref.value, Inner)]
        defaults = given if ins.arg == 1 else ()
        again = [Inner(one.code, one.names, one.namespace, defaults or one.defaults) for one in made]
        self.stack.append(tuple(map(Ref, again)))

    def op_before_with(self, ins: dis.Instruction) -> None:
        held: Refs = ()
        for ref in self.pop():
            if isinstance(ref.value, Made):
                held = either(held, ref.value.all)
                continue
            enter = ref.attribute("__enter__")
            found = self.visitor.enter(enter) if enter is not None else None
            leave = ref.attribute("__exit__")
            if leave is not None:
                self.visitor.enter(leave)
            if found is None:
                self.visitor.use((ref,))
            held = either(held, found or ())
        self.stack += [(), held]

    def op_return_value(self, ins: dis.Instruction) -> None:
        self.returned = either(self.returned, self.peek())
        self.clear()
        self.falls = False

    def op_return_const(self, ins: dis.Instruction) -> None:
        self.returned = either(self.returned, (Ref(ins.argval),))
        self.clear()
        self.falls = False

    def op_yield_value(self, ins: dis.Instruction) -> None:
        self.returned = either(self.returned, self.pop())
        self.stack.append(())

    def op_kw_names(self, ins: dis.Instruction) -> None:
        self.keywords = self.code.co_consts[ins.arg or 0]

    def op_call_kw(self, ins: dis.Instruction) -> None:
        names = self.pop()
        self.keywords = names[0].value if names else ()
        self.op_call(ins)

    def op_call(self, ins: dis.Instruction) -> None:
        args = self.take(ins.arg or 0)
        names, self.keywords = self.keywords, ()
        split = len(args) - len(names)
        self.call(args[:split], dict(zip(names, args[split:], strict=True)))

    def op_call_function_ex(self, ins: dis.Instruction) -> None:
        given = 2 if sys.version_info >= (3, 14) else 1 + ((ins.arg or 0) & 1)
        for refs in self.take(given):
            self.visitor.use(refs)
        self.call([], {})

    def call(self, args: list[Refs], kwargs: dict[str, Refs]) -> None:
        """Call what lies under the arguments: two places, of which one is empty or, for a method, its ``self``."""
        first, second = self.take(2)
        if first and second:  # a comprehension's iterator is passed like a ``self``
            args = [second, *args]
        results = [self.result(callee, args, kwargs) for callee in first or second]
        if not results or None in results:
            for refs in (*args, *kwargs.values()):
                self.visitor.use(refs)
        self.stack.append(either(*(result or () for result in results)))

    def result(self, callee: Ref, args: list[Refs], kwargs: dict[str, Refs]) -> Refs | None:
        if callee.value is super:
            cls, instance = self.names.get("__class__"), self.names.get(next(iter(self.code.co_varnames), ""))
            return _super(cls or (), instance or ())
        if callee.value is globals:
            return (Ref.to(self.namespace, "globals()"),)
        return self.visitor.enter(callee, args, kwargs)


def _super(classes: Refs, instances: Refs) -> Refs:
    return tuple(
        Ref(super(cls.value, instance.value), bound=instance)
        for cls in classes
        for instance in instances
        if isinstance(cls.value, type) and isinstance(instance.value, cls.value)
    )


def _is_key(refs: Refs) -> bool:
    return len(refs) == 1 and is_value(refs[0].value) and not isinstance(refs[0].value, slice)
