"""H72 to H82: garbage collection, threads, streams, and concurrent steps."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import functional_cg as fcg
from functional_cg.stages.run import capture
from functional_cg.testing import Simulator, assert_trees_all_equal
from tests.at_once import at_once
from tests.hazards.law import GPU, SIMULATOR, Place, everywhere
from tests.shares import CALLS, few


def train(state: Any, x: Tensor) -> Any:
    grad = fcg.grad(lambda w: torch.tanh(x @ w).square().mean())(state["w"])
    return {"w": state["w"] - 0.1 * grad, "n": state["n"] + 1}, {"grad": grad}


def a_state(place: Place, seed: int = 0) -> Any:
    count = torch.zeros((), dtype=torch.int64, device=place.device)
    return fcg.place({"w": place.randn(3, 2, seed=seed), "n": count})


def batch(place: Place, n: int) -> Tensor:
    return place.randn(4, 3, seed=n + 1)


class Cycle:
    """Keeps a step, a state and itself alive until a collection."""

    def __init__(self, *held: Any) -> None:
        self.held = (*held, self)


@everywhere
def test_h72_collections_at_any_moment_do_no_harm(place: Place) -> None:
    """Dead steps in reference cycles, and a collector that runs after every few allocations."""
    state, twin = a_state(place), a_state(place)
    thresholds, enabled = gc.get_threshold(), gc.isenabled()
    try:
        for n in range(6):
            dead = place.step(train)
            Cycle(dead, dead(a_state(place, seed=n), batch(place, n)))
            del dead
            gc.set_threshold(3, 1, 1)
            step = place.step(train)
            state, _ = step(state, batch(place, n))
            gc.set_threshold(*thresholds)
            assert gc.isenabled() == enabled
            twin, _ = step.eager(twin, batch(place, n))
            place.assert_same(state, twin, f"step {n}")
    finally:
        gc.set_threshold(*thresholds)


@everywhere
def test_h74_of_two_threads_with_one_state_one_wins(place: Place) -> None:
    step, state, twin = place.step(train), a_state(place), a_state(place)
    state, _ = step(state, batch(place, 0))
    twin, _ = step.eager(twin, batch(place, 0))
    for n in range(20):
        results = at_once(*[partial(step, state, batch(place, n))] * 2)
        (winner,) = [one for one in results if not isinstance(one, fcg.DonatedStateError)]
        state, _ = winner
        twin, _ = step.eager(twin, batch(place, n))
        place.assert_same(state, twin, f"round {n}")


@few
@given(order=st.lists(st.sampled_from(["train", "rotate", "evaluate"]), min_size=CALLS, max_size=CALLS))
def test_h82_steps_that_share_a_pool_may_run_in_any_order(order: list[str]) -> None:
    """One simulator is one pool, overwritten between any two calls."""
    pool = Simulator()

    def rotate(state: Any, x: Tensor) -> Any:
        return {"w": state["w"].flip(0), "n": state["n"]}, {"old": state["w"], "x": x.T}

    steps = {
        name: SIMULATOR.step(fn, backend=pool) for name, fn in {"train": train, "rotate": rotate}.items()
    }
    evaluate = fcg.graph_fn(lambda s, x: {"out": x @ s["w"]}, backend=pool)
    state, twin = a_state(SIMULATOR), a_state(SIMULATOR)
    kept: list[Any] = []
    copies: list[Any] = []
    for n, name in enumerate(order):
        x = batch(SIMULATOR, n)
        if name == "evaluate":
            out, expected = evaluate(state, x), evaluate.eager(twin, x)
        else:
            state, out = steps[name](state, x)
            twin, expected = steps[name].eager(twin, x)
        pool.poison()
        assert_trees_all_equal((state, out), (twin, expected), f"call {n}")
        kept.append(out)
        copies.append(expected)
    assert_trees_all_equal(kept, copies, "kept")


# -- streams ----------------------------------------------------------------------------------------------------------


@contextmanager
def op_in_a_capture(what: Any) -> Iterator[Any]:
    """A registered op that does something with streams, but only while it is captured."""
    with torch.library._scoped_library("fcg_hazards", "FRAGMENT") as library:
        library.define("crosses(Tensor x) -> Tensor")

        def kernel(x: Tensor) -> Tensor:
            if torch.cuda.is_current_stream_capturing():
                return what(x)
            return x.clone()

        library.impl("crosses", kernel, "CUDA")
        library.impl("crosses", torch.empty_like, "Meta")
        yield torch.ops.fcg_hazards.crosses.default


def assert_crossing_is_refused(what: Any) -> None:
    """A StreamError, the state as it was, and the same step works once the op does."""
    crosses = [True]
    with op_in_a_capture(lambda x: what(x) if crosses[0] else x.clone()) as op:
        step = GPU.step(lambda s, x: ({"w": s["w"] + op(x)}, {}))
        state = fcg.place({"w": GPU.randn(8, seed=0)})
        before = fcg.snapshot(state)
        for _ in range(2):
            with pytest.raises(fcg.StreamError, match="capture failed"):
                step(state, GPU.randn(8, seed=1))
            assert not torch.cuda.is_current_stream_capturing()
            assert_trees_all_equal(state, before, "state")
        crosses[0] = False
        state, _ = step(state, GPU.randn(8, seed=1))
        assert_trees_all_equal(state, {"w": before["w"] + GPU.randn(8, seed=1)})
        torch.cuda.synchronize()


@pytest.mark.cuda
@pytest.mark.filterwarnings("default")
def test_h75_work_that_is_not_joined_is_refused() -> None:
    side = torch.cuda.Stream()

    def forks(x: Tensor) -> Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.clone()
        return x.clone()

    assert_crossing_is_refused(forks)


@pytest.mark.cuda
@pytest.mark.filterwarnings("default")
def test_h76_an_event_from_outside_is_refused() -> None:
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(side):
        torch.cuda._sleep(1000)
        event.record(side)

    def waits(x: Tensor) -> Tensor:
        torch.cuda.current_stream().wait_event(event)
        return x.clone()

    assert_crossing_is_refused(waits)


@pytest.mark.cuda
@pytest.mark.filterwarnings("default")
def test_h75_streams_chosen_in_the_step_are_not_captured() -> None:
    """Impossible: what Python says of streams while it is traced is no part of the graph, which has one order."""
    side = torch.cuda.Stream()

    def step_fn(state: Any, x: Tensor) -> Any:
        with torch.cuda.stream(side):
            y = x * 2
        return {"w": state["w"] + y}, {"y": y + 1}

    step, state = GPU.step(step_fn), fcg.place({"w": torch.zeros(1 << 20, device=GPU.device)})
    total = torch.zeros(1 << 20, device=GPU.device)
    for n in range(CALLS):
        torch.cuda._sleep(1_000_000)
        x = GPU.randn(1 << 20, seed=n)
        state, metrics = step(state, x)
        total = total + x * 2
        assert_trees_all_equal((state, metrics), ({"w": total}, {"y": x * 2 + 1}), f"call {n}")


@pytest.mark.cuda
@pytest.mark.filterwarnings("default")
def test_h79_forty_live_steps_do_not_meet_on_one_stream() -> None:
    """torch hands out streams in turn, from 32: a replay does not depend on the one that it was captured on."""
    steps = [GPU.step(train) for _ in range(40)]
    assert len({torch.cuda.Stream(priority=-1).cuda_stream for _ in steps}) < 40
    states = [a_state(GPU, seed=n) for n in range(40)]
    twins = [fcg.fork(state) for state in states]
    for call in range(3):
        torch.cuda._sleep(5_000_000)
        for n, step in enumerate(steps):
            states[n], _ = step(states[n], batch(GPU, call))
    for n, step in enumerate(steps):
        for call in range(3):
            twins[n], _ = step.eager(twins[n], batch(GPU, call))
        assert_trees_all_equal(states[n], twins[n], f"step {n}")


@pytest.mark.cuda
@pytest.mark.filterwarnings("default")
def test_h73_batches_made_on_other_streams_are_waited_for_like_in_any_op() -> None:
    """The caller's stream waits for the one that makes the batch; the step then needs nothing more."""
    streams = [torch.cuda.Stream() for _ in range(3)]
    step, state, twin = GPU.step(train), a_state(GPU), a_state(GPU)
    for n in range(2 * CALLS):
        maker, caller = streams[n % 3], streams[(n + 1) % 3]
        with torch.cuda.stream(maker):
            torch.cuda._sleep(2_000_000)
            x = batch(GPU, n)
            x = x * 1
        caller.wait_stream(maker)
        with torch.cuda.stream(caller):
            state, metrics = step(state, x)
        torch.cuda.synchronize()
        twin, expected = step.eager(twin, batch(GPU, n))
        assert_trees_all_equal((state, metrics), (twin, expected), f"call {n}")


