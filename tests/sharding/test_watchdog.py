"""A call that waits for ranks that do not come ends the process: with the call, the missing ranks and all stacks."""

from __future__ import annotations

import math
import os
import re
import signal
import threading
import time
import types
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

import functional_cg as fcg
from functional_cg.concurrency.driver import apart_from_captures
from functional_cg.sharding import watchdog
from functional_cg.sharding.watchdog import EXIT_CODE, OnDevice, OnHost, Watchdog, missing
from tests.at_once import at_once
from tests.sharding.law import on_gloo_and_nccl, rank_of
from tests.sharding.programs import mlp_batch, mlp_state, mlp_step
from tests.sharding.ranks import Outcome, on_ranks, outcomes, outcomes_of_each
from tests.sharding.test_agreement import ranks

LIMIT, LATER = {"cpu": 0.6, "cuda": 3.0}, {"cpu": 2.5, "cuda": 8.0}  # seconds
PATIENCE = 0.6
CALLS = 3

# Which rank does not come, how, and what the other one says.
AWAY = [
    (1, "sleeps", r"  rank 1  lives, and has called it 2 times\n"),
    (1, "is stopped", r"  rank 1  does not answer\n"),
    (0, "is stopped", r"  the store where ranks meet does not answer: rank 0 holds it, or the launcher\n"),
    (1, "is killed", r"  rank 1  does not answer\n"),  # with gloo, the other one hears of it at once
]


def stays_away(who: int, how: str, device: str) -> None:
    """A rank does not come to a call."""
    watchdog._PATIENCE = PATIENCE
    mesh = fcg.sharding.mesh({"data": 2}, device=device, timeout=60.0, step_timeout=LIMIT[device])
    state: Any = mlp_state()(fcg.sharding.zero(mesh, stage=3), device)
    step = fcg.graph_step(mlp_step, lowering="aten")
    for call in range(CALLS):
        if call == CALLS - 1 and rank_of() == who:
            if how == "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            me = os.getpid()
            if os.fork() == 0:  # ends it when all is over, and can when it is stopped
                time.sleep(LATER[device])
                os.kill(me, signal.SIGKILL)
                os._exit(0)
            os.kill(me, signal.SIGSTOP if how == "is stopped" else signal.SIGCONT)
            time.sleep(2 * LATER[device])
        state, metrics = step(state, fcg.tree.map(lambda x: x.to(device), mlp_batch(call, rank_of())))
        float(metrics["loss"])


def assert_ended(who: int, said: str, device: str, ends: list[Outcome]) -> None:
    away, other = ends[who], ends[1 - who]
    assert (other.code, away.code) == (EXIT_CODE, -signal.SIGKILL), other
    # A GPU tells how far it is by events, of which not every call has one.
    which = rf"(call {CALLS}|one of calls \d to {CALLS}) is not done after {LIMIT[device]:g} s, on rank {1 - who} of 2"
    end = rf"this process ends with exit code {EXIT_CODE}\.\n{said}"
    assert re.search(rf"RankError: `mlp_step`: {which}; {end}", other.log), other.log
    assert re.search(r"(?m)^Thread 0x(.|\n)*in stays_away$", other.log), "the stack of the main thread"


@on_gloo_and_nccl
def test_a_rank_that_does_not_come_is_named_and_the_others_end(device: str) -> None:
    """While it lives elsewhere, and when it does not answer; all at one time, as the others wait."""
    away = [one for one in AWAY if device == "cuda" or one[1] != "is killed"]
    calls = [(who, how, device) for who, how, _ in away]
    found = outcomes_of_each(2, stays_away, calls, device=device, timeout=60)
    for (who, _, said), ends in zip(away, found, strict=True):
        assert_ended(who, said, device, ends)


def joins(port: int, attempt: int) -> float:
    """One of torchrun's attempts; ranks leave the first one without a word."""
    os.environ |= {
        "MASTER_PORT": str(port), "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
    }  # fmt: skip
    fcg.sharding.mesh({"data": 2}, device="cpu", timeout=20.0)
    total = torch.ones(())
    dist.all_reduce(total)
    if attempt == 0:
        os._exit(0)
    return float(total)


def test_a_restart_of_torchrun_does_not_meet_the_ranks_that_are_gone() -> None:
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )  # torchrun's, for all attempts
    assert [end.code for end in outcomes(2, joins, store.port, 0)] == [0, 0]
    assert on_ranks(2, joins, store.port, 1) == [2.0, 2.0]


