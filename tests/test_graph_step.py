"""The transform: options, stages, methods, nesting, inputs, many states, and what a call costs in Python."""

import gc
import pickle
import weakref
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import functional_cg as fcg
from functional_cg.testing import assert_trees_all_equal
from tests.small_step import a_state, assert_runs_like_eager, data, train

# -- ways to write it -------------------------------------------------------------------------------------------


def test_with_and_without_parentheses():
    @fcg.graph_step
    def bare(state, batch):
        """The bare one."""
        return train(state, batch)

    @fcg.graph_step()
    def called(state, batch):
        return train(state, batch)

    @fcg.graph_step(max_captures=2, lowering="aten", backend="auto")
    def with_options(state, batch):
        return train(state, batch)

    for step in (bare, called, with_options):
        assert isinstance(step, fcg.GraphStep)
        assert_runs_like_eager(step)
    assert bare.__name__ == "bare"
    assert bare.__doc__ == "The bare one."
    assert bare.__wrapped__(fcg.snapshot(a_state()), data(0))[0]["n"] == 1
    assert repr(bare).startswith("<GraphStep bare: Stats(traces=1, captures=1, replays=4")


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"max_captures": 0}, ValueError, "max_captures must be an int of at least 1, got 0"),
        ({"max_captures": True}, ValueError, "max_captures must be an int of at least 1, got True"),
        ({"max_captures": 1.5}, ValueError, "max_captures must be an int of at least 1, got 1.5"),
        ({"verify_calls": -1}, ValueError, "verify_calls must be an int of at least 0, got -1"),
        (
            {"lowering": "fast"},
            ValueError,
            "lowering must be 'auto', 'aten', 'inductor' or a compiler, got 'fast'",
        ),
        ({"backend": "cuda"}, ValueError, "backend must be 'auto', 'eager' or a Backend object, got 'cuda'"),
        ({"debug": "all"}, ValueError, "debug must be 'verify', 'poison' or 'verify.poison', got 'all'"),
        ({"constants": [1]}, TypeError, r": constants\[0\] must be a tensor, got int"),
        (
            {"jit": True},
            TypeError,
            "unexpected keyword argument 'jit'; the options are static_argnames, const",
        ),
        ({"static_args": ()}, TypeError, "argument 'static_args'; did you mean `static_argnames`"),
    ],
)
@pytest.mark.parametrize("transform", [fcg.graph_step, fcg.graph_fn])
def test_options_are_checked_at_once(transform, options, error, match):
    name = "`train`" if "constants" in options else transform.__name__
    with pytest.raises(error, match=rf"^{name}.*{match}"):
        transform(**options)(train)


def test_not_a_function():
    with pytest.raises(TypeError, match="expected a function, got dict"):
        fcg.graph_step({})


