"""Close process groups that an exception leaves open; the one place that knows torch's table of them.

``torch.distributed.batch_isend_irecv`` and others collect calls in a context manager that has no ``finally``. An
exception inside of it, such as a refusal by a trace, leaves the group collecting: every later collective would be
queued and never run, and its results would be whatever was in memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Set
from typing import Any

from torch.distributed import distributed_c10d

__all__ = ["all_groups", "close_groups", "open_groups"]


def all_groups() -> list[Any]:
    """Return the process groups of this process."""
    return list(distributed_c10d._world.pg_names)


def open_groups() -> Set[Any]:
    """Return the process groups that are collecting calls."""
    return set(distributed_c10d._world.pg_coalesce_state)


def close_groups(but: Set[Any]) -> None:
    """Discard what process groups have collected, and let them run their next calls; leave alone those in ``but``."""
    for group in open_groups() - but:
        collected = distributed_c10d._world.pg_coalesce_state.pop(group)
        if collected:
            continue  # they were collected in Python: the group itself has begun nothing
        for device in group._device_types:
            # Entered without a device, the manager has begun nothing either, and the backend says so.
            with contextlib.suppress(RuntimeError):
                if group._get_backend(device).supports_coalescing:
                    group._end_coalescing(device)
