"""Branches of a step never show: any schedule, run in any order that it allows, gives the bits of the eager run."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import functional_cg as fcg
from functional_cg.stages.lower.compiled import without_lanes
from functional_cg.stages.plan import Buffers
from functional_cg.stages.run.capture import CPUBackend
from functional_cg.testing import assert_replay_equals_eager
from functional_cg.testing import strategies as fst
from tests.branched import branched, inputs, plan_of, schedules
from tests.exact_steps import exact_step_fns
from tests.overwritten import overwritten
from tests.shares import THOROUGH

CALLS = 6
a_share = hypothesis.settings(max_examples=2000 if THOROUGH else 8)


@a_share
@given(program=exact_step_fns(), lanes=st.integers(2, 6), number=st.integers(0, 2**16))
def test_exact_programs_in_branches(program: fst.StepProgram, lanes: int, number: int) -> None:
    with schedules(number):
        assert_replay_equals_eager(branched(program, lanes), program.state, inputs(program.x, CALLS, number))


@a_share
@given(program=overwritten(), lanes=st.integers(2, 6), number=st.integers(0, 2**16))
def test_values_overwritten_in_branches(program: fst.StepProgram, lanes: int, number: int) -> None:
    """Views, writes to parts of values, and what was kept of them before."""
    with schedules(number):
        assert_replay_equals_eager(branched(program, lanes), program.state, inputs(program.x, CALLS, number))


# -- what may go wrong --------------------------------------------------------------------------------------------


def heads(state: Any, x: Tensor) -> Any:
    """Two networks that read all of the state, with temporaries that die on different lanes."""
    a = (x @ state["a"]).tanh() @ state["b"]
    b = (x @ state["b"]).tanh() @ state["a"]
    new = {"a": state["a"] + a.mT @ b, "b": state["b"] - b.mT @ a, "n": state["n"] + 1}
    return fcg.tree.map(lambda leaf: leaf.clamp(-1, 1), new), {"a": a.sum(), "b": b.amax(0), "both": a * b}


def into_views(state: Any, x: Tensor) -> Any:
    base = state["a"] * 2
    corner = torch.as_strided(base, (2, 2), (4, 1), 1)
    read = base.sum(0)
    corner.add_(x[:2, :2])
    third = base.mT.mul_(2).relu()
    base[0] = read
    return {**state, "a": base.clamp(-4, 4), "b": third.clamp(-4, 4)}, {"corner": corner, "base": base.mT}


def read_by_two_written_by_a_third(state: Any, x: Tensor) -> Any:
    value = state["a"] @ x
    first, second = value.relu(), value.neg()
    value.zero_()
    value += 1
    return {**state, "a": (first @ second).clamp(-2, 2), "b": value * state["n"]}, {"first": first}


def swapped(state: Any, x: Tensor) -> Any:
    return {"a": state["b"], "b": state["a"], "n": state["n"] + 1}, {"sum": (state["a"] + x).sum(), "x": x}


def many_results(state: Any, x: Tensor) -> Any:
    values, order = x.sort(-1)
    parts = values.split(1)
    most, where = state["a"].max(0)
    empty = x[:0] * 2
    return (
        {"a": torch.cat([*parts[::-1]]) + most, "b": torch.stack(state["b"].unbind(0)), "n": where.sum()},
        {"order": order, "empty": empty, "part": parts[1]},
    )


def own_input_and_constant(state: Any, x: Tensor) -> Any:
    table = torch.tensor([1.0, 2.0, 3.0, 4.0])
    table += 1
    x.mul_(2)
    later = x.sum(0) * table
    x[0] = 0
    return {**state, "a": state["a"] + later, "b": x}, {"table": table, "later": later}


def drawn(state: Any, x: Tensor) -> Any:
    one, two = fcg.random.split(fcg.random.fold_in(fcg.random.key(0), state["n"]), 2)
    a = fcg.random.normal(one, (4, 4)) + x
    b = fcg.random.dropout(two, x, 0.5)
    return {"a": a, "b": b, "n": state["n"] + 1}, {"a": a.sum(), "b": b.sum()}


def flat(state: Any, x: Tensor) -> Any:
    grads = fcg.grad(lambda p: ((x @ p["w"]).tanh() @ p["v"] + p["b"]).square().sum())(state.params)
    return state.apply_gradients(grads), {"norm": grads["w"].norm()}


def start() -> dict[str, Tensor]:
    return {"a": torch.eye(4), "b": torch.ones(4, 4), "n": torch.tensor(1)}


CASES = [
    heads,
    into_views,
    read_by_two_written_by_a_third,
    swapped,
    many_results,
    own_input_and_constant,
    drawn,
]


@pytest.mark.parametrize("lanes", [2, 5])
@pytest.mark.parametrize("fn", CASES)
def test_steps_in_branches(fn: Any, lanes: int) -> None:
    for number in range(40 if THOROUGH else 2):
        with schedules(number):
            step = branched(fn, lanes)
            assert_replay_equals_eager(step, start(), inputs(torch.zeros(4, 4), CALLS, number))
            assert "lanes with" in step.explain(), step.explain()


@pytest.mark.parametrize(
    "optimizer", [fcg.optim.adamw(0.1, weight_decay=0.1), fcg.optim.flatten(fcg.optim.adam(0.1))]
)
def test_optimizers_in_branches(optimizer: Any) -> None:
    """Vectors over many leaves, whose memory is that of the leaves, and gaps between them."""
    params = {"w": torch.eye(4), "v": torch.ones(4, 3), "b": torch.zeros(3)}
    state = fcg.TrainState.create(params=params, optimizer=optimizer)
    for number in range(4):
        with schedules(number):
            assert_replay_equals_eager(branched(flat), state, inputs(torch.zeros(2, 4), CALLS, number))


def test_memory_read_on_another_lane_is_not_reused() -> None:
    """Lane 0 makes a value and goes on in equal memory while lane 1 reads it late."""

    def late(state: Any, x: Tensor) -> Any:
        value = x + 1
        slow = state["a"]
        for _ in range(4):
            slow = slow * 2
        read = slow + value
        other = value
        for _ in range(4):
            other = other + 1
        return {**state, "a": read.clamp(-4, 4), "b": other}, {}

    for number in range(12):
        with schedules(number):
            assert_replay_equals_eager(branched(late, 2), start(), inputs(torch.zeros(4, 4), CALLS, number))


def test_a_commit_waits_for_all_that_read_the_old_value() -> None:
    def late(state: Any, x: Tensor) -> Any:
        slow = x
        for _ in range(4):
            slow = slow + 1
        return {**state, "a": x * 2, "b": slow + state["a"]}, {"old": state["a"] - slow}

    for number in range(12):
        with schedules(number):
            assert_replay_equals_eager(branched(late, 3), start(), inputs(torch.zeros(4, 4), CALLS, number))


def test_several_steps_a_call_forks_and_functions_in_branches() -> None:
    with schedules(1):
        step = branched(heads, 4, steps_per_call=3)
        several = torch.zeros(3, 4, 4)
        assert_replay_equals_eager(step, start(), inputs(several, CALLS))
        evaluate = fcg.graph_fn(lambda s, x: heads(s, x)[1], backend=fcg.testing.Simulator(), branches=3)
        state = fcg.place(start())
        for x, more in zip(inputs(several[0], CALLS), inputs(several, CALLS, 1), strict=True):
            twin = fcg.fork(state)
            fcg.testing.assert_trees_all_equal(evaluate(twin, x), evaluate.eager(twin, x), "a function")
            state, metrics = step(state, more)
            expected, wanted = step.eager(twin, more)
            fcg.testing.assert_trees_all_equal((state, metrics), (expected, wanted), "a fork")


@pytest.mark.parametrize("debug", ["verify", "poison", "verify+poison"])
def test_debugging_in_branches(debug: Any) -> None:
    step = branched(heads, 4, debug=debug, verify_calls=CALLS)
    assert_replay_equals_eager(step, start(), inputs(torch.zeros(4, 4), CALLS))


def test_an_error_of_a_kernel_leaves_the_state() -> None:
    """On a CPU a call may raise while another lane has committed: the simulator puts the old values back."""

    def chosen(state: Any, i: Tensor) -> Any:
        return {"a": state["a"] + 1, "b": state["b"][i] + state["b"].sum(), "n": state["n"] * 2}, {}

    for number in range(6):
        with schedules(number):
            step = branched(chosen, 3)
            state, _ = step(start(), torch.tensor([0, 1, 2, 3]))
            before = fcg.snapshot(state)
            with pytest.raises(IndexError):
                step(state, torch.tensor([0, 1, 2, 9]))
            fcg.testing.assert_trees_all_equal(fcg.snapshot(state), before, "the state")


# -- where there are none -----------------------------------------------------------------------------------------


def test_memory_and_explanation_of_branches() -> None:
    wide, line = branched(heads, 4), branched(heads, 1)
    x = torch.zeros(4, 4)
    one, other = (step.lower(fcg.place(start()), x) for step in (wide, line))
    timeline = plan_of(wide, start(), x).timeline
    fixed = sum(one.memory_analysis()[name] for name in ("state", "inputs", "constants"))
    assert one.memory_analysis()["peak"] == fixed + timeline.peak >= other.memory_analysis()["peak"]
    assert str(timeline) in str(one)
    assert f"on {timeline.lanes} lanes with" in str(one)
    assert "branches" not in str(other)


def test_an_error_of_the_rehearsal_has_the_users_line() -> None:
    def rows(state: Any, at: Tensor) -> Any:
        return {"a": state["a"].tanh() @ state["b"], "b": state["b"].exp() @ state["a"]}, state["a"][at]

    lowered = branched(rows, 2).lower({"a": torch.eye(4), "b": torch.eye(4)}, torch.tensor([1]))
    buffers = Buffers([torch.eye(4), torch.eye(4)], [torch.tensor([7])], [])
    with pytest.raises(IndexError) as caught:
        lowered.plan.rehearse(buffers)
    line = rows.__code__.co_firstlineno + 1
    assert f"`rows`: raised by its replay, at test_branches.py:{line};" in caught.value.__notes__[0]


def test_what_runs_in_one_line_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(4, 4)
    for default in ({}, {"branches": "auto"}, {"compile_once": True, "lowering": "inductor"}):
        assert "branches" not in str(fcg.graph_step(heads, **default).lower(fcg.place(start()), x))
    on_host = fcg.graph_step(heads, branches=2).lower(fcg.place(start()), x)
    assert "branches: none, a CPU runs one call at a time" in str(on_host)
    own = fcg.graph_step(heads, branches=2, backend=CPUBackend()).lower(fcg.place(start()), x)
    assert "branches: none, `CPUBackend` runs one call at a time" in str(own)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    assert "free the workspaces" in without_lanes(torch.device("cuda"), "auto")
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    assert without_lanes(torch.device("cuda"), "auto") == ""
    compiled = fcg.graph_step(heads, lowering="inductor", branches=2).lower(fcg.place(start()), x)
    assert "branches: none, a CPU runs one call at a time" in str(compiled)
    assert "branches" not in str(fcg.graph_step(heads, lowering="inductor").lower(fcg.place(start()), x))
    chain = branched(lambda s, x: ({"n": ((s["n"] + 1) * 2) - 3}, {})).lower({"n": torch.tensor(1)}, x)
    assert "branches: none, each call needs the one before" in str(chain)
    moved = branched(lambda s: ({"a": s["b"], "b": s["a"]}, {})).lower({"a": x, "b": x + 1})
    assert "branches: none, with this lowering it runs in one line" in str(moved)
    auto = fcg.graph_step(heads, branches="auto", backend=fcg.testing.Simulator())
    monkeypatch.setattr("functional_cg.stages.branches.choice._GAIN", 1e9)
    assert "branches: none, since they would gain less than they cost" in str(
        auto.lower(fcg.place(start()), x)
    )


def test_memory_of_branches_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Automatically: within some room for all steps, or a share of the step's memory."""

    def lanes() -> int:
        step = fcg.graph_step(heads, branches="auto", backend=fcg.testing.Simulator())
        return plan_of(step, start(), torch.zeros(4, 4)).timeline.lanes

    assert lanes() > 1
    monkeypatch.setattr("functional_cg.stages.branches.choice._ALWAYS", 100)
    assert lanes() == 1


