"""Lifecycle on CUDA: failed captures, closing, deletion in flight, garbage collection, threads, streams, exit."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import functional_cg as fcg
from tests.at_once import at_once
from tests.cuda.helpers_cuda import (
    DEVICE,
    ON_GPU,
    assert_same,
    clean,
    clean_allocator,  # noqa: F401
    eager_run,
    lowerings,
    marks,
    memory,
    mlp_batch,
    mlp_state,
    mlp_step,
    needs_gpu,
    plain_step,
    python,
    randn,
    say,  # noqa: F401
    wait,
)

pytestmark = marks
CALLS = 16
MIB = 2**20


# -- failed captures ----------------------------------------------------------------------------------------------


@contextmanager
def op_that_fails_in_a_capture(syncs: list[bool]) -> Iterator[Any]:
    """A registered op that waits for the device while ``syncs[0]``: a trace and a warm-up pass, a capture does not."""
    with torch.library._scoped_library("fcg_test", "FRAGMENT") as library:
        library.define("waits(Tensor x) -> Tensor")

        def kernel(x: Tensor) -> Tensor:
            if syncs[0] and torch.cuda.is_current_stream_capturing():
                torch.cuda.current_stream().synchronize()
            return x.clone()

        library.impl("waits", kernel, "CUDA")
        library.impl("waits", torch.empty_like, "Meta")
        yield torch.ops.fcg_test.waits.default


@needs_gpu
def test_a_failed_capture_leaves_nothing_behind(say: Callable[[str], None]) -> None:  # noqa: F811
    syncs = [True]
    size = 16 * MIB  # floats: temporaries of 64 MiB
    with op_that_fails_in_a_capture(syncs) as waits:

        def train_step(state: Any, x: Any) -> Any:
            big = torch.ones(size, device=DEVICE) * x
            loss = waits(big * state["w"]).sum()
            return {"w": state["w"] * 0.5 + x}, {"loss": loss}

        step = fcg.graph_step(train_step, lowering="aten")
        state = fcg.place({"w": torch.ones((), device=DEVICE)})
        x = torch.tensor(0.25, device=DEVICE)
        before = memory()
        levels = []
        for _ in range(100):
            with pytest.raises(fcg.CaptureError) as failure:
                step(state, x)
            assert failure.value.__cause__ is not None
            assert not torch.cuda.is_current_stream_capturing()
            assert float(state["w"]) == 1.0
            assert state.generation == 0
            failure = None  # type: ignore[assignment]  # its traceback keeps tensors alive
            levels.append(memory())
        say(
            f"allocated, reserved MiB: {_mib(before)}, after failed captures {[_mib(levels[i]) for i in (0, 9, 99)]}"
        )
        # the same step, once the op behaves
        syncs[0] = False
        twin = fcg.fork(state)
        for i in range(4):
            state, metrics = step(state, x)
            twin, expected = step.eager(twin, x)
            assert_same((state.tree, metrics), (twin.tree, expected), f"call {i} after the failures")
        assert (step.stats.captures, step.stats.replays) == (1, 4)
        step.close()
        del step, metrics, expected, twin
    # another step on the same device, as if nothing had happened
    good, other = fcg.graph_step(mlp_step, lowering="aten"), mlp_state()
    oracle = fcg.fork(other)
    for i in range(4):
        other, _ = good(other, mlp_batch(i))
        oracle, _ = good.eager(oracle, mlp_batch(i))
        assert_same(other, oracle, f"call {i} of another step")
    good.close()
    del good, other, oracle
    after = memory()
    say(f"allocated, reserved MiB at the end: {_mib(after)}")
    assert levels[-1][0] - levels[0][0] <= MIB, "allocated memory grows with each failed capture"
    assert levels[-1][1] - levels[0][1] <= 8 * MIB, "reserved memory grows with each failed capture"
    assert after[0] - before[0] <= 2 * MIB
    assert after[1] - before[1] <= 64 * MIB + 32 * MIB, "more than one pool is left behind"


def _mib(level: tuple[int, int]) -> tuple[float, float]:
    return round(level[0] / MIB, 1), round(level[1] / MIB, 1)


def test_an_exception_at_each_place_leaves_the_state_alone() -> None:
    """The user's function raises at its n-th op, in trace and retrace; the corrected step goes on."""
    state = mlp_state()
    before = fcg.snapshot(state)

    for place in range(4):

        def broken(state: Any, batch: Any, place: int = place) -> Any:
            if place == 0:
                raise ZeroDivisionError("planted")
            loss, grads = fcg.value_and_grad(lambda p: _loss(p, batch, place))(state.params)
            new = state.apply_gradients(grads)
            if place == 3:
                raise ZeroDivisionError("planted")
            return new, {"loss": loss}

        step = fcg.graph_step(broken, lowering="aten")
        with pytest.raises((fcg.CaptureError, ZeroDivisionError)):
            step(state, mlp_batch(0))
        assert_same(state, before, f"place {place}")
        assert step.stats.captures == 0
    good = fcg.graph_step(mlp_step, lowering="aten")
    twin = fcg.fork(state)
    state, _ = good(state, mlp_batch(0))
    twin, _ = good.eager(twin, mlp_batch(0))
    assert_same(state, twin, "after the failures")


