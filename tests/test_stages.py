"""The stages of a step seen from outside: lowering, capture, eager runs, log lines, and what a call costs in Python."""

import logging
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import functional_cg as fcg
from functional_cg.stages.run.capture import CPUBackend
from functional_cg.testing import assert_trees_all_equal
from tests.small_step import a_state, assert_runs_like_eager, data, train

# -- stages -----------------------------------------------------------------------------------------------------


def test_lower_and_capture():
    step, state = fcg.graph_step(train), a_state()
    before = fcg.snapshot(state)
    lowered = step.lower(state, data(0))
    assert isinstance(lowered, fcg.Lowered)
    assert (step.stats.traces, step.stats.captures, step.stats.replays) == (1, 0, 0)
    text = lowered.as_text()
    for part in (
        "train:",
        "state['w']  f32[3]@cpu",
        "aten.linalg_vector_norm",
    ):
        assert part in text
    assert "# small_step.py:" in text
    assert "train is a pure function of its arguments:" in str(lowered.inspection)
    assert "none waits for the host, reads a" in str(lowered.inspection)
    memory = lowered.memory_analysis()
    assert memory["state"] == 3 * 4 + 8
    assert memory["inputs"] == 6 * 4
    assert memory["metrics"] == 4 + 8
    assert memory["constants"] == 0
    assert memory["temporaries"] > 0
    captured = lowered.capture()
    assert isinstance(captured, fcg.Captured)
    assert (step.stats.traces, step.stats.captures, step.stats.replays) == (1, 1, 0)
    assert_trees_all_equal(fcg.snapshot(state), before)
    state, _ = step(state, data(0))
    assert (step.stats.traces, step.stats.captures, step.stats.replays) == (1, 1, 1)


def test_explain_and_stats():
    table = torch.ones(3)
    rate = 0.5
    step = fcg.graph_step(lambda s, b: ({**s, "w": s["w"] * rate + table}, b["x"].sum()), constants=(table,))
    assert step.explain() == "<lambda>: 0 traces, 0 captures, 0 replays, 0 eager calls"
    state = a_state()
    for n in range(3):
        state, _ = step(state, data(n))
    step.eager(state, data(0))
    text = step.explain()
    assert text.startswith("<lambda>: 1 trace, 1 capture, 3 replays, 1 eager call\n")
    for part in (
        "state leaves: 2, of which returned unchanged: s['n']",
        "constants owned by the step: constants[0] f32[3]@cpu",
        "Python values from outside, compared at each call: rate",
        "metrics: 1",
        ": state 20 B, inputs",
    ):
        assert part in text


def test_log_lines(caplog):
    caplog.set_level(logging.INFO, logger="functional_cg")
    step, state = fcg.graph_step(train), a_state()
    for n in range(3):
        state, _ = step(state, data(n))
    stages = [record.getMessage().rsplit(" in ", 1)[0] for record in caplog.records]
    assert stages[0] == "train: traced"
    assert stages[1].startswith("train: lowered ")
    assert stages[2] == "train: captured"
    assert len(stages) == 3
    assert all(record.getMessage().endswith(" s") for record in caplog.records)


def test_verify_compares_the_first_calls():
    step = fcg.graph_step(train, debug="verify", verify_calls=2)
    state, ran = a_state(), []
    for n in range(4):
        state, _ = step(state, data(n))
        ran.append(step.stats.replays)
    assert ran == [1, 2, 3, 4]


def test_a_backend_of_ones_own():
    class Recording(CPUBackend):
        def __init__(self):
            self.captured = []

        def capture(self, plan, buffers, scratch):
            self.captured.append(len(buffers.slots))
            return super().capture(plan, buffers, scratch)

    backend = Recording()
    assert_runs_like_eager(fcg.graph_step(train, backend=backend))
    assert backend.captured == [2]


def test_a_compiler_of_ones_own():
    seen = []

    def compiler(graph, inputs):
        seen.append(len(inputs))
        return graph.forward

    step = fcg.graph_step(train, lowering=compiler)
    state, twin = a_state(), a_state()
    for n in range(3):
        state, metrics = step(state, data(n))
        twin, expected = step.eager(twin, data(n))
        assert_trees_all_equal(metrics, expected)
        assert_trees_all_equal(fcg.snapshot(state), fcg.snapshot(twin))
    assert seen


