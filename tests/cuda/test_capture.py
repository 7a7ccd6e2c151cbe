"""A call seen from outside: one graph launch, a few copies, and constant work on the host."""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_cg as fcg
from tests.cuda.helpers_cuda import (
    DEVICE,
    assert_same,
    clean_allocator,  # noqa: F401
    lowerings,
    marks,
    mlp_batch,
    mlp_state,
    mlp_step,
    needs_gpu,
    randn,
    say,  # noqa: F401
    wait,
)

pytestmark = marks
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchCooperativeKernel")
COPIES = ("cudaMemcpyAsync", "cudaMemcpy", "cuMemcpy", "cudaMemcpy2DAsync")
FILLS = ("cudaMemsetAsync", "cuMemsetD")
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cuStreamSynchronize", "cuCtxSynchronize")


def runtime_calls(prof: Any) -> Counter[str]:
    """How often each CUDA runtime or driver function was called from the host."""
    return Counter(event.name for event in prof.events() if event.name.startswith(("cuda", "cu")))


def starting_with(calls: Counter[str], prefixes: tuple[str, ...]) -> int:
    """Number of calls of a family: ``cudaLaunchKernelExC`` is a ``cudaLaunchKernel``."""
    return sum(count for name, count in calls.items() if name.startswith(prefixes))