class Device:
    """Stands for a device, its stream and an arena there; its calls are done when the test says so."""

    def __init__(self) -> None:
        self.replays, self.done, self.stream = 0, 0, None

    def event(self) -> Any:
        behind = self.replays  # created where it is recorded
        return types.SimpleNamespace(record=lambda stream: None, query=lambda: self.done >= behind)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    now = types.SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now.seconds)
    return now


def test_a_queue_is_not_a_hang(clock: Any) -> None:
    """A loop that runs a thousand calls of a second ahead of the device is not late; one call that hangs is."""
    device = Device()
    seen = OnDevice("step", device, weakref.ref(device), device.event)
    device.replays = 1
    seen.look()  # right after the first call
    device.replays = 1000
    clock.seconds += 1
    device.done = 1
    for _ in range(998):
        seen.look()
        assert not seen.overdue(300)
        clock.seconds, device.done = clock.seconds + 1, device.done + 1
    seen.look()
    assert (seen.begun, seen.done) == (1000, 1)
    device.done = 1000
    seen.look()
    device.replays = 1001
    seen.look()
    clock.seconds += 299
    assert not seen.overdue(300)
    clock.seconds += 2
    seen.look()
    assert seen.overdue(300)
    assert (seen.begun, seen.done) == (1001, 1000)


@pytest.mark.cuda
def test_the_thread_does_not_disturb_a_capture() -> None:
    """``torch.cuda.graph`` looks at the calls of all threads."""
    device, stop, looks = Device(), threading.Event(), []
    device.stream = torch.cuda.current_stream()
    seen = OnDevice("step", device, weakref.ref(device), torch.cuda.Event)
    x = torch.ones(8, device="cuda")

    def look() -> None:
        apart_from_captures()
        while not stop.wait(0.001):
            device.replays += 1
            seen.look()
            looks.append(seen.done)

    thread = threading.Thread(target=look)
    thread.start()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        y = x + 1
        before = len(looks)
        time.sleep(0.3)
        assert len(looks) > before + 10
    stop.set()
    thread.join()
    graph.replay()
    assert y.tolist() == [2.0] * 8
    assert looks[-1] > 10, "events were done meanwhile"


def test_a_call_on_the_host_is_late_from_when_it_was_seen_first(clock: Any) -> None:
    seen = OnHost("step")
    for _ in range(3):
        seen.begun += 1
        seen.look()
        clock.seconds += 200
        assert not seen.overdue(300)
        seen.done += 1
        clock.seconds += 200
        seen.look()
        assert not seen.overdue(300)
    seen.begun += 1
    seen.look()
    clock.seconds += 301
    seen.look()
    assert seen.overdue(300)


def test_who_is_missing() -> None:
    def said(beat: int, calls: list[tuple[int, int]], how: str = "") -> Any:
        return {"beat": beat, "calls": calls, "how": how}

    other, waits, ahead = (9, 9), (5, 4), (8, 4)
    rows = {
        "": [
            (said(7, [other, waits]), said(9, [other, waits])),
            (said(7, [other, ahead]), said(9, [other, ahead])),
        ],
        "does not answer": [(said(7, [other, waits]), said(7, [other, waits])), (None, None)],
        "lives, and has called it 4 times": [(said(7, [other, (4, 4)]), said(9, [other, (4, 4)]))],
        "lives, and has called it 0 times": [(None, said(2, [])), (said(1, []), said(2, [other]))],
        "has ended, and has called it 1 time": [(said(6, [other, (1, 1)], "has ended"),) * 2],
        " ": [(said(7, [other, waits]), said(7, [other, waits], "waits"))],  # it is about to end, too
    }
    pairs = [(what, pair) for what, pairs in rows.items() for pair in pairs]
    before, after = ([pair[i] for _, pair in pairs] for i in range(2))
    expected = [f"rank {rank}  {what}" for rank, (what, _) in enumerate(pairs) if what.strip()]
    assert missing(before, after, 1) == expected


def test_without_a_limit_and_without_a_call_there_is_no_thread() -> None:
    one, two = ranks(2)
    never = Watchdog(one, math.inf)
    never.host("step")
    assert never._thread is None
    never.stop()
    some = Watchdog(two, 5.0)
    assert some._thread is None
    some.host("step")
    assert some._thread is not None
    some.stop()
    assert not some._thread.is_alive()
    with some._stopped._cond:  # as in a child of a fork, where nobody would release it
        assert at_once(some.stop) == [None]


@pytest.mark.parametrize("value", [0, -1.0, True, "1", math.nan])
def test_limits_that_are_none(value: Any) -> None:
    with pytest.raises(ValueError, match=r"step_timeout must be a positive number of seconds, or math\.inf"):
        fcg.sharding.mesh({"data": -1}, device="cpu", step_timeout=value)
