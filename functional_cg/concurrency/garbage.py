"""Control when garbage collection runs, and find what was made lately."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from itertools import chain, compress, repeat
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
def new_objects() -> Iterator[Callable[[], tuple[set[int], Callable[[], Iterator[Any]]]]]:
    """Yield a function that tells which tracked objects were created since the block began.

    They are in the collector's youngest generation, or were when it last ran. The function returns their ids, and a
    function that yields the objects; what is yielded has to be used up by one call in C.
    """
    aged = set[int]()

    def collects(phase: str, _: object) -> None:
        if phase == "start":
            aged.update(map(id, _each(0)))

    def made() -> tuple[set[int], Callable[[], Iterator[Any]]]:
        ids, generations = set(map(id, _each(0))), range(3 if aged else 1)
        for number in generations[1:]:
            ids |= aged.intersection(map(id, _each(number)))
        ids -= known
        return ids, lambda: chain.from_iterable([_those(ids, number) for number in generations])

    gc.collect(0)
    known = set(map(id, _each(0)))  # few, unless another thread collects
    gc.callbacks.append(collects)
    try:
        yield made
    finally:
        gc.callbacks.remove(collects)