class Trainer:
    """Methods as steps: one step per instance."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    @fcg.graph_step
    def train(self, state, batch):
        return {**state, "w": state["w"] * self.scale + batch["x"].sum(0)}, {
            "scale": state["n"] * 0 + self.scale
        }

    @fcg.graph_fn
    def evaluate(self, state, batch):
        return (state["w"] * batch["x"]).sum() * self.scale

    @fcg.graph_step(static_argnames=("times",))
    def repeat(self, state, batch, *, times):
        return {**state, "w": state["w"] * self.scale**times}, {}


def test_methods():
    half, double = Trainer(0.5), Trainer(2.0)
    assert isinstance(Trainer.train, fcg.GraphStep)
    assert half.train is half.train
    assert half.train is not double.train
    for trainer in (half, double):
        assert_runs_like_eager(trainer.train)
        assert trainer.train.stats.traces == 1
        state = a_state()
        assert trainer.evaluate(state, data(0)) == (state["w"] * data(0)["x"]).sum() * trainer.scale
        state, _ = trainer.repeat(state, data(0), times=2)
        assert state["w"].tolist() == (torch.arange(3.0) * trainer.scale**2).tolist()
    half.scale = 0.25
    with pytest.raises(fcg.BakedValueError, match=r"self\.scale  traced 0\.5   now 0\.25"):
        half.train(a_state(), data(0))
    assert_runs_like_eager(double.train)


def test_step_of_an_instance_is_freed_with_it():
    trainer = Trainer(0.5)
    trainer.train(a_state(), data(0))
    step = weakref.ref(trainer.train)
    del trainer
    gc.collect()
    assert step() is None


def test_steps_are_not_copied():
    with pytest.raises(TypeError, match="a step cannot be pickled or copied"):
        pickle.dumps(fcg.graph_step(train))


# -- nesting ----------------------------------------------------------------------------------------------------


def test_nested_steps_become_one_program():
    @fcg.graph_fn
    def gradient(w, x):
        return fcg.grad(lambda v: ((x @ v) ** 2).mean())(w)

    @fcg.graph_step
    def inner(state, batch):
        return {**state, "w": state["w"] - 0.1 * gradient(state["w"], batch["x"])}, {"w": state["w"].sum()}

    @fcg.graph_step
    def outer(state, batch):
        metrics = []
        for _ in range(2):
            state, out = inner(state, batch)
            metrics.append(out["w"])
        return state, torch.stack(metrics)

    outer(a_state(), data(0))
    assert (outer.stats.traces, outer.stats.captures) == (1, 1)
    assert inner.stats.traces == gradient.stats.traces == 0
    assert_runs_like_eager(outer)
    assert_runs_like_eager(inner)  # and it is still a step of its own


# -- graph_fn ---------------------------------------------------------------------------------------------------


def test_graph_fn_of_several_states_and_branches():
    def mix(params, other, x, teacher):
        return {"out": params["w"] * x + other["w"], "teacher": teacher["w"].sum(), "x": x}

    state = fcg.TrainState.create(params={"w": torch.ones(3)}, optimizer=fcg.optim.sgd(0.1))
    student, teacher = a_state(), a_state(2.0)
    fn = fcg.graph_fn(mix)
    for n in range(3):
        x = torch.full((3,), float(n))
        out = fn(state.params, student, x, teacher)
        assert out["out"].tolist() == (x + torch.arange(3.0)).tolist()
        assert out["teacher"] == 6.0
        out["x"].zero_()
        assert x.tolist() == [float(n)] * 3
    assert fn.stats.captures == 1
    assert state.generation == student.generation == teacher.generation == 0  # borrowed


def test_graph_fn_sees_the_updates_of_a_step():
    step, total = fcg.graph_step(train), fcg.graph_fn(lambda state: state["w"].sum())
    state = a_state()
    for n in range(4):
        state, _ = step(state, data(n))
        assert total(state) == state["w"].sum()
    assert (total.stats.traces, total.stats.captures) == (1, 1)
    fork = fcg.fork(state)
    assert total(fork) == total(state)
    assert (total.stats.traces, total.stats.captures) == (1, 2)


def test_graph_fn_without_a_state():
    fn = fcg.graph_fn(lambda x, *, scale: x * scale)
    assert fn(torch.ones(2), scale=3.0).tolist() == [3.0, 3.0]
    assert fn(torch.ones(2), scale=4.0).tolist() == [4.0, 4.0]
    assert fn.stats.captures == 1
    assert fn.eager(torch.ones(2), scale=4.0).tolist() == [4.0, 4.0]


def test_outputs_come_back_as_they_were_written():
    def fn(state, x):
        return {"z": (x, [x + 1, None]), "a": "text", "n": 3, "flag": True}

    out = fcg.graph_fn(fn)(a_state(), torch.ones(2))
    assert list(out) == ["z", "a", "n", "flag"] == list(fcg.graph_fn(fn).eager(a_state(), torch.ones(2)))
    assert (out["a"], out["n"], out["flag"], out["z"][1][1]) == ("text", 3, True, None)
    assert isinstance(out["z"], tuple)


# -- inputs -----------------------------------------------------------------------------------------------------


def test_python_numbers_are_live():
    def shown(state, number):
        return state, number * 2

    state = a_state()
    for values, dtype in (((1, 5, -3), torch.int64), ((0.5, 2.0, 1e-3), torch.float32)):
        step = fcg.graph_step(shown)
        for value in values:
            state, out = step(state, value)
            assert out.dtype is dtype
            assert out.shape == ()
            torch.testing.assert_close(out, torch.tensor(value * 2, dtype=dtype), rtol=0, atol=0)
        assert step.stats.traces == 1
    flags = fcg.graph_step(lambda state, flag: (state, torch.where(flag, 1.0, 2.0)))
    for flag in (True, False, True):
        state, out = flags(state, flag)
        assert out == (1.0 if flag else 2.0)


def test_numpy_inputs():
    step, state, twin = fcg.graph_step(train), a_state(), a_state()
    for n in range(3):
        array = data(n)["x"].numpy()
        state, metrics = step(state, {"x": array})
        twin, expected = step(twin, {"x": torch.from_numpy(array)})
        array.fill(numpy.nan)  # the caller's again when the call returns
        assert_trees_all_equal(metrics, expected)
        assert_trees_all_equal(fcg.snapshot(state), fcg.snapshot(twin))
    assert step.stats.traces == 1
    read_only = numpy.ones((2, 3), dtype=numpy.float32)
    read_only.flags.writeable = False
    step(state, {"x": read_only})
    scalar = fcg.graph_fn(lambda x: x * 2)
    assert scalar(numpy.float32(1.5)) == scalar(torch.tensor(1.5)) == 3.0


def test_order_of_keys_does_not_matter():
    step = fcg.graph_step(lambda state, batch: (dict(reversed(state.items())), batch["a"] - batch["b"]))
    state = fcg.place({"n": torch.zeros(()), "w": torch.ones(2)})
    a, b = torch.full((2,), 3.0), torch.ones(2)
    for batch in ({"a": a, "b": b}, {"b": b, "a": a}):
        state, out = step(state, batch)
        assert out.tolist() == [2.0, 2.0]
    state, out = step({"w": torch.ones(2), "n": torch.zeros(())}, {"b": b, "a": a})
    assert state["w"].tolist() == [1.0, 1.0]
    assert step.stats.traces == 1


def test_positional_and_keyword_inputs():
    step = fcg.graph_step(lambda state, x, *, y, **more: (state, x + y + more["z"]), max_captures=1)
    state = a_state()
    for n in range(3):
        state, out = step(state, float(n), z=2.0, y=1.0)
        assert out == n + 3.0
    assert step.stats.traces == 1


# -- states -----------------------------------------------------------------------------------------------------


def test_plain_tree_stays_the_callers():
    step, tree = fcg.graph_step(train), {"w": torch.ones(3), "n": torch.tensor(0)}
    first, _ = step(tree, data(0))
    second, _ = step(tree, data(0))
    assert tree["w"].tolist() == [1.0, 1.0, 1.0]
    assert_trees_all_equal(fcg.snapshot(first), fcg.snapshot(second))
    tree["w"].zero_()
    assert first["w"].tolist() == [3.5, 5.5, 7.5]
    assert step.stats.traces == 1


def test_numbers_in_a_plain_tree_are_leaves():
    step = fcg.graph_step(lambda state, _: ({"lr": state["lr"] * 0.5, "n": state["n"] + 1}, {}))
    state, _ = step({"lr": 1.0, "n": 0}, None)
    state, _ = step(state, None)
    assert (state["lr"], state["n"]) == (0.25, 2)
    assert state["n"].dtype is torch.int64


def test_a_thousand_fresh_trees_cost_one_trace():
    step = fcg.graph_step(train)
    for n in range(1000):
        state, metrics = step({"w": torch.full((3,), float(n)), "n": torch.tensor(n)}, data(0))
        assert metrics["n"] == n
        assert state["w"].tolist() == [n * 0.5 + 3.0, n * 0.5 + 5.0, n * 0.5 + 7.0]
    assert step.stats.traces == 1
    assert step.stats.captures <= 2
    assert len(step._captured) <= 2


def test_two_forks_in_turn_equal_two_runs():
    step = fcg.graph_step(train)
    left, right = a_state(), a_state(3.0)
    runs = []
    for scale, offset in ((1.0, 0), (3.0, 10)):
        state = a_state(scale)
        for n in range(5):
            state, _ = step(state, data(n + offset))
        runs.append(fcg.snapshot(state))
    for n in range(5):
        left, _ = step(left, data(n))
        old, (right, _) = right, step(right, data(n + 10))
        with pytest.raises(fcg.DonatedStateError):
            step(old, data(n))
    assert_trees_all_equal(fcg.snapshot(left), runs[0])
    assert_trees_all_equal(fcg.snapshot(right), runs[1])
    assert step.stats.traces == 1


# -- constants --------------------------------------------------------------------------------------------------


def test_constants():
    table, mask = torch.tensor([1.0, 2.0, 3.0]), {"keep": torch.tensor([True, False, True])}

    @fcg.graph_step(constants=(table, mask))
    def step(state, batch):
        w = torch.where(mask["keep"], state["w"] + table, state["w"])
        return {**state, "w": w}, {"table": table, "sum": torch.stack([table, mask["keep"] * table])[0].sum()}

    state, metrics = step(a_state(), data(0))
    assert metrics["table"].tolist() == [1.0, 2.0, 3.0]
    metrics["table"].zero_()
    state, metrics = step(state, data(1))
    assert metrics["sum"] == 6.0
    assert state["w"].tolist() == [2.0, 1.0, 8.0]
    table.add_(1)
    with pytest.raises(
        fcg.BakedValueError, match=r"a declared constant was written(.|\n)*constants\[0\]  written 1 time"
    ):
        step(state, data(2))
    assert state.generation == 2


@pytest.mark.parametrize("lowering", ["aten", "inductor"])
def test_numbers_under_vmap(lowering):
    @fcg.graph_step(lowering=lowering)
    def step(state, x):
        return {"w": torch.func.vmap(lambda row: row * 2 + x)(state["w"])}, {}

    state = {"w": torch.arange(3.0)}
    for n in range(3):
        state, _ = step(state, torch.tensor(float(n)))
    assert state["w"].tolist() == [4.0, 12.0, 20.0]


# --- what the first call finds -----------------------------------------------------------------------------


def test_a_key_that_does_not_change_is_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    def same(state: Any, x: Tensor) -> Any:
        return {**state, "w": state["w"] + fcg.random.dropout(state["key"], x, 0.5)}, {}

    def folded(state: Any, x: Tensor) -> Any:
        key = fcg.random.fold_in(state["key"], state["n"])
        return {**state, "w": state["w"] + fcg.random.dropout(key, x, 0.5), "n": state["n"] + 1}, {}

    def split(state: Any, x: Tensor) -> Any:
        key, own = fcg.random.split(state["key"])
        return {**state, "w": state["w"] + fcg.random.dropout(own, x, 0.5), "key": key}, {}

    def folded_twice(state: Any, x: Tensor) -> Any:
        """A key that does not change may be derived from another: nothing is drawn from it."""
        key = fcg.random.fold_in(fcg.random.split(state["key"])[1], state["n"])
        return {**state, "w": state["w"] + fcg.random.dropout(key, x, 0.5), "n": state["n"] + 1}, {}

    for fn, warned in ((same, True), (folded, False), (split, False), (folded_twice, False)):
        step = fcg.graph_step(fn)
        recwarn.clear()
        step({"w": torch.zeros(4), "n": torch.tensor(0), "key": fcg.random.key(0)}, torch.ones(4))
        assert ("draws the same numbers at each call" in step.explain()) is warned
        assert [one.filename for one in recwarn] == [__file__] * warned


def test_a_first_replay_that_fails_leaves_no_capture_behind() -> None:
    step = fcg.graph_step(lambda state, done: (state, state["w"] * (1 - done)))
    state = fcg.place({"w": torch.ones(2)})
    with pytest.raises(RuntimeError, match="bool tensor is not supported") as caught:
        step(state, True)
    assert any(
        "test_graph_step.py" in note for note in getattr(caught.value, "__notes__", [str(caught.value)])
    )
    state, metric = step(state, 1.0)  # of another layout
    assert metric.tolist() == [0.0, 0.0]


def test_an_error_of_a_kernel_names_function_and_line() -> None:
    look_up = fcg.graph_fn(lambda state, i: torch.nn.functional.embedding(i, state["w"]), lowering="aten")
    state = fcg.place({"w": torch.zeros(4, 2)})
    assert look_up(state, torch.tensor([1])).shape == (1, 2)
    with pytest.raises(IndexError) as caught:
        look_up(state, torch.tensor([5]))
    note, _ = caught.value.__notes__  # then how to see all frames
    line = look_up.__wrapped__.__code__.co_firstlineno
    assert note == f"`<lambda>`: raised by its replay, at test_graph_step.py:{line}; the state is unchanged."
    assert look_up(state, torch.tensor([3])).shape == (1, 2)


def test_an_instance_that_cannot_keep_its_step_is_refused() -> None:
    class Slots:
        __slots__ = ("k",)

        @fcg.graph_step
        def step(self, state, x):
            return {"w": state["w"] + x}, {}

    class WithDict(Slots):
        __slots__ = ("__dict__",)

    class OfClass:
        @classmethod
        @fcg.graph_step
        def step(cls, state, x):
            return {"w": state["w"] + x}, {}

        @staticmethod
        @fcg.graph_step
        def fixed(state, x):
            return {"w": state["w"] + x}, {}

    for make in (lambda: Slots().step, lambda: OfClass.step):
        with pytest.raises(TypeError, match=r"has no `__dict__` to keep its step in(.|\n)*To fix"):
            make()({"w": torch.zeros(1)}, torch.ones(1))
    for make in (lambda: WithDict().step, lambda: OfClass.fixed):
        state, _ = make()({"w": torch.zeros(1)}, torch.ones(1))
        assert float(state["w"]) == 1
