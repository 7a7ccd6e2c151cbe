"""Read what a compiled function launches, and on which memory, from its wrapper: Python that torch's compiler wrote.

A wrapper is a list of statements, which allocate, take views, launch kernels and drop names. A launch touches only what
its statement names. What it writes is known from the kernel's signature; where that is not known, it may write all that
it names. A statement of another kind ends the reading: then the step runs in one line.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .units import GENERATOR, Memory, Unit, fixed_by

__all__ = ["UnknownStatement", "Wrapper"]

_ALLOCATES = ("empty_strided",)
_CHECKS = frozenset({"assert_size_stride", "assert_alignment"})
_STREAM = "get_raw_stream"
_DEVICE = ("torch.cuda._DeviceGuard", "torch.cuda.set_device")


class UnknownStatement(Exception):
    """A wrapper has a statement of a kind that is not known."""


class Wrapper:
    """The launches of a compiled function as units.

    Args:
      source: The module that the compiler wrote.
      names: Its globals.
      arguments: The memory of each argument.
    Attributes:
      known: The memory of each argument.
      parameters: Their names.
      signatures: By name of a kernel, whether it only reads what comes at each position of its call.
      kernels: Names of kernels that are functions.
      before: Lines that run first, once.
      entering: Lines that each lane runs when it goes on: they ask for its stream.
      units: The launches, in the order of the wrapper.
      defined: What each unit defines.
      variables: Names of the memory that the function allocates.
      results: What it returns, as source.
      returned: The memory of that.
    Raises:
      UnknownStatement: If there is a statement of another kind.
    """

    def __init__(self, source: str, names: Mapping[str, Any], arguments: Sequence[Memory]) -> None:
        module = ast.parse(source)
        self._names, self.signatures, self.known = names, dict(_signatures(module)), list(arguments)
        self.kernels: set[str] = set()
        self._streams: set[str] = set()
        self.before: list[str] = []
        self.entering: list[str] = []
        self.units: list[Unit] = []
        self.defined: dict[Unit, list[tuple[Memory, str]]] = {}
        self.variables: dict[Memory, list[str]] = {}
        self.results = "()"
        self.returned: frozenset[Memory] = frozenset()
        self._memory: dict[str, Memory] = {}
        self._owner: dict[Memory, Unit | None] = {}  # what first touches it; None: it is there before the run
        self._waiting: dict[Memory, list[tuple[str, str]]] = {}  # lines and names until something touches it
        call = next(
            node for node in ast.walk(module) if isinstance(node, ast.FunctionDef) and node.name == "call"
        )
        unpack, *body = call.body
        if not (isinstance(unpack, ast.Assign) and ast.unparse(unpack.value) == "args"):
            raise UnknownStatement(ast.unparse(unpack))
        self.parameters = [one.id for one in ast.walk(unpack.targets[0]) if isinstance(one, ast.Name)]
        if len(self.parameters) != len(arguments):
            raise UnknownStatement(f"{ast.unparse(unpack)}, for {len(arguments)} arguments")
        self._memory |= zip(self.parameters, arguments, strict=True)
        self._owner |= dict.fromkeys(arguments)
        for statement in _flat(body):
            self._read(statement)

    def _read(self, statement: ast.stmt) -> None:
        text = ast.unparse(statement)
        match statement:
            case ast.Delete():
                pass
            case ast.Expr() if text == "args.clear()":
                pass
            case ast.Return(value=value) if value is not None:
                self.results = ast.unparse(value)
                self.returned = frozenset(self._named(value))
                for memory in self.returned & self._waiting.keys():  # nothing writes what has no elements
                    self.before += [line for line, _ in self._waiting.pop(memory)]
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self._assign(name, value, text)
            case ast.Expr(value=ast.Call() as call):
                self._call(call, text)
            case _:
                raise UnknownStatement(text)

    def _assign(self, name: str, value: ast.expr, text: str) -> None:
        function = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
        if function == _STREAM:
            self.entering.append(text)
            self._streams.add(name)
            return
        if name in self._memory:
            raise UnknownStatement(f"{text}, again")
        if function.startswith(_ALLOCATES):
            self._memory[name] = name
            self._waiting[name] = [(text, name)]
            self.variables[name] = [name]
        elif isinstance(value, ast.Name | ast.Subscript) or function == "reinterpret_tensor":
            self._view(name, value, text)
        elif isinstance(value, ast.Call):
            self._call(value, text, name)
        else:
            raise UnknownStatement(text)

    def _view(self, name: str, value: ast.expr, text: str) -> None:
        """Let a line belong to what first touches the memory: all that comes later is ordered after that."""
        memory = set(self._named(value))
        if len(memory) != 1:
            raise UnknownStatement(text)
        (known,) = memory
        self._memory[name] = known
        self._host_line(known, text, name)
        self.variables.setdefault(known, []).append(name)

    def _host_line(self, memory: Memory, text: str, name: str = "") -> None:
        if memory in self._waiting:
            self._waiting[memory].append((text, name))
        elif (owner := self._owner[memory]) is None:
            self.before.append(text)
        else:
            owner.lines.append(text)
            self.defined[owner] += [(memory, name)] if name else []

    def _call(self, call: ast.Call, text: str, result: str = "") -> None:
        function = ast.unparse(call.func)
        if function in _DEVICE:
            self.before.append(text)
            return
        if function in _CHECKS:
            for memory in self._named(call.args[0]):
                self._host_line(memory, text)
            return
        op = self._op(call.func)
        self.kernels |= {function} & self.signatures.keys()
        named = {*self._named(call)}
        if result and op is None:
            raise UnknownStatement(text)
        fixed = ""
        if isinstance(op, torch._ops.OpOverload) and any(one.alias_info for one in op._schema.returns):
            if result and len(named) == 1 and not op._schema.is_mutable:
                self._view(result, call, text)
                return
            fixed = f"`{op._schema.name}` returns an argument" if result else ""
        unit = Unit(function, [], frozenset(), frozenset())
        writes = {*self._named(*self._written(call, function, op))}
        made: dict[Memory, int] = {}
        self.defined[unit] = []
        for memory in sorted(named, key=str):
            for line, name in self._waiting.pop(memory, ()):
                unit.lines.append(line)
                made[memory] = 0
                self.defined[unit] += [(memory, name)] if name else []
                self._owner[memory] = unit
        unit.lines.append(text)
        if result:
            made[result] = 0
            self._memory[result], self._owner[result] = result, unit
            self.variables[result] = [result]
            self.defined[unit].append((result, result))
        if any(torch.Tag.nondeterministic_seeded in one.tags for one in _overloads(op)):
            writes.add(GENERATOR)
        unit.made = made
        unit.reads, unit.writes = frozenset(named), frozenset(writes | made.keys())
        unit.fixed = fixed or next(filter(None, map(fixed_by, _overloads(op))), "")
        self.units.append(unit)

    def _op(self, function: ast.expr) -> Any:
        """Return the op that a statement calls; None for a kernel, for a method of a value, and for a product."""
        root = function
        while isinstance(root, ast.Attribute):
            root = root.value
        text = ast.unparse(function)
        if not isinstance(root, ast.Name):
            raise UnknownStatement(text)
        if (
            text in self.signatures
            or text.removesuffix(".run") in self.signatures
            or root.id == "extern_kernels"
        ):
            return None
        if root.id in self._memory:
            return None
        found: Any = self._names.get(root.id)
        for name in text.split(".")[1:]:
            found = getattr(found, name, None)
        if isinstance(found, torch._ops.OpOverloadPacket) and len(found.overloads()) == 1:
            found = getattr(found, found.overloads()[0])
        if not isinstance(found, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
            raise UnknownStatement(text)
        return found

    def _only_read(self, call: ast.Call, function: str, op: Any) -> Iterator[ast.expr]:
        """Yield the arguments that a call does not write."""
        kernel = function.removesuffix(".run")
        if kernel in self.signatures:
            yield from (one for one, read in zip(call.args, self.signatures[kernel], strict=False) if read)
        elif function.startswith("extern_kernels."):
            yield from call.args
            yield from (word.value for word in call.keywords if word.arg != "out")
        elif isinstance(op, torch._ops.OpOverload):
            written = {one.name for one in op._schema.arguments if one.alias_info and one.alias_info.is_write}
            order = [one.name for one in op._schema.arguments]
            yield from (one for one, name in zip(call.args, order, strict=False) if name not in written)
            yield from (word.value for word in call.keywords if word.arg not in written)

    def _written(self, call: ast.Call, function: str, op: Any) -> Iterator[ast.expr]:
        """Yield the arguments that are not only read: one may be both."""
        read = {id(one) for one in self._only_read(call, function, op)}
        for one in (*call.args, *(word.value for word in call.keywords)):
            if id(one) not in read:
                yield one
        if isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) in self._memory:
            yield call.func.value

    def _named(self, *values: ast.expr) -> Iterator[Memory]:
        """Yield the memory of all that expressions name."""
        nodes = itertools.chain.from_iterable(map(ast.walk, values))
        for name in (node.id for node in nodes if isinstance(node, ast.Name)):
            if name in self._memory:
                yield self._memory[name]
            elif isinstance(self._names.get(name), Tensor):
                self._owner.setdefault(name, None)
                yield name
            elif name not in self._names and name not in self._streams:
                raise UnknownStatement(f"{name}, which nothing defines")


def _flat(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements, with those of a block that sets the device; it is set for all of the run."""
    for statement in body:
        match statement:
            case ast.With(items=[ast.withitem(context_expr=ast.Call(func=guard))]) if (
                ast.unparse(guard) in _DEVICE
            ):
                yield from _flat(statement.body)
            case _:
                yield statement