# -- several devices ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("current", "launched_on"), [(0, [1]), (1, [])])
def test_h81_a_replay_switches_to_the_device_of_its_arena(
    current: int, launched_on: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And where it is there already, it saves the time."""
    entered, launches = [], []

    @contextmanager
    def device(place: torch.device) -> Iterator[None]:
        entered.append(place.index)
        yield
        entered.clear()

    monkeypatch.setattr(capture, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device", device)
    replay = object.__new__(capture._GraphReplay)
    replay._device, replay.static = torch.device("cuda", 1), ()
    replay._launch = lambda: launches.append(list(entered))
    assert replay((lambda: launches.append("inputs are copied in"),)) == ()
    assert launches == ["inputs are copied in", launched_on]
    assert entered == []


@pytest.mark.multi_gpu(2)
def test_h81_a_step_on_another_gpu_than_the_current_one() -> None:
    """Captured and replayed from there, with the bits of the eager run; the current device stays what it was."""
    place = replace(GPU, device="cuda:1")
    captured = a_state(place)
    eager, step = fcg.fork(captured), fcg.graph_step(train, lowering="aten")
    with torch.cuda.device(0):
        for call in range(CALLS):
            captured, metrics = step(captured, batch(place, call))
            eager, expected = step.eager(eager, batch(place, call))
            assert torch.cuda.current_device() == 0
            assert_trees_all_equal((captured, metrics), (eager, expected), f"call {call}")
            assert metrics["grad"].device == torch.device("cuda", 1)
