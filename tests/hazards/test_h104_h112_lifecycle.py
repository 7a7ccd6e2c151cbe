"""H104 to H112: exceptions, ends, forks, and two of everything."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import functional_cg as fcg
from functional_cg.stages.run.capture import _failure, _first
from functional_cg.testing import assert_trees_all_equal
from tests.forked import Program
from tests.hazards.law import COMPILED, CPU, GPU, SIMULATOR, Place, assert_law, everywhere
from tests.out_of_sight import OutOfSight
from tests.shares import CALLS, THOROUGH


class PlantedError(Exception):
    """Raised on purpose."""


class Budget(TorchFunctionMode):
    """Raises at the first torch function after `ops` of them."""

    def __init__(self, ops: int) -> None:
        super().__init__()
        self.left = OutOfSight(ops)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        left = self.left.read()
        self.left.write(left - 1)
        if left == 0:
            raise PlantedError(func)
        return func(*args, **(kwargs or {}))


def train(state: Any, x: Tensor) -> Any:
    loss, grads = fcg.value_and_grad(lambda p: torch.tanh(x @ p["w"]).square().mean())(state.params)
    return state.apply_gradients(grads), {"loss": loss}


def a_state(place: Place) -> Any:
    return fcg.TrainState.create(params={"w": place.randn(3, 2, seed=0)}, optimizer=fcg.optim.sgd(0.1))


@everywhere
def test_h104_an_exception_at_any_op_loses_nothing(place: Place) -> None:
    """In both traces, one after the other; the same step then goes on as if nothing had happened.

    A trace is the same in all places of a host, which by default share one of four ops.
    """
    hosts = [CPU, SIMULATOR, COMPILED]
    alone = THOROUGH or place not in hosts
    budgets: list[Budget] = []

    def step_fn(state: Any, x: Tensor) -> Any:
        with budgets[-1]:
            return train(state, x)

    step, state, twin = place.step(step_fn), a_state(place), a_state(place)
    before = fcg.snapshot(state)
    failures = 0
    for ops in range(0 if alone else hosts.index(place), 1000, 1 if alone else 4 * len(hosts)):
        budgets.append(Budget(ops))
        x = place.randn(4, 3, seed=1)
        try:
            state, metrics = step(state, x)
            break
        except fcg.CaptureError as error:
            failures += isinstance(error.__cause__, PlantedError)
        assert (state.generation, step.stats.captures, step.stats.replays) == (0, 0, 0)
        if len(budgets) % 8 == 1:
            assert_trees_all_equal(state, before, f"after {ops} ops")
    assert failures == len(budgets) - 1
    assert ops > 10
    assert torch.overrides._get_current_function_mode_stack() == []
    budgets.append(Budget(10_000))
    twin, expected = step.eager(twin, place.randn(4, 3, seed=1))
    place.assert_same((state, metrics), (twin, expected))
    assert step.stats.captures == 1


def test_h104_the_first_cause_is_the_one_that_is_told() -> None:
    """CUDA ends a broken capture with an error of its own, which says nothing of what broke it."""
    first = RuntimeError("CUDA error: dependency created on uncaptured work in another stream")
    with pytest.raises(RuntimeError, match="previous error") as caught:  # noqa: PT012
        try:
            raise first
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
    assert _first(caught.value) is first
    assert type(_failure(_first(caught.value))) is fcg.StreamError
    assert _first(first) is first


@pytest.mark.cuda
@pytest.mark.filterwarnings("default")
def test_h106_out_of_memory_loses_nothing() -> None:
    """The step wants more than there is; state and process go on."""
    size = [1 << 40]

    def step_fn(state: Any, x: Tensor) -> Any:
        return {"w": state["w"] + torch.ones(size[0], device=GPU.device).sum() + x}, {}

    step, state = GPU.step(step_fn), fcg.place({"w": GPU.randn(3, seed=0)})
    before = fcg.snapshot(state)
    for _ in range(3):
        with pytest.raises((fcg.CaptureError, torch.OutOfMemoryError)):
            step(state, GPU.randn(3, seed=1))
        assert not torch.cuda.is_current_stream_capturing()
        assert_trees_all_equal(state, before, "state")
    assert_law(GPU, lambda s, x: ({"w": s["w"] + x}, {}), before, [GPU.randn(3, seed=n) for n in range(4)])


@everywhere
@pytest.mark.parametrize("how", ["del", "close", "state too"])
def test_h108_what_the_last_call_returned_outlives_the_step(place: Place, how: str) -> None:
    step, state, twin = place.step(train), a_state(place), a_state(place)
    for n in range(CALLS):
        if n == CALLS - 1 and place.device == "cuda":
            torch.cuda._sleep(50_000_000)
        state, metrics = step(state, place.randn(4, 3, seed=n))
        twin, expected = step.eager(twin, place.randn(4, 3, seed=n))
    if how == "close":
        step.close()
    del step
    if how == "state too":
        del state
    gc.collect()
    noise = [torch.full((size,), torch.nan, device=place.device) for size in (2, 6, 12) for _ in range(16)]
    place.assert_same(metrics, expected, "metrics")
    if how != "state too":
        place.assert_same(state, twin, "state")
    del noise


FORK = """
import os, sys, torch
import functional_cg as fcg
step = fcg.graph_step(lambda s, x: ({"w": s["w"] + x}, {"sum": s["w"].sum()}))
state, _ = step({"w": torch.zeros(3)}, torch.ones(3))
child = os.fork()
state, metrics = step(state, torch.full((3,), 10.0 if child else 100.0))
if child:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert state["w"].tolist() == [11.0] * 3 if child else [101.0] * 3
assert metrics["sum"] == 3.0
sys.stdout.write("parent\\n" if child else "child\\n")
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_h110_after_a_fork_each_process_has_a_state_of_its_own() -> None:
    """On the CPU; with CUDA torch itself refuses to go on in a forked process."""
    with Program("-c", FORK) as run:
        assert run.end(120.0) == 0, run.err
        assert sorted(run.out.split()) == ["child", "parent"]