def _loss(params: Any, batch: Any, place: int) -> Tensor:
    h = batch["x"] @ params["layer0"]["w"]
    if place == 1:
        raise ZeroDivisionError("planted")
    loss = F.mse_loss(h, batch["y"])
    if place == 2:
        raise ZeroDivisionError("planted")
    return loss


# -- closing and deleting -----------------------------------------------------------------------------------------


def _large(lowering: Any) -> tuple[Any, Any]:
    """A step with temporaries of 64 MiB and more."""

    def train_step(state: Any, x: Any) -> Any:
        def loss_fn(p: Any) -> Tensor:
            return torch.tanh(torch.outer(p["a"], p["b"]) * x).square().mean()

        loss, grads = fcg.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads), {"loss": loss}

    params = {"a": randn(4096, seed=1), "b": randn(4096, seed=2)}
    return (
        fcg.graph_step(train_step, lowering=lowering),
        fcg.TrainState.create(params=params, optimizer=fcg.optim.sgd(0.1)),
    )


@lowerings
def test_close_frees_memory_and_keeps_the_state(lowering: Any, say: Callable[[str], None]) -> None:  # noqa: F811
    x = torch.tensor(0.5, device=DEVICE)
    step, state = _large(lowering)
    before = memory()
    state, _ = step(state, x)
    state, _ = step(state, x)
    open_ = memory()
    values = fcg.snapshot(state)
    step.close()
    with pytest.raises(fcg.ClosedError):
        step(state, x)
    closed = memory()
    say(
        f"{lowering}: allocated, reserved MiB before {_mib(before)}, captured {_mib(open_)}, closed {_mib(closed)}"
    )
    assert_same(state, values, "after close()")
    again, _ = _large(lowering)
    state, _ = again(state, x)
    assert int(state.step) == 3
    again.close()
    if ON_GPU:
        # a compiler fuses the temporaries away
        assert lowering != "aten" or open_[1] - before[1] >= 60 * MIB, "the test's step is too small to see"
        assert closed[0] - before[0] <= MIB
        assert closed[1] - before[1] <= 24 * MIB


@needs_gpu
def test_deleting_the_step_frees_memory_too(say: Callable[[str], None]) -> None:  # noqa: F811
    x = torch.tensor(0.5, device=DEVICE)
    before = memory()
    for _ in range(5):
        step, state = _large("aten")
        for _ in range(2):
            state, _ = step(state, x)
        del step, state, _
    after = memory()
    say(f"five steps deleted: allocated, reserved MiB {_mib(before)} -> {_mib(after)}")
    assert after[0] - before[0] <= MIB
    assert after[1] - before[1] <= 24 * MIB