def _signatures(module: ast.Module) -> Iterator[tuple[str, Sequence[bool]]]:
    """Yield each kernel with whether it only reads what comes at each position of its call."""
    for statement in module.body:
        match statement:
            case ast.Assign(
                targets=[ast.Name(id=name)], value=ast.Call(func=function, args=[first, second, *_])
            ):
                made_by = ast.unparse(function)
                if made_by == "async_compile.cpp_pybinding":
                    yield name, [kind.startswith("const ") for kind in ast.literal_eval(first)]
                elif made_by == "async_compile.triton" and isinstance(second, ast.Constant):
                    yield name, list(_of_triton(name, str(second.value)))
            case _:
                pass


def _of_triton(name: str, source: str) -> Iterator[bool]:
    """Yield whether a Triton kernel of the compiler only reads each of its parameters; of others nothing is known."""
    if "user_autotune" in source:
        return
    kernel = ast.parse(source)
    mutated: set[str] = set()
    for node in ast.walk(kernel):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "mutated_arg_names":
                    mutated.update(ast.literal_eval(value))
    for node in kernel.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            for one in node.args.args:
                yield one.arg.startswith("in_ptr") and one.arg not in mutated


def _overloads(op: Any) -> list[Any]:
    """Return what an op may be; nothing for None."""
    if isinstance(op, torch._ops.OpOverloadPacket):
        return [getattr(op, name) for name in op.overloads()]
    return [] if op is None else [op]
