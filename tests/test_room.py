"""No call maps memory for its frame, however deep it stands."""

from __future__ import annotations

import resource

import pytest

from tests.room import with_room

CALLS, DEPTHS = 300, 200


def nothing() -> None:
    pass


def most_faults(depth: int = 0) -> int:
    """Pages that the system had to bring for calls of one function, at the depth where they are the most."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(CALLS):
        nothing()
    mine = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return max(mine, most_faults(depth + 1)) if depth < DEPTHS else mine


def test_frames_have_room() -> None:
    """Here, too, since each test is called with room; in a chunk of the usual size a call brings a page or more."""
    assert most_faults() < CALLS
    assert with_room(most_faults) < CALLS


def test_arguments_and_errors_pass() -> None:
    assert with_room(max, [1, 3], key=lambda one: -one) == 1
    with pytest.raises(ZeroDivisionError):
        with_room(divmod, 1, 0)
