"""What other threads import: a fork would cut it off, and whoever imports it in the child would wait forever."""

from __future__ import annotations

import importlib
import threading

__all__ = ["imported_elsewhere"]

_OF_A_STEP = ("torch", "functional_cg")  # what a trace or a compiler imports begins with one of these


def imported_elsewhere() -> list[str]:
    """Return the modules of torch, and of this library, that other threads are in the middle of importing.

    Right after a fork these are those of threads that are gone.
    """
    locks = list(importlib._bootstrap._module_locks.items())  # type: ignore[attr-defined] # private; test_forks notices
    owners = [(name, getattr(reference(), "owner", None)) for name, reference in locks]
    mine = threading.get_ident()
    return [
        name for name, owner in owners if owner not in (None, mine) and name.partition(".")[0] in _OF_A_STEP
    ]