@needs_gpu
@pytest.mark.parametrize("how", ["del", "close", "del state too"])
@lowerings
def test_deleting_with_a_replay_in_flight(lowering: Any, how: str) -> None:
    """H108: the results of the last call are right, whatever is freed and reused while it runs."""
    batches = [mlp_batch(i) for i in range(3)]
    step, state = fcg.graph_step(mlp_step, lowering=lowering), mlp_state()
    reference, twin = fcg.graph_step(mlp_step, lowering=lowering), fcg.fork(state)
    for batch in batches:
        twin, expected = reference(twin, batch)
    for batch in batches[:2]:
        state, metrics = step(state, batch)
    wait()
    torch.cuda._sleep(100_000_000)
    state, metrics = step(state, batches[2])
    if how == "close":
        step.close()
    del step
    if how == "del state too":
        del state
    gc.collect()
    torch.cuda.empty_cache()
    noise = [
        torch.full((n,), float("nan"), device=DEVICE) for n in (64, 4096, 32 * 64, 2**20) for _ in range(8)
    ]
    wait()
    assert_same(metrics, expected, "metrics of the last call")
    if how != "del state too":
        assert_same(state, twin, "state after the last call")
    del noise


# -- several steps ------------------------------------------------------------------------------------------------


@lowerings
def test_two_trainers_interleaved_equal_two_alone(lowering: Any) -> None:
    """In one line: lanes are chosen by a measurement, which other work on the device disturbs."""
    runs = []
    for seed in (0, 1):
        step, state = fcg.graph_step(mlp_step, lowering=lowering, branches=1), mlp_state(seed=seed)
        for i in range(CALLS):
            state, _ = step(state, mlp_batch(i + 100 * seed))
        runs.append(fcg.snapshot(state))
        step.close()
    steps = [fcg.graph_step(mlp_step, lowering=lowering, branches=1) for _ in range(2)]
    states = [mlp_state(seed=seed) for seed in (0, 1)]
    for i in range(CALLS):
        for seed in (0, 1):
            states[seed], _ = steps[seed](states[seed], mlp_batch(i + 100 * seed))
    for seed in (0, 1):
        assert_same(states[seed], runs[seed], f"trainer {seed}")
        assert (steps[seed].stats.captures, steps[seed].stats.replays) == (1, CALLS)


@lowerings
def test_one_of_two_steps_is_destroyed(lowering: Any) -> None:
    """H85: the other one goes on for 16 more calls, matrix products and their workspaces included."""
    keep, drop = (fcg.graph_step(mlp_step, lowering=lowering) for _ in range(2))
    kept, dropped = mlp_state(128), mlp_state(128, seed=5)
    reference = fcg.graph_step(mlp_step, lowering=lowering)
    twin = fcg.fork(kept)
    for i in range(3):
        kept, _ = keep(kept, mlp_batch(i, 128))
        dropped, _ = drop(dropped, mlp_batch(i, 128))
        twin, _ = reference(twin, mlp_batch(i, 128))
    drop.close()
    del drop, dropped
    clean()
    for i in range(3, 3 + CALLS):
        scratch = torch.full((64, MIB), float("nan"), device=DEVICE) if ON_GPU else None
        kept, metrics = keep(kept, mlp_batch(i, 128))
        twin, expected = reference(twin, mlp_batch(i, 128))
        assert_same(metrics, expected, f"metrics of call {i}")
        assert_same(kept, twin, f"call {i}")
        del scratch


def test_captures_can_be_made_again_and_again() -> None:
    state = mlp_state()
    batches = [mlp_batch(i) for i in range(10)]
    want, _ = eager_run(mlp_step, state, batches)
    for i in range(5):
        with fcg.graph_step(mlp_step, lowering="aten") as step:
            for batch in batches[2 * i : 2 * i + 2]:
                state, _ = step(state, batch)
            assert (step.stats.traces, step.stats.captures, step.stats.replays) == (1, 1, 2)
    assert_same(state, want, "after five captures")


def test_memory_is_flat_over_calls() -> None:
    step, state = fcg.graph_step(mlp_step, lowering="aten"), mlp_state()
    levels = []
    for i in range(300):
        state, metrics = step(state, mlp_batch(i % 7, device="cpu" if i % 2 else DEVICE))
        del metrics
        if i in (20, 299):
            levels.append(memory())
    assert levels[0][0] == levels[1][0]
    assert levels[1][1] <= levels[0][1] + 2 * MIB


