"""Branches on a GPU: streams of one capture, the bits of one line, and one launch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_cg as fcg
from functional_cg.stages.plan import Plan
from functional_cg.stages.run.capture import CUDABackend
from functional_cg.testing import assert_trees_all_equal
from tests.branched import schedules
from tests.cuda.helpers_cuda import (
    DEVICE,
    clean_allocator,  # noqa: F401
    marks,
    mlp_batch,
    mlp_state,
    mlp_step,
    needs_gpu,
    wait,
)
from tests.exact_programs import drawn
from tests.exact_steps import exact_step_fns
from tests.overwritten import overwritten
from tests.shares import THOROUGH

pytestmark = marks
CALLS = 16
PROGRAMS = 200 if THOROUGH else 20


def assert_branches_do_not_show(
    fn: Any, start: Any, calls: list[Any], number: int, lowering: Any = "aten", *, exact: bool = True
) -> str:
    """On lanes, in one line and eagerly: equal bits at each call; returned values are kept until the end.

    Both are compiled alike. Returns what the step on lanes says of them.
    """
    lanes = 2 + number % 4
    wide, line = (fcg.graph_step(fn, lowering=lowering, branches=lanes) for _ in range(2))
    states = [fcg.place(start), fcg.place(start), fcg.place(start)]
    kept: list[list[Any]] = [[], [], []]
    for x in calls:
        for n, step in enumerate((wide, line, wide.eager)):
            with schedules(number, in_line=step is line):
                states[n], metrics = step(states[n], x)
            kept[n].append((metrics, fcg.snapshot(states[n])))
    wait()
    assert_trees_all_equal(kept[0], kept[1], "lanes and one line")
    if exact:
        assert_trees_all_equal(kept[0], kept[2], "lanes and the eager run")
    words = next(text for text in wide.explain().splitlines() if "branches:" in text)
    for step in (wide, line):
        step.close()
    return words


def assert_each_is_its_line(programs: Iterable[Any], *lowering: str) -> None:
    """Whole numbers, and new ones at each call."""
    generator = torch.Generator().manual_seed(0)
    for number, program in enumerate(programs):
        start = fcg.tree.map(lambda leaf: leaf.to(DEVICE), program.state)
        shape = program.x.shape
        calls = [
            torch.randint(-8, 9, shape, generator=generator).to(DEVICE, program.x.dtype) for _ in range(CALLS)
        ]
        assert_branches_do_not_show(program, start, calls, number, *lowering)


@needs_gpu
@pytest.mark.parametrize("of", [exact_step_fns(), overwritten()], ids=["any", "overwritten"])
def test_exact_programs_in_branches_of_a_graph(of: Any) -> None:
    assert_each_is_its_line(drawn(PROGRAMS // 2, 0, of))


@needs_gpu
@pytest.mark.parametrize("lowering", ["aten", "inductor"])
def test_two_networks_side_by_side(lowering: Any) -> None:
    """A small program, as a sanitizer takes it: products and sums on lanes, in memory that each frees and takes."""

    def two(state: Any, x: Tensor) -> Any:
        a = ((x @ state["a"]).clamp(-4, 4) @ state["a"]).clamp(-4, 4)
        b = ((x @ state["b"]).clamp(-4, 4) @ state["b"]).clamp(-4, 4)
        new = {"a": state["a"] + a.mT @ x, "b": state["b"] - b.mT @ x}
        return fcg.tree.map(lambda leaf: leaf.clamp(-8, 8), new), {"both": (a * b).sum()}

    start = {"a": torch.eye(64, device=DEVICE), "b": torch.ones(64, 64, device=DEVICE)}
    generator = torch.Generator().manual_seed(0)
    calls = [torch.randint(-2, 3, (8, 64), generator=generator).to(DEVICE, torch.float32) for _ in range(4)]
    words = assert_branches_do_not_show(two, start, calls, 1, lowering)
    assert "units of work on" in words, words


@needs_gpu
def test_exact_programs_in_branches_of_a_compiled_step() -> None:
    assert_each_is_its_line(drawn(PROGRAMS // 10, 1, exact_step_fns()), "inductor")


@needs_gpu
def test_a_compiled_step_has_the_bits_of_its_line() -> None:
    """Products, which take workspaces, kernels of several results, and the optimizer."""
    calls = [mlp_batch(i) for i in range(CALLS)]
    for number in range(2):
        words = assert_branches_do_not_show(
            mlp_step, fcg.snapshot(mlp_state()), calls, number, "inductor", exact=False
        )
        assert "units of work on" in words, words


class Told(CUDABackend):
    """Measures, and is told another result."""

    def __init__(self, in_line: float, on_lanes: float) -> None:
        super().__init__(torch.device("cuda", torch.cuda.current_device()))
        self.told, self.measured = [in_line, on_lanes], []

    def _milliseconds(self, *given: Any) -> list[float]:
        self.measured += super()._milliseconds(*given)
        return self.told


@needs_gpu
@pytest.mark.parametrize("on_lanes", [0.5, 2.0])
@pytest.mark.parametrize("lowering", ["aten", "inductor"])
def test_what_was_measured_to_be_faster_runs_and_the_state_is_left_alone(
    lowering: Any, on_lanes: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default, of what an estimate takes for faster; nothing of the measurement is left."""
    monkeypatch.setattr("functional_cg.stages.branches.choice._GAIN", 0.5)

    def networks(state: Any, x: Tensor) -> Any:
        new = {name: (w + (x @ w).clamp(-4, 4).mT @ x).clamp(-8, 8) for name, w in state["w"].items()}
        return {"w": new, "count": state["count"] + 1}, {name: w.sum() for name, w in new.items()}

    start = {
        "w": {name: torch.eye(64, device=DEVICE) * number for number, name in enumerate("abcd")},
        "count": torch.tensor(0, device=DEVICE),
    }
    backend = Told(1.0, on_lanes)
    step = fcg.graph_step(networks, lowering=lowering, backend=backend)
    state, eager = fcg.place(start), fcg.place(start)
    generator = torch.Generator().manual_seed(0)
    for _ in range(CALLS):
        x = torch.randint(-2, 3, (8, 64), generator=generator).to(DEVICE, torch.float32)
        state, metrics = step(state, x)
        eager, expected = step.eager(eager, x)
        assert_trees_all_equal((fcg.snapshot(state), metrics), (fcg.snapshot(eager), expected))
    assert (step.stats.captures, step.stats.replays) == (1, CALLS)
    assert len(backend.measured) == 2
    assert all(0 < one < 100 for one in backend.measured), backend.measured
    words = step.explain()
    assert f"measured {on_lanes:.3f} ms on" in words, words
    assert ("units of work on" in words) == (on_lanes < 1), words
    step.close()


