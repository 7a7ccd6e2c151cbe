"""H95: if ranks are about to capture different things, or some are missing, all raise and none hangs.

Here ranks are threads that share a store; ``test_refusals_on_ranks`` has processes and steps.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

import functional_cg as fcg
from functional_cg.sharding.agreement import Ranks
from functional_cg.shards.peers import among

SHORT = 0.4


def at_once(*acts: Callable[[], Any]) -> list[BaseException | None]:
    """Run acts on threads of their own; what each of them raised."""
    raised: list[BaseException | None] = [None] * len(acts)

    def run(number: int) -> None:
        try:
            acts[number]()
        except BaseException as error:
            raised[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return raised


def ranks(size: int, timeout: float = 10.0) -> list[Ranks]:
    store = dist.HashStore()
    return [Ranks.over(store, rank, size, timeout) for rank in range(size)]


def says(rank: Ranks, what: str) -> Callable[[], None]:
    return lambda: rank.agree("train", what)


def test_ranks_that_agree_go_on() -> None:
    everyone = ranks(3)
    for call in range(4):
        assert at_once(*(says(rank, f"capture {call}") for rank in everyone)) == [None] * 3


def test_h95_all_ranks_raise_where_one_differs() -> None:
    first = "capture `train`\nstate['w']  f32[4]\nbatch['x']  f32[8,3]\n7 ATen calls, abc"
    other = first.replace("f32[8,3]", "f32[5,3]")
    everyone = ranks(4)
    raised = at_once(*(says(rank, other if rank.rank in (1, 3) else first) for rank in everyone))
    expected = """`train`: ranks are about to do different things: ranks 1, 3 differ from rank 0.
  rank 0  batch['x']  f32[8,3]   rank 1  batch['x']  f32[5,3]
Each rank captures one graph, and the collectives in them wait for each other.
To fix: call the same steps in one order on all ranks, with inputs of one layout: the last batch too.
Docs: help(functional_cg.RankError)"""
    assert all(isinstance(error, fcg.RankError) for error in raised)
    assert [str(error) for error in raised] == [expected] * 4
    assert at_once(*(says(rank, "the next one") for rank in everyone)) == [None] * 4, "they are in step again"


@pytest.mark.parametrize(
    ("first", "other", "rows"),
    [
        ("a\nb", "a", ["rank 0  b   rank 1  nothing"]),
        ("a", "a\nb", ["rank 0  nothing   rank 1  b"]),
        ("a\nb\nc", "x\nb\ny", ["rank 0  a   rank 1  x", "rank 0  c   rank 1  y"]),
    ],
)
def test_the_lines_that_differ_are_shown(first: str, other: str, rows: list[str]) -> None:
    zero, one = ranks(2)
    raised = at_once(says(zero, first), says(one, other))
    assert re.findall(r"^  (.*)$", str(raised[0]), re.MULTILINE) == rows


def test_h95_missing_ranks_are_named_in_time() -> None:
    everyone = ranks(4, SHORT)
    start = time.monotonic()
    raised = at_once(*(says(rank, "capture `train`") for rank in everyone if rank.rank in (0, 2)))
    assert time.monotonic() - start < 10 * SHORT
    assert [str(error).splitlines()[0] for error in raised] == [
        "`train`: waited 0.4 s for ranks 1, 3, on rank 0 of 4.",
        "`train`: waited 0.4 s for ranks 1, 3, on rank 2 of 4.",
    ]
    assert str(raised[0]).splitlines()[1:] == [
        "  rank 0 is about to capture `train`",
        "A function over a sharded state is collective: all ranks call it, in the same order.",
        "To fix: call it on all ranks and use its result on one, `out = sample(state)`, `if rank == 0: show(out)`.",
        "Docs: help(functional_cg.RankError)",
    ]


def test_who_comes_too_late_does_not_go_on_alone() -> None:
    """What a rank said that has given up since is not taken for an answer."""
    zero, one = ranks(2, SHORT)
    assert at_once(says(zero, "capture"))[0] is not None
    (late,) = at_once(says(one, "capture"))
    assert isinstance(late, fcg.RankError)
    assert "for rank 0, on rank 1 of 2" in str(late)


def test_who_has_come_and_given_up_is_not_among_the_missing() -> None:
    everyone = ranks(4, SHORT)
    messages = [str(at_once(says(everyone[rank], "capture"))[0]).splitlines()[0] for rank in (0, 2)]
    assert messages == [
        "`train`: waited 0.4 s for ranks 1, 2, 3, on rank 0 of 4.",
        "`train`: waited 0.4 s for ranks 1, 3, on rank 2 of 4.",
    ]


class Delayed:
    """A store on which a rank is slow: something happens just before it says that it waits no longer."""

    def __init__(self, store: Any, verdict: str, before: Callable[[], Any]) -> None:
        self._store, self._verdict, self._before = store, verdict, before

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def compare_set(self, key: str, expected: str, desired: str) -> Any:
        if desired == self._verdict:
            self._verdict = ""
            self._before()
        return self._store.compare_set(key, expected, desired)


def test_h95_who_comes_while_another_gives_up_does_not_go_on_alone() -> None:
    """The last rank comes after the other one has looked for it, and before that one has given up: both go on."""
    zero, one = ranks(2, SHORT)
    zero.store = Delayed(zero.store, "given up", lambda: raised.extend(at_once(says(one, "capture"))))
    raised: list[BaseException | None] = []
    assert at_once(says(zero, "capture")) == [None]
    assert raised == [None]
    assert at_once(says(zero, "more"), says(one, "more")) == [None, None]


def test_h95_who_sees_all_while_another_gives_up_does_not_go_on_alone() -> None:
    """The last rank finds all there, and before it can say so one of them has given up: nobody goes on."""
    zero, one = ranks(2, SHORT)
    late, complete, gone = threading.Event(), threading.Event(), threading.Event()
    zero.store = Delayed(zero.store, "given up", lambda: (late.set(), complete.wait(10)))
    one.store = Delayed(one.store, "met", lambda: (complete.set(), gone.wait(10)))

    def gives_up() -> None:
        try:
            zero.agree("train", "capture")
        finally:
            gone.set()

    def comes_late() -> None:
        late.wait(10)
        one.agree("train", "capture")

    assert [type(error) for error in at_once(gives_up, comes_late)] == [fcg.RankError] * 2
    assert at_once(says(zero, "again"), says(one, "again")) == [None, None]


class Interrupted:
    """A store on which Ctrl-C strikes while a rank waits."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def wait(self, keys: list[str], time: Any) -> None:
        raise KeyboardInterrupt


