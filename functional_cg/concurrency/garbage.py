"""Control when garbage collection runs, and find what it knows."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

__all__ = ["functions_of", "new_objects", "no_garbage_collection", "refrozen"]

# From Python 3.12 on, the collector sets immortal objects aside by itself, some hundreds. A program that has frozen
# what it has loaded has hundreds of thousands there; to freeze again what it never froze would be a leak.
_IMMORTAL = 10_000


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


def functions_of(code: CodeType) -> list[FunctionType]:
    """Return all functions with a code object.

    Unfreezes what :func:`gc.freeze` has set aside, which the collector does not search; :func:`refrozen` puts it back.
    """
    if gc.get_freeze_count() > _IMMORTAL:
        gc.unfreeze()
    return [one for one in gc.get_referrers(code) if type(one) is FunctionType and one.__code__ is code]


@contextlib.contextmanager
def refrozen() -> Iterator[None]:
    """Freeze again, after a block, what :func:`functions_of` has unfrozen."""
    before = gc.get_freeze_count()
    try:
        yield
    finally:
        if gc.get_freeze_count() < before - _IMMORTAL:
            gc.collect()  # what is garbage by now would stay forever
            gc.freeze()


@contextlib.contextmanager
def new_objects() -> Iterator[Callable[[], list[Any]]]:
    """Yield a function that returns the tracked objects created since the block began.

    They are in the collector's youngest generation, or were when it last ran.
    """
    aged = set[int]()

    def collects(phase: str, _: object) -> None:
        if phase == "start":
            aged.update(map(id, gc.get_objects(generation=0)))

    def made() -> list[Any]:
        young = gc.get_objects(generation=0)
        if aged:
            older = (one for number in (1, 2) for one in gc.get_objects(generation=number))
            young += [one for one in older if id(one) in aged]
        return [one for one in young if id(one) not in known] if known else young

    gc.collect(0)
    # Few, unless another thread collects. They stay alive, so that no new object gets one of their ids.
    before = gc.get_objects(generation=0)
    known = set(map(id, before))
    gc.callbacks.append(collects)
    try:
        yield made
    finally:
        gc.callbacks.remove(collects)
        before.clear()
