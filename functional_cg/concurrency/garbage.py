"""Control when garbage collection runs, and find what was made lately."""

from __future__ import annotations

import contextlib
import gc
import operator
import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, compress, dropwhile, repeat
from typing import Any

__all__ = ["new_objects", "no_garbage_collection"]


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection, unless it is disabled already."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


# Another thread may be building a tuple, which fails if anybody else holds it, or count the references to a tensor. So
# the objects of a generation are gone through within one call in C, during which no other thread runs.


def _each(generation: int) -> Iterator[Any]:
    """Yield the tracked objects of a generation, which are listed when the first one is asked for."""
    return chain.from_iterable(map(gc.get_objects, (generation,)))


def _those(ids: set[int], generation: int) -> Iterator[Any]:
    """Yield the objects of a generation that have one of these ids.

    The generation is listed twice: what is new in the second list, such as these iterators, stands at its end. It is
    gone through to there, or the iterators would hold each other.
    """
    return compress(chain(_each(generation), repeat(None)), map(ids.__contains__, map(id, _each(generation))))


@contextlib.contextmanager
def new_objects() -> Iterator[Callable[[], tuple[set[int], Callable[[], Iterator[Any]], bool]]]:
    """Yield a function that tells which tracked objects were created since the block began.

    They stand in the collector's youngest generation, in the order in which they were made, or did when it last ran.
    The function returns their ids, a function that yields the objects, and whether the ids may be too few: another
    thread has collected, and what was made while it began is not told from older objects. What is yielded has to be
    used up by one call in C.
    """
    first: list[Any] = []  # what stands behind it is new
    aged, own = set[int](), list[bool]()  # own: of each collection, whether this thread began it
    thread = threading.get_ident()

    def young() -> set[int]:
        new = set(map(id, dropwhile(partial(operator.is_not, first), _each(0))))
        return new or set(map(id, _each(0)))  # a collection has moved the first one

    def collects(phase: str, _: object) -> None:
        if phase == "start":
            aged.update(young())
            own.append(threading.get_ident() == thread)

    def made() -> tuple[set[int], Callable[[], Iterator[Any]], bool]:
        moved = id(first) not in set(map(id, _each(0)))
        ids, generations = young(), range(3 if aged else 1)
        for number in generations[1:]:
            ids |= aged.intersection(map(id, _each(number)))
        incomplete = moved and not (own and all(own))
        return ids, lambda: chain.from_iterable([_those(ids, number) for number in generations]), incomplete

    gc.callbacks.append(collects)
    try:
        yield made
    finally:
        gc.callbacks.remove(collects)
