"""Log the stages of a first call, each with its duration."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["log", "timed"]

log = logging.getLogger("functional_cg")


@contextmanager
def timed(name: str, what: str) -> Iterator[None]:
    """Log how long a block takes, if it ends without an exception."""
    start = time.perf_counter()
    yield
    log.info("%s: %s in %.2f s", name, what, time.perf_counter() - start)