def test_a_compiler_of_ones_own_may_give_back_memory_that_holds_the_result_already():
    def compiler(graph, inputs):
        def run(*arguments):
            known, out = list(arguments), []
            for result in graph(*arguments):
                out.append(next((one for one in known if torch.equal(one, result)), result))
                known.append(out[-1])
            return out

        return run

    def step_fn(state, x):
        old = state["w"].clone()
        return {"w": state["w"] + x, "old": old}, {
            "old": old * 1,
            "x": x * 1,
            "sum": x + old,
            "same": old + x,
        }

    step = fcg.graph_step(step_fn, lowering=compiler)
    state, kept = fcg.place({"w": torch.zeros(2), "old": torch.ones(2)}), []
    for n in range(3):
        state, metrics = step(state, torch.ones(2))
        metrics["sum"] += 1
        kept.append([metrics[name].tolist() for name in ("old", "x", "sum", "same")])
        assert [state["w"].tolist(), state["old"].tolist()] == [[n + 1.0] * 2, [float(n)] * 2]
        assert kept[-1] == [[float(n)] * 2, [1.0] * 2, [n + 2.0] * 2, [n + 1.0] * 2]


# -- eager ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["method", "backend", "environment"])
def test_eager_runs_the_python_at_each_call(way, monkeypatch, caplog):
    seen = []

    def shown(state, batch):
        seen.append(f"{batch['x'].sum():.1f}")  # real numbers, and side effects are seen
        return train(state, batch)

    if way == "environment":
        monkeypatch.setenv("FCG_DISABLE_CAPTURE", "1")
    step = fcg.graph_step(shown, backend="eager" if way == "backend" else "auto")
    call = step.eager if way == "method" else step
    state, twin, captured = a_state(), a_state(), fcg.graph_step(train, backend=CPUBackend())
    monkeypatch.delenv("FCG_DISABLE_CAPTURE", raising=False)
    for n in range(3):
        twin, expected = captured(twin, data(n))
        if way == "environment":
            monkeypatch.setenv("FCG_DISABLE_CAPTURE", "1")
        old = state
        state, metrics = call(state, data(n))
        monkeypatch.delenv("FCG_DISABLE_CAPTURE", raising=False)
        assert state.generation == n + 1
        with pytest.raises(fcg.DonatedStateError, match="was used after"):
            _ = old["w"]
        assert_trees_all_equal(metrics, expected)
        assert_trees_all_equal(fcg.snapshot(state), fcg.snapshot(twin))
    assert seen == ["15.0", "30.0", "45.0"]
    assert (step.stats.traces, step.stats.captures, step.stats.eager_calls) == (0, 0, 3)
    said = [record.getMessage() for record in caplog.records if "FCG_DISABLE_CAPTURE" in record.getMessage()]
    assert len(said) == (1 if way == "environment" else 0)


def test_eager_leaves_inputs_and_plain_trees_alone():
    def hostile(state, batch):
        batch["x"].zero_()
        return {**state, "w": state["w"] + 1}, {}

    tree, batch = {"w": torch.ones(3), "n": torch.tensor(0)}, data(0)
    state, _ = fcg.graph_step(hostile).eager(tree, batch)
    assert tree["w"].tolist() == [1.0, 1.0, 1.0]
    assert batch["x"].sum() == 15.0
    assert state["w"].tolist() == [2.0, 2.0, 2.0]


# -- what a call costs ------------------------------------------------------------------------------------------


def test_python_body_runs_while_tracing_only():
    runs = []

    def counted(state, batch):
        runs.append(None)
        return train(state, batch)

    step, state = fcg.graph_step(counted), a_state()
    for n in range(20):
        state, _ = step(state, data(n))
    traced = len(runs)
    assert traced == 3  # and compared; twice, since it fills a list
    step(fcg.fork(state), data(0))
    assert len(runs) == traced


def python_calls(function: Callable[[], Any]) -> int:
    """Python and C functions called, counted from outside."""
    count = 0

    def profile(frame, event, arg):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def touch_one(state, batch):
    """Of all leaves one is read and written."""
    return {**state, "leaf0": state["leaf0"] + batch["x"]}, {"sum": state["leaf0"].sum()}


def leaves(count: int) -> Any:
    return fcg.place({f"leaf{i}": torch.full((4,), float(i)) for i in range(count)})


def test_host_path_does_not_depend_on_leaves():
    batch, calls = {"x": torch.ones(4)}, {}
    for count in (10, 2_000):
        step, state = fcg.graph_step(touch_one), leaves(count)
        for _ in range(2):
            state, _ = step(state, batch)
        calls[count] = python_calls(lambda step=step, state=state: step(state, batch))
        state = state.latest()
        for _ in range(16):
            state, _ = step(state, batch)
        assert state["leaf0"].tolist() == [19.0] * 4
        assert state[f"leaf{count - 1}"].tolist() == [float(count - 1)] * 4
    assert calls[10] == calls[2_000]


