"""Control when garbage collection runs, and find what was made lately."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
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