def test_nobody_goes_on_with_a_rank_that_was_interrupted() -> None:
    zero, one = ranks(2, SHORT)
    store, zero.store = zero.store, Interrupted(zero.store)
    assert [type(error) for error in at_once(says(zero, "capture"))] == [KeyboardInterrupt]
    assert [type(error) for error in at_once(says(one, "capture"))] == [fcg.RankError]
    zero.store = store
    assert at_once(says(zero, "capture"), says(one, "capture")) == [None, None]


def test_ranks_that_have_given_up_at_other_times_meet_again() -> None:
    """One has called twice for nothing, one never, one waits meanwhile."""
    zero, one, two = ranks(3, SHORT)
    assert [type(error) for error in at_once(says(zero, "a"))] == [fcg.RankError]
    assert [type(error) for error in at_once(says(zero, "a"), says(two, "a"))] == [fcg.RankError] * 2
    one.timeout = two.timeout = zero.timeout = 10.0
    assert at_once(says(zero, "a"), says(one, "a"), says(two, "a")) == [None] * 3
    assert at_once(says(zero, "b"), says(one, "b"), says(two, "b")) == [None] * 3


def test_what_was_said_is_deleted() -> None:
    """A run of many captures leaves nothing behind but its last meeting."""
    everyone = ranks(2)
    store, before = everyone[0].store, everyone[0].store.num_keys()
    for call in range(4):
        assert at_once(*(says(rank, f"capture {call}") for rank in everyone)) == [None] * 2
        assert store.num_keys() <= before + 3


def test_after_a_failure_the_call_can_be_made_again() -> None:
    zero, one = ranks(2, SHORT)
    assert at_once(says(zero, "capture"))[0] is not None
    assert at_once(says(zero, "capture"), says(one, "capture")) == [None, None]
    assert at_once(says(zero, "more"), says(one, "more")) == [None, None]


def test_a_second_mesh_does_not_hear_what_was_said_on_the_first() -> None:
    store = dist.HashStore()
    first = [Ranks.over(store, rank, 2, 10.0) for rank in range(2)]
    assert at_once(says(first[0], "capture a"), says(first[1], "capture a")) == [None, None]
    second = [Ranks.over(store, rank, 2, SHORT) for rank in range(2)]
    (alone,) = at_once(says(second[0], "capture a"))
    assert isinstance(alone, fcg.RankError)


def test_parting_waits_for_all_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("functional_cg.sharding.agreement._GOODBYE_SECONDS", SHORT)
    zero, one = ranks(2)
    start = time.monotonic()
    zero.part()
    assert SHORT * 0.9 < time.monotonic() - start < 10 * SHORT
    start = time.monotonic()
    one.part()
    assert time.monotonic() - start < SHORT


@pytest.mark.parametrize("said", ["shapes cannot be multiplied", "index 7 is out of bounds", ""])
def test_what_is_no_broken_connection_stays_what_it_is(said: str) -> None:
    mesh: Any = SimpleNamespace(ranks=SimpleNamespace(absent=list))
    error = RuntimeError(said)
    with pytest.raises(RuntimeError, match=f"^{said}$") as raised, among(mesh, "f"):
        raise error
    assert raised.value is error


@pytest.mark.parametrize("said", ["Connection closed by peer", "the process group has been destroyed"])
def test_a_broken_connection_is_a_rank_error(said: str) -> None:
    mesh: Any = SimpleNamespace(number=0, everyone=2, ranks=SimpleNamespace(absent=lambda: [1], lost=False))
    with pytest.raises(fcg.RankError) as raised, among(mesh, "f"):
        raise RuntimeError(said)
    assert said in str(raised.value)