# -- what else runs -----------------------------------------------------------------------------------------------


class _Cycle:
    """Keeps a step, and itself, alive until a collection."""

    def __init__(self, step: Any, state: Any) -> None:
        self.step, self.state, self.itself = step, state, self


def test_collections_at_any_moment_of_a_capture() -> None:
    """H72: dead steps in reference cycles, and a collector that runs after every few allocations."""
    state = mlp_state()
    want, _ = eager_run(mlp_step, state, [mlp_batch(i) for i in range(6)])
    thresholds, enabled = gc.get_threshold(), gc.isenabled()
    try:
        for i in range(6):
            dead, dead_state = fcg.graph_step(plain_step, lowering="aten"), mlp_state(seed=i)
            dead_state, _ = dead(dead_state, mlp_batch(0))
            _Cycle(dead, dead_state)
            del dead, dead_state
            gc.set_threshold(5, 1, 1)
            step = fcg.graph_step(mlp_step, lowering="aten")
            state, _ = step(state, mlp_batch(i))
            gc.set_threshold(*thresholds)
            assert gc.isenabled() == enabled
            assert step.stats.captures == 1
            step.close()
    finally:
        gc.set_threshold(*thresholds)
    assert_same(state, want, "after six captures")


@needs_gpu
def test_threads_that_use_the_device_during_captures() -> None:
    """H80: pinned allocations, copies, kernels and event queries in other threads, while 20 captures are made."""
    stop, failures, rounds = threading.Event(), [], [0, 0]

    def guarded(number: int, work: Callable[[], None]) -> None:
        try:
            while not stop.is_set():
                work()
                rounds[number] += 1
        except BaseException as error:
            failures.append(error)

    side = torch.cuda.Stream()

    def copy_and_compute() -> None:
        with torch.cuda.stream(side):
            host = torch.ones(10_000 + rounds[0] % 64 * 1000).pin_memory()
            there = host.to(DEVICE, non_blocking=True)
            total = (there * 2).sum()
            event = torch.cuda.Event()
            event.record(side)
        while not event.query():
            pass
        with torch.cuda.stream(side):
            assert float(total) == 2 * host.numel()

    def allocate() -> None:
        blocks = [
            torch.empty(2**20 + 2**16 * (rounds[1] % 17), dtype=torch.uint8).pin_memory() for _ in range(4)
        ]
        del blocks

    threads = [
        threading.Thread(target=guarded, args=(number, work), daemon=True)
        for number, work in enumerate((copy_and_compute, allocate))
    ]
    state = mlp_state()
    want, _ = eager_run(mlp_step, state, [mlp_batch(i) for i in range(20)])
    for thread in threads:
        thread.start()
    try:
        for i in range(20):
            step = fcg.graph_step(mlp_step, lowering="aten")
            state, _ = step(state, mlp_batch(i))
            step.close()
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
    assert not failures, failures
    assert all(rounds), f"a thread did nothing: {rounds}"
    assert_same(state, want, "after 20 captures")


def test_of_two_threads_one_wins() -> None:
    """H74: the other one finds its state donated; nothing is corrupted."""
    step = fcg.graph_step(mlp_step, lowering="aten")
    state, batch = mlp_state(), mlp_batch(0)
    twin = fcg.fork(state)
    state, _ = step(state, batch)
    twin, _ = step.eager(twin, batch)
    for i in range(20):
        results = at_once(*[partial(step, state, batch)] * 2)
        (winner,) = [one for one in results if not isinstance(one, fcg.DonatedStateError)]
        state, _ = winner
        twin, _ = step.eager(twin, batch)
        assert_same(state, twin, f"round {i}")


