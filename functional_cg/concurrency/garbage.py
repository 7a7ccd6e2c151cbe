"""Control when garbage collection runs, and find what it knows."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from types import CodeType, FunctionType

__all__ = ["collections", "functions_of", "no_garbage_collection"]

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


def collections() -> int:
    """Return how often garbage was collected in this process."""
    return sum(one["collections"] for one in gc.get_stats())


def functions_of(code: CodeType) -> list[FunctionType]:
    """Find all functions with a code object, also among the objects that :func:`gc.freeze` has set aside."""
    frozen = gc.get_freeze_count() > _IMMORTAL
    if frozen:
        gc.collect()  # what is garbage by now would stay forever; later it would be looked for in all there is
        gc.unfreeze()
    try:
        return [one for one in gc.get_referrers(code) if type(one) is FunctionType and one.__code__ is code]
    finally:
        if frozen:
            gc.freeze()
