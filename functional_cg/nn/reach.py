"""Finds what a module attribute reaches, through containers and through functions.

``copy.deepcopy`` copies containers, bound methods and partials with their contents, but not functions: these keep their
closure, defaults and globals. Whatever a function reaches still belongs to the original.
"""

from __future__ import annotations

import contextlib
import dis
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

__all__ = ["contents", "reached_uncopied", "variables"]


def contents(value: Any) -> Iterator[Any]:
    """Yield the value, or the elements at any depth if it is a list, tuple, set or dict."""
    return (
        item for item in _walk(value, _items) if not isinstance(item, (list, tuple, set, frozenset, dict))
    )


def reached_uncopied(value: Any) -> Iterator[Any]:
    """Yield what a deep copy of a value would share with it because a function references it."""
    for item in _walk(value, _copied):
        if isinstance(item, FunctionType):
            yield from _walk(item, _held)


def variables(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the variables around a function that it reads, by name: of its closure, and of its module."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield from ((name, value) for value in _contents_of(cell))
    known = function.__globals__
    yield from ((name, known[name]) for name in sorted(_global_names(function)) if name in known)


def _walk(value: Any, below: Callable[[Any], Iterable[Any]]) -> Iterator[Any]:
    """Yield the value and everything below it once: containers and functions may contain themselves."""
    seen: dict[int, Any] = {}  # keeps the values alive, so that no id is reused
    left = [value]
    while left:
        item = left.pop()
        if id(item) not in seen:
            seen[id(item)] = item
            yield item
            left.extend(below(item))


def _items(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value.values()]
    return [*value] if isinstance(value, (list, tuple, set, frozenset)) else []


def _copied(value: Any) -> list[Any]:
    """What a deep copy of a value copies."""
    if isinstance(value, MethodType):
        return [value.__func__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    return _items(value)


def _held(value: Any) -> list[Any]:
    """What a value references if it is not copied itself."""
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, FunctionType):
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return [*defaults, *_cells(value), *_globals(value)]
    return _copied(value)


def _cells(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        yield from _contents_of(cell)


def _contents_of(cell: CellType) -> Iterator[Any]:
    with contextlib.suppress(ValueError):  # not yet assigned
        yield cell.cell_contents


def _globals(function: FunctionType) -> Iterator[Any]:
    """Yield the globals a function reads; functions only from the same module, since a library's lead too far."""
    known = function.__globals__
    for name in _global_names(function):
        value = known.get(name)
        if not isinstance(value, FunctionType) or value.__globals__ is known:
            yield value


def _global_names(function: FunctionType) -> set[str]:
    steps = (step for code in _codes(function.__code__) for step in dis.get_instructions(code))
    return {step.argval for step in steps if step.opname == "LOAD_GLOBAL"}


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a function's code and that of nested functions."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