@needs_gpu
@lowerings
def test_step_on_another_stream(lowering: Any) -> None:
    """All of it on a stream that is not the default one: trace, capture, calls."""
    state = mlp_state()
    twin, reference = fcg.fork(state), fcg.graph_step(mlp_step, lowering=lowering)
    expected = []
    for i in range(CALLS):
        twin, metrics = reference(twin, mlp_batch(i))
        expected.append(metrics)
    wait()
    side, got = torch.cuda.Stream(), []
    with torch.cuda.stream(side):
        step = fcg.graph_step(mlp_step, lowering=lowering)
        for i in range(CALLS):
            state, metrics = step(state, mlp_batch(i))
            got.append(metrics)
        assert torch.cuda.current_stream() == side
    wait()
    for i, metrics in enumerate(got):
        assert_same(metrics, expected[i], f"metrics of call {i}")
    assert_same(state, twin, "on a side stream")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda mode: mode.__name__)
@lowerings
def test_calls_under_modes(lowering: Any, mode: Any) -> None:
    """H128: the mode around a call is not taken over, and tensors made under it are inputs like any other."""
    state = mlp_state()
    reference, twin = fcg.graph_step(mlp_step, lowering=lowering), fcg.fork(state)
    step = fcg.graph_step(mlp_step, lowering=lowering)
    for i in range(6):
        if i % 2 == 0:
            with mode():
                state, metrics = step(state, {name: leaf + 0 for name, leaf in mlp_batch(i).items()})
        else:
            state, metrics = step(state, mlp_batch(i))
        twin, expected = reference(twin, mlp_batch(i))
        with torch.no_grad():
            assert_same(fcg.tree.map(torch.clone, metrics), expected, f"metrics of call {i}")
            assert_same(state, twin, f"call {i}")
    assert step.stats.captures == 1


@needs_gpu
def test_a_first_eager_backward_does_not_disturb_the_capture(recwarn: pytest.WarningsRecorder) -> None:
    """T-STR-3: eager training on the default stream first, with its graph kept."""
    weight = torch.nn.Parameter(randn(64, 64, seed=0))
    losses = []
    for i in range(3):
        loss = F.mse_loss(mlp_batch(i)["x"] @ weight, mlp_batch(i)["y"])
        loss.backward(retain_graph=True)
        losses.append(loss)
    optimizer = fcg.optim.adamw(1e-3, weight_decay=0.1)
    state = fcg.TrainState.create(
        params={"layer0": {"w": weight, "b": torch.zeros(64, device=DEVICE)}}, optimizer=optimizer
    )
    twin = fcg.fork(state)
    step = fcg.graph_step(plain_step, lowering="aten")
    for i in range(4):
        state, _ = step(state, mlp_batch(i))
        twin, _ = step.eager(twin, mlp_batch(i))
        assert_same(state, twin, f"call {i}")
    assert not [one for one in recwarn if "AccumulateGrad" in str(one.message)]


# -- the end of the interpreter -----------------------------------------------------------------------------------

END = """
import sys, threading
import torch
import functional_cg as fcg
from tests.cuda.helpers_cuda import mlp_batch, mlp_state, mlp_step, plain_step, ON_GPU

step = fcg.graph_step(mlp_step, lowering="aten")
state = mlp_state()
for i in range(3):
    state, metrics = step(state, mlp_batch(i, device="cpu"))
HOW
print("END", float(metrics["loss"]) > 0)
if ON_GPU:
    torch.cuda._sleep(50_000_000)
state, metrics = step(state, mlp_batch(4))
"""
HOWS = {
    "global": "",
    "cycle": "box = [step, state]; box.append(box); step.box = box if hasattr(step, '__dict__') else None",
    "thread": "threading.Thread(target=lambda held=(step, state): threading.Event().wait(), daemon=True).start()",
    "two steps": "other = fcg.graph_step(plain_step, lowering='aten'); theirs, _ = other(mlp_state(), mlp_batch(0))",
    "module": "sys.modules['holder'] = type(sys)('holder'); sys.modules['holder'].held = (step, state, metrics)",
}


@pytest.mark.parametrize("how", HOWS)
def test_the_interpreter_ends_with_live_steps(how: str) -> None:
    run = python(END.replace("HOW", HOWS[how]), timeout=120)
    assert run.returncode == 0, f"exit code {run.returncode}\n{run.stdout}\n{run.stderr[-4000:]}"
    assert "END True" in run.stdout
    assert "Traceback" not in run.stderr, run.stderr[-4000:]