@needs_gpu
@pytest.mark.parametrize("lowering", ["aten", "inductor"])
def test_a_step_in_branches_is_one_launch(lowering: Any) -> None:
    from tests.cuda.test_capture import COPIES, FILLS, LAUNCHES, profiled, starting_with

    step = fcg.graph_step(mlp_step, lowering=lowering, branches=4, certify="first")
    state = mlp_state()
    for i in range(3):
        state, _ = step(state, mlp_batch(i))
    assert "lanes with" in step.explain(), step.explain()
    batch = mlp_batch(3)
    wait()
    (state, metrics), calls = profiled(lambda: step(state, batch))
    assert starting_with(calls, ("cudaGraphLaunch", "cuGraphLaunch")) == 1, calls
    extra = starting_with(calls, LAUNCHES) + starting_with(calls, COPIES) + starting_with(calls, FILLS)
    assert extra <= len(batch) + len(metrics), calls


@needs_gpu
def test_a_capture_in_branches_that_fails_leaves_the_streams_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The caller's stream is current again, the state is as it was, and the next step is captured."""
    names = Plan._names

    def raises_in_a_capture(value: Tensor) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("no room")
        return torch.relu(value)

    def breaking(self: Any, *given: Any) -> Any:
        return {**names(self, *given), "op_aten_relu_default": raises_in_a_capture}

    def two(state: Any, x: Tensor) -> Any:
        return {"a": state["a"] + (x @ state["a"]).relu(), "b": state["b"] + (x @ state["b"]).tanh()}, {}

    before, x = torch.cuda.current_stream(), torch.ones(4, 4, device=DEVICE)
    state = fcg.place({"a": torch.eye(4, device=DEVICE), "b": torch.eye(4, device=DEVICE)})
    kept, step = fcg.snapshot(state), fcg.graph_step(two, lowering="aten", branches=2)
    with monkeypatch.context() as patch:
        patch.setattr(Plan, "_names", breaking)
        with pytest.raises(fcg.CaptureError, match="no room"):
            step(state, x)
    assert torch.cuda.current_stream() == before
    assert_trees_all_equal(fcg.snapshot(state), kept, "the state")
    again = fcg.graph_step(two, lowering="aten", branches=2)
    new, _ = again(state, x)
    assert_trees_all_equal(fcg.snapshot(new), two(kept, x)[0], "the new state")