def test_h112_a_step_that_calls_itself_is_an_error_like_any_other() -> None:
    def step_fn(state: Any, x: Tensor) -> Any:
        return itself[0](state, x)

    itself: list[Any] = []
    itself.append(fcg.graph_step(step_fn))
    state = fcg.place({"w": torch.zeros(2)})
    with pytest.raises(fcg.CaptureError, match="RecursionError"):
        itself[0](state, torch.ones(2))
    assert state["w"].tolist() == [0.0, 0.0]
    state, _ = CPU.step(lambda s, x: ({"w": s["w"] + x}, {}))(state, torch.ones(2))
    assert state["w"].tolist() == [1.0, 1.0]


@everywhere
def test_h111_two_trainers_in_one_process_are_independent(place: Place) -> None:
    """Two instances of one class, called in turn, are two runs."""

    class Trainer:
        def __init__(self, rate: float) -> None:
            self.rate = rate
            self.step = place.step(self.update)
            self.state: Any = fcg.place({"w": place.randn(3, 2, seed=0)})

        def update(self, state: Any, x: Tensor) -> Any:
            grad = fcg.grad(lambda w: torch.tanh(x @ w).square().mean())(state["w"])
            return {"w": state["w"] - self.rate * grad}, {"grad": grad}

        def run(self, n: int) -> Any:
            self.state, metrics = self.step(self.state, place.randn(4, 3, seed=n))
            return metrics

    together, alone = ([Trainer(rate) for rate in (0.1, 0.5)] for _ in range(2))
    in_turn = [[trainer.run(n) for trainer in together] for n in range(CALLS)]
    one_by_one = [[trainer.run(n) for n in range(CALLS)] for trainer in alone]
    for number, (mine, its) in enumerate(zip(together, alone, strict=True)):
        assert_trees_all_equal([metrics[number] for metrics in in_turn], one_by_one[number])
        assert_trees_all_equal(mine.state, its.state)
    assert not torch.equal(together[0].state["w"] + 0, together[1].state["w"] + 0)
