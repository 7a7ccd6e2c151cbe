"""Read what a compiled function launches, and on which memory, from its wrapper: Python that torch's compiler wrote.

A wrapper is a list of statements, which allocate, take views, launch kernels and drop names. A launch touches only what
its statement names. What it writes is known from the kernel's signature; where that is not known, it may write all that
it names. A statement of another kind ends the reading: then the step runs in one line.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...shards.collectives import WAIT, is_collective
from .source import Code
from .units import GENERATOR, LINK, Memory, Unit, fixed_by

__all__ = ["ALIGN", "UnknownStatement", "Wrapper"]

_ALLOCATE, _VIEW, _STREAM = "empty_strided", "reinterpret_tensor", "get_raw_stream"
_CHECK, ALIGN = "assert_", "copy_if_misaligned"
_EXTERN = "extern_kernels."  # products and convolutions, which write what they return, or `out`
_GUARD, _DEVICE = "torch.cuda._DeviceGuard", "torch.cuda.set_device"


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
      aligned: Those that the function would copy if they were not aligned.
      signatures: By name of a kernel, whether it only reads what comes at each position of its call.
      functions: Names of kernels that are called themselves; of others, a method is.
      first: What runs before all launches.
      entering: Lines that each lane runs when it goes on: they ask for its stream.
      units: The launches, in the order of the wrapper.
      results: What it returns, as source.
      returned: The memory of that.
    Raises:
      UnknownStatement: If there is a statement of another kind.
    """

    def __init__(self, source: str, names: Mapping[str, Any], arguments: Sequence[Memory]) -> None:
        module = ast.parse(source)
        self._names, self.known = names, list(arguments)
        self.signatures = dict(_signatures(module))
        self.functions: set[str] = set()
        self.aligned: set[str] = set()
        self.first = Unit("a view", [])
        self.entering: list[str] = []
        self.units: list[Unit] = []
        self.results = "()"
        self.returned: frozenset[Memory] = frozenset()
        self._streams: set[str] = set()
        self._memory: dict[str, Memory] = {}
        self._owner: dict[Memory, Unit | None] = {}  # what first touches it; None: it is there before the run
        self._waiting: dict[Memory, list[tuple[str, str]]] = {}  # lines and names until something touches it
        self._under_way: dict[Memory, Unit] = {}  # the last collective that touches it
        call = next(
            one for one in ast.walk(module) if isinstance(one, ast.FunctionDef) and one.name == "call"
        )
        unpack, *body = call.body
        if not (isinstance(unpack, ast.Assign) and ast.unparse(unpack.value) == "args"):
            raise UnknownStatement(ast.unparse(unpack))
        self.parameters = [one.id for one in ast.walk(unpack.targets[0]) if isinstance(one, ast.Name)]
        if len({*self.parameters}) != len(arguments):
            raise UnknownStatement(f"{ast.unparse(unpack)}, for {len(arguments)} arguments")
        self._memory |= zip(self.parameters, arguments, strict=True)
        self._owner |= dict.fromkeys(arguments)
        for statement in _flat(body):
            self._read(statement, ast.unparse(statement))

    def code(self, function: str, count: int) -> Code:
        """Return what there is beside the units; of the results, so many leave the step."""
        results = f"{self.results}[:{count}]"
        return Code(function, self.first, results, self.returned, self.known, self.entering, self.functions)

    def _read(self, statement: ast.stmt, text: str) -> None:
        match statement:
            case ast.Delete():
                pass  # the schedule knows when memory is free
            case ast.Expr() if text == "args.clear()":
                pass
            case ast.Return(value=ast.expr() as value):
                self.results, self.returned = ast.unparse(value), frozenset(self._named(value))
                for memory in self.returned & self._waiting.keys():  # nothing writes what has no elements
                    self.first.lines += [line for line, _ in self._waiting.pop(memory)]
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self._assign(name, value, text)
            case ast.Expr(value=ast.Call() as call):
                self._launch(call, text)
            case _:
                raise UnknownStatement(text)

    def _assign(self, name: str, value: ast.expr, text: str) -> None:
        function = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
        if function == _STREAM:
            self.entering += [] if name in self._streams else [text]
            self._streams.add(name)
        elif name in self.parameters and ast.unparse(value) == f"{ALIGN}({name})":
            self.aligned.add(name)
        elif name in self._memory:
            raise UnknownStatement(f"{text}, again")
        elif function.startswith(_ALLOCATE):
            self._memory[name] = name
            self._waiting[name] = [(text, name)]
        elif function == _VIEW or isinstance(value, ast.Name | ast.Subscript):
            self._view(name, value, text)
        elif isinstance(value, ast.Call):
            self._launch(value, text, name)
        else:
            raise UnknownStatement(text)

    def _view(self, name: str, value: ast.expr, text: str) -> None:
        """Let a view belong to what first touches the memory: all that comes later is ordered after that."""
        memory, *others = {*self._named(value)} or {name}
        if others or memory == name:
            raise UnknownStatement(text)
        self._memory[name] = memory
        if memory in self._waiting:
            self._waiting[memory].append((text, name))
        elif (owner := self._owner[memory]) is None:
            self.first.lines.append(text)
        else:
            owner.lines.append(text)
            owner.defined.append((memory, name))

    def _launch(self, call: ast.Call, text: str, result: str = "") -> None:
        function = ast.unparse(call.func)
        if function == _DEVICE:
            self.first.lines.append(text)
            return
        if function.startswith(_CHECK):
            return  # of strides and alignments: they passed when the function itself ran
        ops = self._ops(call.func, function)
        if result and not ops and not function.startswith(_EXTERN):
            raise UnknownStatement(text)
        touched = {*self._named(call)}
        if WAIT in ops:
            self._wait(touched, text, result)
            return
        aliases = any(one.alias_info for op in ops for one in op._schema.returns)
        if result and aliases and len(touched) == 1 and not any(op._schema.is_mutable for op in ops):
            self._view(result, call, text)
            return
        written = {*self._named(*self._may_be_written(call, function, ops))}
        if any(torch.Tag.nondeterministic_seeded in op.tags for op in ops):
            written.add(GENERATOR)
        unit = Unit(function, [], frozenset(touched))
        for memory in sorted(touched & self._waiting.keys(), key=str):
            for line, name in self._waiting.pop(memory):
                unit.lines.append(line)
                unit.defined.append((memory, name))
            self._owner[memory], unit.made[memory] = unit, 0
        unit.lines.append(text)
        if result:
            self._memory[result], self._owner[result], unit.made[result] = result, unit, 0
            unit.defined.append((result, result))
        if any(is_collective(op) for op in ops):
            unit.link = True
            written.add(LINK)
            self._under_way |= dict.fromkeys(touched | unit.made.keys(), unit)
        unit.writes = frozenset(written | unit.made.keys())
        fixed = [*map(fixed_by, ops), f"`{function}` returns an argument" if result and aliases else ""]
        unit.fixed = next(filter(None, fixed), "")
        self.functions |= {function} & self.signatures.keys()
        self.units.append(unit)

    def _wait(self, touched: Collection[Memory], text: str, result: str) -> None:
        """Let a wait belong to the collective that it waits for."""
        (memory,) = touched
        if memory not in self._under_way:
            raise UnknownStatement(text)
        unit = self._under_way[memory]
        unit.lines.append(text)
        if result:
            self._memory[result] = memory
            unit.defined.append((memory, result))

    def _ops(self, function: ast.expr, text: str) -> list[Any]:
        """Return the ops that a statement may call: none for a kernel, a method of a value, and what is external."""
        root = function
        while isinstance(root, ast.Attribute):
            root = root.value
        if not isinstance(root, ast.Name):
            raise UnknownStatement(text)
        kernel = text if text in self.signatures else text.removesuffix(".run")
        if kernel in self.signatures or text.startswith(_EXTERN) or root.id in self._memory:
            return []
        found: Any = self._names.get(root.id)
        for name in text.split(".")[1:]:
            found = getattr(found, name, None)
        if isinstance(found, torch._ops.OpOverload):
            return [found]
        if isinstance(found, torch._ops.OpOverloadPacket):
            return [getattr(found, name) for name in found.overloads()]
        raise UnknownStatement(text)

    def _may_be_written(self, call: ast.Call, function: str, ops: Sequence[Any]) -> Iterator[ast.expr]:
        """Yield the arguments of a call that it does not only read."""
        kernel = function if function in self.signatures else function.removesuffix(".run")
        if kernel in self.signatures:
            only_read = self.signatures[kernel]
            yield from (one for n, one in enumerate(call.args) if n >= len(only_read) or not only_read[n])
            yield from (word.value for word in call.keywords)
        elif function.startswith(_EXTERN):
            yield from (word.value for word in call.keywords if word.arg == "out")
        elif len(ops) == 1:
            order = ops[0]._schema.arguments
            written = {one.name for one in order if one.alias_info and one.alias_info.is_write}
            yield from (one for one, known in zip(call.args, order, strict=False) if known.name in written)
            yield from (word.value for word in call.keywords if word.arg in written)
        else:
            yield call

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
                ast.unparse(guard) == _GUARD
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