@torch.library.custom_op("fcg_tests::twice_in_branches", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


@twice.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_ops_of_other_libraries_run_in_one_line() -> None:
    def step_fn(state: Any, x: Tensor) -> Any:
        new, metrics = heads(state, x)
        return new, {**metrics, "twice": twice(x)}

    step = branched(step_fn)
    assert_replay_equals_eager(step, start(), inputs(torch.zeros(4, 4), CALLS))
    assert "branches: none, `fcg_tests::twice_in_branches` is an op of another library" in step.explain()


def test_a_kernel_that_returns_other_memory_than_traced_runs_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kernel that returns its argument, where the trace saw a new tensor: order would not follow memory."""
    from functional_cg.stages.plan import Plan

    names = Plan._names

    def lying(self: Any, *given: Any) -> Any:
        return {**names(self, *given), "op_aten_relu_default": lambda value: value}

    def kept(state: Any, x: Tensor) -> Any:
        value = (state["a"] @ x).abs()
        return {**state, "a": value.relu() + 1, "b": value.sum(0) + state["b"]}, {}

    step = branched(kept)
    monkeypatch.setattr(Plan, "_names", lying)
    step(start(), torch.ones(4, 4))
    assert "branches: none, the kernel of `relu` returns other memory than its trace says" in step.explain()


@pytest.mark.parametrize("lanes", [0, -1, 33, True, 1.5, "all"])
def test_numbers_of_lanes(lanes: Any) -> None:
    with pytest.raises(ValueError, match=r"graph_step: branches must be 'auto' or an int from 1 to 32, got"):
        fcg.graph_step(heads, branches=lanes)
    with pytest.raises(ValueError, match=r"branch_memory must be None or a number of bytes, got"):
        fcg.graph_step(heads, branch_memory=-1 if lanes == -1 else True if lanes is True else 0.5)
    with pytest.raises(
        ValueError, match=r"compile_once=True does not go with branches=4.\nTo fix: leave one"
    ):
        fcg.graph_step(lambda state: (state, {}), compile_once=True, branches=4)