def profiled(call: Callable[[], Any]) -> tuple[Any, Counter[str]]:
    """A call under the profiler. The first profile of a process starts the tracer, so there is one before."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities):
        torch.zeros(1, device=DEVICE).add_(1)
        torch.cuda.synchronize()
    with profile(activities=activities) as prof:
        result = call()
        torch.cuda.synchronize()
    return result, runtime_calls(prof)


# -- the profiler -------------------------------------------------------------------------------------------------


@needs_gpu
@lowerings
def test_a_call_is_one_graph_launch_and_copies(lowering: Any, say: Callable[[str], None]) -> None:  # noqa: F811
    step = fcg.graph_step(mlp_step, lowering=lowering, certify="first")
    state = mlp_state()
    for i in range(3):
        state, metrics = step(state, mlp_batch(i))
    batch = mlp_batch(3)
    wait()
    before = step.stats.replays
    (state, metrics), calls = profiled(lambda: step(state, batch))
    copies = len(batch) + len(metrics)  # in and out; grouped, there are fewer
    extra = starting_with(calls, LAUNCHES) + starting_with(calls, COPIES) + starting_with(calls, FILLS)
    say(f"{lowering}: {dict(calls)}")
    assert starting_with(calls, ("cudaGraphLaunch", "cuGraphLaunch")) == 1, calls
    assert extra <= copies, calls
    assert starting_with(calls, WAITS) == 0, calls
    assert step.stats.replays == before + 1


@needs_gpu
def test_ten_calls_are_ten_graph_launches() -> None:
    step = fcg.graph_step(mlp_step, lowering="aten")
    state = mlp_state()
    state, _ = step(state, mlp_batch(0))
    batch = mlp_batch(1)

    def ten() -> Any:
        current, metrics = state, {}
        for _ in range(10):
            current, metrics = step(current, batch)
        return current, metrics

    (_, metrics), calls = profiled(ten)
    assert starting_with(calls, ("cudaGraphLaunch", "cuGraphLaunch")) == 10, calls
    extra = starting_with(calls, LAUNCHES) + starting_with(calls, COPIES) + starting_with(calls, FILLS)
    assert extra <= 10 * (len(batch) + len(metrics)), calls
    assert step.stats.replays == 11


@needs_gpu
def test_evaluation_is_one_graph_launch() -> None:
    evaluate = fcg.graph_fn(lambda params, x: torch.tanh(x @ params["layer0"]["w"]).sum(), lowering="aten")
    state = mlp_state()
    x = mlp_batch(0)["x"]
    evaluate(state.params, x)
    _, calls = profiled(lambda: evaluate(state.params, x))
    assert starting_with(calls, ("cudaGraphLaunch", "cuGraphLaunch")) == 1, calls
    assert starting_with(calls, LAUNCHES) + starting_with(calls, COPIES) <= 2, calls


@needs_gpu
def test_a_call_does_not_wait_for_the_device() -> None:
    step = fcg.graph_step(mlp_step, lowering="aten")
    state, _ = step(mlp_state(), mlp_batch(0))
    batch = mlp_batch(1)
    wait()
    torch.cuda.set_sync_debug_mode("error")
    try:
        state, _ = step(state, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda._sleep(200_000_000)  # about 0.1 s
    start = time.perf_counter()
    state, metrics = step(state, batch)
    returned = time.perf_counter() - start
    busy = not torch.cuda.current_stream().query()
    assert busy, f"the call returned after {returned:.3f} s, with the device idle"
    assert float(metrics["loss"]) > 0


# -- Python -------------------------------------------------------------------------------------------------------


@lowerings
def test_the_body_runs_at_trace_time_only(lowering: Any) -> None:
    runs = Counter[str]()

    def note(frame: Any, event: str, argument: Any) -> None:
        runs[event] += frame.f_code is mlp_step.__code__

    step = fcg.graph_step(mlp_step, lowering=lowering)
    sys.setprofile(note)
    try:
        state, _ = step(mlp_state(), mlp_batch(0))
        traced = runs["call"]
        for i in range(1, 17):
            state, _ = step(state, mlp_batch(i))
    finally:
        sys.setprofile(None)
    assert traced == 2
    assert runs["call"] == traced
    assert (step.stats.traces, step.stats.captures, step.stats.replays) == (1, 1, 17)


def one_leaf(state: Any, x: Tensor) -> Any:
    leaf = state["leaf00000"] * 0.99 + x
    return {**state, "leaf00000": leaf}, {"sum": leaf.sum()}


def many_leaves(count: int) -> dict[str, Tensor]:
    """Views of one tensor: placing copies them."""
    return {f"leaf{i:05d}": t for i, t in enumerate(randn(count, 4, seed=0).clone().unbind())}


def python_events(call: Callable[[], Any]) -> Counter[str]:
    """Python and C calls of one call, by kind."""
    events: Counter[str] = Counter()

    def hook(frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            events[event] += 1

    sys.setprofile(hook)
    try:
        call()
    finally:
        sys.setprofile(None)
    return events


@pytest.mark.timeout(600)
def test_host_work_does_not_depend_on_the_leaves(say: Callable[[str], None]) -> None:  # noqa: F811
    counts, micros, x = {}, {}, randn(4, seed=1)
    for leaves in (10, 10_000):
        step = fcg.graph_step(one_leaf, lowering="aten")
        start = time.perf_counter()
        state, _ = step(fcg.place(many_leaves(leaves)), x)
        wait()
        first = time.perf_counter() - start
        states = [state]
        del state

        def call(step: Any = step, states: list[Any] = states) -> None:
            states[0] = step(states[0], x)[0]

        for _ in range(20):
            call()
        counts[leaves] = python_events(call)
        times = []
        for _ in range(200):
            wait()
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        micros[leaves] = statistics.median(times) * 1e6
        say(
            f"{leaves:,} leaves: first call {first:.2f} s, host {micros[leaves]:.1f} µs, {dict(counts[leaves])}"
        )
        step.close()
    say(f"host time of 10,000 leaves over 10: {micros[10_000] / micros[10]:.3f} (aim: at most 1.2)")
    assert counts[10] == counts[10_000]
    assert counts[10]["call"] > 0


@pytest.mark.timeout(600)
def test_untouched_leaves_of_a_large_state_keep_their_values() -> None:
    values = many_leaves(2_000)
    step = fcg.graph_step(one_leaf, lowering="aten")
    state = fcg.place(values)
    for i in range(20):
        state, _ = step(state, randn(4, seed=i))
    rest = {name: leaf for name, leaf in fcg.snapshot(state).items() if name != "leaf00000"}
    assert_same(rest, {name: leaf for name, leaf in values.items() if name != "leaf00000"}, "untouched")


# -- layouts and captures -----------------------------------------------------------------------------------------


def test_each_layout_is_a_capture_and_each_arena_too() -> None:
    step = fcg.graph_step(mlp_step, lowering="aten", max_captures=2)
    state = mlp_state()
    for i in range(6):
        state, _ = step(state, mlp_batch(i, rows=32 if i % 2 else 16))
    assert (step.stats.traces, step.stats.captures, step.stats.replays) == (2, 2, 6)
    with pytest.raises(fcg.LayoutError, match="max_captures"):
        step(state, mlp_batch(0, rows=8))
    other = fcg.fork(state)
    state, _ = step(state, mlp_batch(7))
    other, _ = step(other, mlp_batch(7))
    assert (step.stats.traces, step.stats.captures) == (2, 3)
    assert_same(state, other, "fork")


def test_lower_then_capture_then_call() -> None:
    step = fcg.graph_step(mlp_step, lowering="aten")
    state = mlp_state()
    before = fcg.snapshot(state)
    step.lower(state, mlp_batch(0)).capture()
    assert step.stats.replays == 0
    assert_same(state, before, "captured, not run")
    twin = fcg.fork(state)
    state, _ = step(state, mlp_batch(0))
    twin, _ = step.eager(twin, mlp_batch(0))
    assert_same(state, twin, "first call")
    assert step.stats.captures == 1
