"""What an attribute of a module reaches: what stands in its containers, and what its functions hold on to.

``copy.deepcopy`` copies containers, bound methods and partials with what they hold; a function it takes as it is, with
its closure, its defaults and its globals. What a function reaches stays that of the original.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

__all__ = ["contents", "reached_uncopied"]


def contents(value: Any) -> Iterator[Any]:
    """The value, or what stands in it at any depth if it is a list, tuple, set or dict."""
    return (
        item for item in _walk(value, _items) if not isinstance(item, (list, tuple, set, frozenset, dict))
    )


def reached_uncopied(value: Any) -> Iterator[Any]:
    """What a copy of a value shares with it, since a function holds on to it."""
    for item in _walk(value, _copied):
        if isinstance(item, FunctionType):
            yield from _walk(item, _held)


def _walk(value: Any, below: Callable[[Any], Iterable[Any]]) -> Iterator[Any]:
    """The value and all below it, each once: containers and functions may hold themselves."""
    seen: dict[int, Any] = {}  # with the values, so that no id is taken again
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
    """What is copied with a value."""
    if isinstance(value, MethodType):
        return [value.__func__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    return _items(value)


def _held(value: Any) -> list[Any]:
    """What a value holds on to, itself uncopied."""
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, FunctionType):
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return [*defaults, *_cells(value), *_globals(value)]
    return _copied(value)


def _cells(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not yet assigned
            continue


def _globals(function: FunctionType) -> Iterator[Any]:
    """The globals that a function reads; of other functions, those of the same file: a library's lead far."""
    known = function.__globals__
    for name in {name for code in _codes(function.__code__) for name in _global_names(code)}:
        value = known.get(name)
        if not isinstance(value, FunctionType) or value.__globals__ is known:
            yield value


def _global_names(code: CodeType) -> Iterator[str]:
    return (step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL")


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
