"""Helper that starts threads at the same moment, for concurrency tests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """What each call returned, or the exception that it raised; each ran in a thread of its own."""
    barrier = threading.Barrier(len(calls))
    results: list[Any] = [None] * len(calls)

    def run(place: int, call: Callable[[], Any]) -> None:
        barrier.wait()
        try:
            results[place] = call()
        except Exception as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
