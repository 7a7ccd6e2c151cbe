"""Ranks that meet at a store: here each is a thread, and the store lies in memory."""

from __future__ import annotations

import time

import pytest
from torch._C._distributed_c10d import HashStore

from functional_cg import CaptureError
from functional_cg.sharding.agreement import Ranks
from tests.at_once import at_once


def meet(store: HashStore, rank: int, what: str, *, late: bool = False) -> None:
    ranks = Ranks.over(store, rank, 2, timeout=10.0)
    if late:
        time.sleep(0.2)
    ranks.agree("step", what)


def test_a_second_mesh_does_not_hear_what_was_said_on_the_first() -> None:
    store = HashStore()
    for number in range(3):
        what = f"capture step {number}"
        calls = [lambda r=rank, w=what: meet(store, r, w, late=r == 1) for rank in range(2)]
        assert at_once(*calls) == [None, None]


def test_ranks_that_are_about_to_do_different_things_are_told() -> None:
    store = HashStore()
    errors = at_once(
        lambda: meet(store, 0, "capture\nx  f32[4]"), lambda: meet(store, 1, "capture\nx  f32[3]")
    )
    for error in errors:
        assert isinstance(error, CaptureError)
        assert "rank 1 differs from rank 0.\n  rank 0  x  f32[4]   rank 1  x  f32[3]" in str(error)


def test_a_rank_that_does_not_come_is_named() -> None:
    ranks = Ranks.over(HashStore(), 0, 3, timeout=0.1)
    with pytest.raises(CaptureError, match=r"waited 0.1 s for ranks 1, 2, on rank 0 of 3"):
        ranks.agree("step", "capture")
