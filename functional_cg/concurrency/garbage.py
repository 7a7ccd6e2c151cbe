"""Control when garbage collection runs."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["no_garbage_collection"]


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