def test_python_calls_of_a_call_are_few():
    step, state = fcg.graph_step(train), a_state()
    for n in range(3):
        state, _ = step(state, data(n))
    assert python_calls(lambda: step(state, data(9))) < 100


@pytest.mark.kernels
def test_a_compiled_step_finds_out_that_an_op_returns_other_strides_than_it_says() -> None:
    """Nothing else would: the compiled function reads memory by the strides of the trace."""
    with torch.library._scoped_library("functional_cg_tests", "DEF") as library:
        library.define("columns(Tensor x) -> Tensor")
        library.impl("columns", lambda x: x.t().contiguous().t(), "CPU")
        library.impl("columns", torch.empty_like, "Meta")
        columns = torch.ops.functional_cg_tests.columns
        step = fcg.graph_step(lambda s, x: ({"w": s["w"] + 2 * columns(x)}, {}), lowering="inductor")
        state = fcg.place({"w": torch.zeros(3, 4)})
        with pytest.raises(fcg.CaptureError, match=r"gave up on it.*\n.*stride"):
            step(state, torch.arange(12.0).view(3, 4))
        assert not state["w"].any()


LAID_OUT_OTHERWISE = {
    "cat with nothing": lambda x: torch.cat([x.new_zeros(2, 4, 0, 8), x.transpose(1, 2)], -2),
    "cat of one": lambda x: torch.cat([x.transpose(1, 2)]),
    "stack of one": lambda x: torch.stack([x.transpose(1, 2)])[0],
    "repeat once": lambda x: x.transpose(1, 2).repeat(1, 1, 1, 1),
    "index": lambda x: x.transpose(1, 2)[torch.arange(2)],
    "pad by nothing": lambda x: torch.nn.functional.pad(x.transpose(1, 2), (0, 0, 0, 0)),
    "where": lambda x: torch.where(x.transpose(1, 2) > 0, x.transpose(1, 2), 0.0),
    "roll": lambda x: x.transpose(1, 2).roll(1, 0),
    "flip": lambda x: x.transpose(1, 2).flip(0),
    "gather": lambda x: x.transpose(1, 2).gather(0, torch.zeros(2, 4, 8, 8, dtype=torch.int64)),
    "tril": lambda x: x.transpose(1, 2).tril(),
    "sort": lambda x: x.transpose(1, 2).sort(-1).values,
    "softmax": lambda x: x.transpose(1, 2).softmax(-1),
    "layer norm": lambda x: torch.nn.functional.layer_norm(x.transpose(1, 2), (8,)),
}


@pytest.mark.kernels
def test_what_a_compiler_lays_out_otherwise_is_viewed_all_the_same() -> None:
    """A compiler's formulas for torch's ops return other strides; views that were recorded of them are made."""

    def step(state: Any, x: Any) -> Any:
        new = {name: make(x).reshape(8, 8, 8) for name, make in LAID_OUT_OTHERWISE.items()}
        return new, {name: value.sum(0).flatten() for name, value in new.items()}

    start = {name: torch.zeros(8, 8, 8) for name in LAID_OUT_OTHERWISE}
    compiled = fcg.graph_step(step, lowering="inductor")
    state = fcg.place(start)
    twin = fcg.fork(state)
    for _ in range(3):
        x = torch.randn(2, 8, 4, 8)
        state, metrics = compiled(state, x)
        twin, expected = compiled.eager(twin, x)
        for one, other in zip(
            fcg.tree.leaves((state, metrics)), fcg.tree.leaves((twin, expected)), strict=True
        ):
            torch.testing.assert_close(one, other)


def test_a_compiler_of_ones_own_finds_a_leaf_where_it_begins() -> None:
    """It may run the graph on slots that lie in one slab: ``as_strided`` counts from the leaf, not from the slab."""

    def step(state: Any, x: Any) -> Any:
        w = state["w"]
        new = {"a": state["a"] + x, "v": w.as_strided((3,), (2,), w.storage_offset() + 1) + 0, "w": w + 1}
        return new, {"sum": w.as_strided((2, 2), (3, 1)).sum()}

    compiled = fcg.graph_step(step, lowering=lambda graph, inputs: graph, certify=False)
    state = fcg.place({"a": torch.ones(5), "v": torch.zeros(3), "w": torch.arange(6.0)})
    for call in range(3):
        state, metrics = compiled(state, torch.ones(5))
        assert state["v"].tolist() == [1 + call, 3 + call, 5 + call]
        assert float(metrics["sum"]) == 8 + 4 * call
