"""One test per error class: the whole text of its message, and the advice under "To fix" works."""

import inspect
import os
import textwrap
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import functional_cg as fcg
from functional_cg import errors
from functional_cg.sharding.agreement import Ranks
from functional_cg.stages.run.capture import CPUBackend, _failure
from tests.exports import exports

TABLE = torch.tensor([1.0, 2.0])
LR = 0.5


def a_state() -> Any:
    return fcg.place({"w": torch.ones(2), "n": torch.zeros((), dtype=torch.int64)})


def at(function: Callable[..., Any], text: str) -> str:
    """``file:line`` of the line in `function` that contains `text`."""
    lines, first = inspect.getsourcelines(function)
    number = next(i for i, line in enumerate(lines) if text in line)
    return f"{os.path.basename(__file__)}:{first + number}"


def assert_says(
    error: type[errors.FunctionalCGError], call: Callable[[], Any], text: str, **places: str
) -> None:
    """The call raises exactly this class with exactly this text; ``{place}`` stands for a line of the test."""
    expected = textwrap.dedent(text).strip()
    for name, place in places.items():
        expected = expected.replace("{" + name + "}", place)
    with pytest.raises(error, match=r"\nDocs: help\(functional_cg\.") as caught:
        call()
    assert type(caught.value) is error
    assert str(caught.value) == expected


def test_layout_error():
    def train_step(state, batch):
        return state, {"mean": batch["x"].mean()}

    step = fcg.graph_step(train_step)
    state, _ = step(a_state(), {"x": torch.ones(8)})
    assert_says(
        fcg.LayoutError,
        lambda: step(state, {"x": torch.ones(5)}),
        """
        `train_step`: called with another layout than it was captured for (max_captures=1); the state is unchanged.
          batch['x']  expected f32[8]@cpu   got f32[5]@cpu
        A captured graph has fixed shapes, dtypes and structure.
        To fix: pad the last batch or drop it; to pay for one more graph, use `graph_step(max_captures=2)`.
        Docs: help(functional_cg.LayoutError)
        """,
    )
    state, metrics = step(state, {"x": torch.nn.functional.pad(torch.ones(5), (0, 3))})
    assert metrics["mean"] == 5 / 8
    two = fcg.graph_step(train_step, max_captures=2)
    for size in (8, 5):
        state, metrics = two(state, {"x": torch.ones(size)})
        assert metrics["mean"] == 1.0


def test_layout_error_of_a_new_state():
    def train_step(state, batch):
        return {"w": state["w"].double(), "n": state["n"]}, {}

    assert_says(
        fcg.LayoutError,
        lambda: fcg.graph_step(train_step)(a_state(), {}),
        """
        `train_step`: returns a new state that is unlike the old one.
          state['w']  expected f32[2]@cpu   got f64[2]@cpu
        The new state is written into the memory of the old one.
        To fix: begin with it in torch.float64, before the first call; or return `.to(torch.float32)` as `state['w']`; results of another kind belong in `metrics`.
        Docs: help(functional_cg.LayoutError)
        """,  # noqa: E501
    )

    def fixed(state, batch):
        return state, {"w": state["w"].double()}

    assert fcg.graph_step(fixed)(a_state(), {})[1]["w"].dtype is torch.float64


def test_donated_state_error():
    def train_step(state, batch):
        return {**state, "w": state["w"] + 1}, {}

    step, state = fcg.graph_step(train_step), a_state()
    old = fcg.snapshot(state)
    new, _ = step(state, {})
    assert_says(
        fcg.DonatedStateError,
        lambda: state["w"],
        """
        `state['w']` was used after `state` was donated to `train_step` (generation 0).
        Its buffers now hold generation 1.
        To fix: use the returned state, `state, metrics = train_step(state, batch)`, or `state.latest()`; to keep the old one, call `old = fcg.snapshot(state)` first.
        Docs: help(functional_cg.DonatedStateError)
        """,  # noqa: E501
    )
    assert new["w"].tolist() == state.latest()["w"].tolist() == [2.0, 2.0]
    assert old["w"].tolist() == [1.0, 1.0]


def test_alias_error():
    def train_step(state, batch):
        return {**state, "params": state["target"]}, {}

    step, params = fcg.graph_step(train_step), torch.ones(2)
    state = {"params": params, "target": params}
    assert_says(
        fcg.AliasError,
        lambda: step(state, {}),
        """
        `train_step`: two leaves of `state` share memory.
          state['params']  f32[2]@cpu   bytes 0 to 8
          state['target']  f32[2]@cpu   bytes 0 to 8
        Each leaf has memory of its own; shared memory would be updated twice per replay.
        To fix: copy it, `state['target'] = state['params'].clone()` (targets, EMA copies); or keep one leaf and read it twice in the loss (tied weights).
        Docs: help(functional_cg.AliasError)
        """,  # noqa: E501
    )
    state["target"] = state["params"].clone()
    new, _ = step(state, {})
    assert new["params"].tolist() == [1.0, 1.0]


def test_read_only_error():
    state = a_state()
    assert_says(
        fcg.ReadOnlyError,
        lambda: state["w"].add_(1),
        """
        `state['w']` was written to; leaves of a state are read-only.
        The state changes only by what a step returns.
        To fix: `state = state.replace(...)`, or `state = fcg.tree.at(lambda s: ..., state, value)`; for a copy of your own, `.clone()` or `fcg.snapshot(state)`.
        Docs: help(functional_cg.ReadOnlyError)
        """,  # noqa: E501
    )
    assert state["w"].clone().add_(1).tolist() == [2.0, 2.0]
    assert fcg.snapshot(state)["w"].add_(1).tolist() == [2.0, 2.0]
    state = state.replace(w=state["w"] + 1)
    state = fcg.tree.at(lambda s: s["w"], state, state["w"] + 1)
    assert state["w"].tolist() == [3.0, 3.0]


def test_read_only_error_in_a_step():
    def train_step(state, batch):
        w = state["w"]
        w += 1
        return {**state, "w": w}, {}

    assert_says(
        fcg.ReadOnlyError,
        lambda: fcg.graph_step(train_step)(a_state(), {"x": torch.ones(2)}),
        """
        `train_step`: writes in place into `state['w']`.
          aten.add_.Tensor, at {line}
        A step is a pure function: warm-up and replay would see different values than the eager run.
        To fix: compute a new tensor (`x = x + noise`) and return it in the new state.
        Docs: help(functional_cg.ReadOnlyError)
        """,
        line=at(train_step, "w += 1"),
    )

    def fixed(state, batch):
        w = state["w"]
        w = w + batch["x"]
        return {**state, "w": w}, {}

    assert fcg.graph_step(fixed)(a_state(), {"x": torch.ones(2)})[0]["w"].tolist() == [2.0, 2.0]


def test_foreign_tensor_error():
    def train_step(state, batch):
        return state, state["w"] * TABLE

    assert_says(
        fcg.ForeignTensorError,
        lambda: fcg.graph_step(train_step)(a_state(), {}),
        """
        `train_step`: reads a tensor that is in neither the state nor the inputs.
          TABLE  f32[2]@cpu in aten.mul.Tensor, at {line}
        Replay would keep reading that address after the tensor is freed or replaced.
        To fix: pass `TABLE` as an input or in the state; or declare it, `constants=(TABLE,)`.
        Docs: help(functional_cg.ForeignTensorError)
        """,
        line=at(train_step, "TABLE"),
    )

    def as_input(state, batch):
        return state, state["w"] * batch["table"]

    def in_the_state(state, batch):
        return state, state["w"] * state["table"]

    for step, state, batch in (
        (fcg.graph_step(train_step, constants=(TABLE,)), a_state(), {}),
        (fcg.graph_step(as_input), a_state(), {"table": TABLE}),
        (fcg.graph_step(in_the_state), {"w": torch.ones(2), "table": TABLE}, {}),
    ):
        assert step(state, batch)[1].tolist() == [1.0, 2.0]


def test_host_sync_error():
    def train_step(state, batch):
        loss = batch["x"].sum()
        if loss > 1:
            loss = loss / 2
        return state, {"loss": loss}

    assert_says(
        fcg.HostSyncError,
        lambda: fcg.graph_step(train_step)(a_state(), {"x": torch.ones(4)}),
        """
        `train_step`: asks for the value of a tensor on the host.
          aten._local_scalar_dense.default (from `if loss > 1:`), at {line}
        Replay repeats kernels, not Python: what is decided now would be decided for ever.
        To fix: `loss = torch.where(loss > 1, loss / 2, loss)`; or return the value in `metrics` and decide outside of the step.
        Docs: help(functional_cg.HostSyncError)
        """,  # noqa: E501
        line=at(train_step, "if loss"),
    )

    def selects(state, batch):
        loss = batch["x"].sum()
        loss = torch.where(loss > 1, loss / 2, loss)
        return state, {"loss": loss}

    def decides_outside(state, batch):
        return state, {"loss": batch["x"].sum()}

    step, state = fcg.graph_step(selects), a_state()
    outside = fcg.graph_step(decides_outside)
    for x, expected in ((torch.ones(4), 2.0), (torch.full((4,), 0.125), 0.5)):
        state, metrics = step(state, {"x": x})
        assert metrics["loss"] == expected
        state, metrics = outside(state, {"x": x})
        assert (metrics["loss"] / 2 if metrics["loss"] > 1 else metrics["loss"]) == expected


def test_baked_value_error():
    def train_step(state, batch):
        return state, batch["x"] * LR

    step = fcg.graph_step(train_step)
    state, _ = step(a_state(), {"x": torch.ones(1)})
    globals()["LR"] = 0.25
    try:
        assert_says(
            fcg.BakedValueError,
            lambda: step(state, {"x": torch.ones(1)}),
            """
            `train_step`: reads a Python value that the graph has baked in, and that has changed since; the state is unchanged.
              LR  traced 0.5   now 0.25
              first call that differs  traced t3 = aten.mul.Tensor(t2, 0.5), at test_messages.py:255   now t3 = aten.mul.Tensor(t2, 0.25), at test_messages.py:255
            Replay repeats kernels, not Python: it would go on with the old value.
            To fix: pass `LR` in the batch (a Python number in the inputs is live) or keep it in the state; if it seldom changes, make it an argument of its own and name it in `static_argnames=("LR",)`.
            Docs: help(functional_cg.BakedValueError)
            """,  # noqa: E501
        )
    finally:
        globals()["LR"] = 0.5

    def live(state, batch):
        return state, batch["x"] * batch["LR"]

    def static(state, batch, LR):
        return state, batch["x"] * LR

    live_step, static_step = fcg.graph_step(live), fcg.graph_step(static, static_argnames=("LR",))
    for rate in (0.5, 0.25):
        state, out = live_step(state, {"x": torch.ones(1), "LR": rate})
        assert out == rate
        state, out = static_step(state, {"x": torch.ones(1)}, LR=rate)
        assert out == rate
    assert (live_step.stats.traces, static_step.stats.traces) == (1, 2)


def test_implicit_randomness_error():
    def train_step(state, batch):
        x = torch.nn.functional.dropout(batch["x"], 0.5)
        return state.replace(step=state.step + 1), x

    def new_state():
        params = {"w": torch.ones(2)}
        return fcg.TrainState.create(params=params, optimizer=fcg.optim.sgd(0.1), key=fcg.random.key(0))

    assert_says(
        fcg.ImplicitRandomnessError,
        lambda: fcg.graph_step(train_step)(new_state(), {"x": torch.ones(64)}),
        """
        `train_step`: draws random numbers from a generator that is not in the state.
          aten.bernoulli_.float, at {line}
        Replay would draw from a generator that nobody manages, or the same numbers each time.
        To fix: draw from a key: `key = fcg.random.fold_in(state.key, state.step)`, then `fcg.random.dropout(key, x, p)`, `normal`, `uniform`, `bernoulli`, ...
        Docs: help(functional_cg.ImplicitRandomnessError)
        """,  # noqa: E501
        line=at(train_step, "dropout"),
    )

    def keyed(state, batch):
        key = fcg.random.fold_in(state.key, state.step)
        x = fcg.random.dropout(key, batch["x"], 0.5)
        return state.replace(step=state.step + 1), x

    step, state = fcg.graph_step(keyed), new_state()
    state, first = step(state, {"x": torch.ones(64)})
    state, second = step(state, {"x": torch.ones(64)})
    assert not torch.equal(first, second)
    assert torch.equal(first, step(new_state(), {"x": torch.ones(64)})[1])


def test_side_effect_error():
    losses = []

    def train_step(state, batch):
        loss = batch["x"].sum()
        losses.append(loss)
        return state, {}

    assert_says(
        fcg.SideEffectError,
        lambda: fcg.graph_step(train_step)(a_state(), {"x": torch.ones(2)}),
        """
        `train_step`: keeps a tensor of the step beyond its end.
          f32[]@cpu, made at {line}
        Python runs when the step is traced, not when it is replayed: what was kept would never be updated.
        To fix: return it in the metrics or in the new state instead of storing it (attribute, list, cache). A debugger keeps what it sees: use it in `train_step.eager(...)`, or with FCG_DISABLE_CAPTURE=1.
        Docs: help(functional_cg.SideEffectError)
        """,  # noqa: E501
        line=at(train_step, ".sum()"),
    )

    def returns_it(state, batch):
        return state, {"loss": batch["x"].sum()}

    step, state, kept = fcg.graph_step(returns_it), a_state(), []
    for value in (1.0, 2.0):
        state, metrics = step(state, {"x": torch.full((2,), value)})
        kept.append(metrics["loss"])
    assert torch.stack(kept).tolist() == [2.0, 4.0]


class Unspeakable(Exception):
    def __str__(self):
        raise AttributeError("code")


@pytest.mark.parametrize("error", [Unspeakable(), ValueError(Unspeakable())])
def test_an_exception_that_cannot_be_printed_is_reported_all_the_same(error):
    def train_step(state, batch):
        raise error

    with pytest.raises(fcg.CaptureError, match=r"raised \w+, .*<exception str.. failed>") as caught:
        fcg.graph_step(train_step)(a_state(), {"x": torch.ones(2)})
    assert caught.value.__cause__ is error


def test_capture_error():
    def train_step(state, batch):
        return state, batch["y"].sum()

    step = fcg.graph_step(train_step)
    assert_says(
        fcg.CaptureError,
        lambda: step(a_state(), {"x": torch.ones(2)}),
        """
        `train_step`: raised KeyError, at {line}: 'y'
        The step was being traced; nothing was launched and the state is unchanged.
        To fix: `batch` has the keys 'x': read one of them, or pass `batch['y']`, too.
        Docs: help(functional_cg.CaptureError)
        """,
        line=at(train_step, "batch["),
    )
    with pytest.raises(KeyError, match="y"):
        step.eager(a_state(), {"x": torch.ones(2)})
    assert step(a_state(), {"y": torch.ones(2)})[1] == 2.0


def test_busy_error():
    def train_step(state, batch):
        return {**state, "w": state["w"] + 1}, {}

    step, state, flags, said = fcg.graph_step(train_step), a_state(), [], []
    state, _ = step(state, {})

    def handler():  # as Python calls it between two lines of a call
        with pytest.raises(fcg.BusyError) as caught:
            state.replace(w=torch.zeros(2))
        said.append(str(caught.value))
        flags.append("zero")

    step._turn.alone(lambda: state._lease.arena.turn.alone(handler))
    (text,) = said
    assert text == (
        "a state was used in the middle of a call that is using it.\n"
        "The handler of a signal, or a finalizer, runs between two lines of that call and cannot wait for its end.\n"
        "To fix: set a flag there, and do it in the loop; reading and raising are fine.\n"
        "Docs: help(functional_cg.BusyError)"
    )
    for _ in range(2):
        if flags:
            state = state.replace(w=torch.zeros(2))
            flags.clear()
        state, _ = step(state, {})
    assert state["w"].tolist() == [2.0, 2.0]


def test_result_error():
    fails = [True]

    class Report(dict):
        pass

    def made(values, names):
        if fails[0] and type(values[0]) is torch.Tensor:
            raise ValueError("not positive")
        return Report(zip(names, values, strict=True))

    torch.utils._pytree.register_pytree_node(Report, lambda d: (list(d.values()), list(d)), made)

    def train_step(state, batch):
        return {**state, "w": state["w"] + 1}, Report(loss=batch["x"].sum())

    step, state = fcg.graph_step(train_step), a_state()
    assert_says(
        fcg.ResultError,
        lambda: step(state, {"x": torch.ones(2)}),
        """
        `train_step`: ValueError was raised where its metrics are put together.
        The call is done; its new state is `error.state`.
        To fix: let the class take whatever leaves it gets; what was computed is in `error.leaves`.
        Docs: help(functional_cg.ResultError)
        """,
    )
    state = state.latest()
    with pytest.raises(fcg.ResultError) as caught:
        step(state, {"x": torch.ones(2)})
    assert [leaf.item() for leaf in caught.value.leaves] == [2.0]
    fails[0] = False
    state, metrics = step(caught.value.state, {"x": torch.ones(2)})
    assert metrics["loss"] == 2.0
    assert state["w"].tolist() == [4.0, 4.0]


def test_closed_error():
    def train_step(state, batch):
        return {**state, "w": state["w"] + 1}, {}

    step, state = fcg.graph_step(train_step), a_state()
    state, _ = step(state, {})
    step.close()
    assert_says(
        fcg.ClosedError,
        lambda: step(state, {}),
        """
        `train_step`: called after `close()`.
        Its captures and their memory are gone; states are still valid.
        To fix: make a new step, `graph_step(fn)`.
        Docs: help(functional_cg.ClosedError)
        """,
    )
    state, _ = fcg.graph_step(train_step)(state, {})
    assert state["w"].tolist() == [3.0, 3.0]


def test_stream_error():
    """No step on the CPU has streams to lose: what the driver says is told from other failures."""

    class Failing(CPUBackend):
        def capture(self, *args: Any) -> Any:
            raise _failure(RuntimeError("CUDA error: capturing stream has unjoined work\nCompile with ..."))

    def train_step(state, batch):
        return state, {}

    state = a_state()
    assert_says(
        fcg.StreamError,
        lambda: fcg.graph_step(train_step, backend=Failing())(state, {}),
        """
        `train_step`: capture failed: RuntimeError: CUDA error: capturing stream has unjoined work.
        An operation of the step works on a stream of its own, which is no part of the graph.
        To fix: in that operation, join what it forks, `torch.cuda.current_stream().wait_stream(side)`, and wait for work from outside before the step.
        Docs: help(functional_cg.StreamError)
        """,  # noqa: E501
    )
    assert type(_failure(RuntimeError("CUDA error: invalid argument"))) is fcg.CaptureError
    fcg.graph_step(train_step)(state, {})


def test_miscompile_error():
    """A compiler that sums over the other axis; the advice runs the same step as it is."""

    def total(state, x):
        return {**state, "w": state["w"] + x.sum(0)}, {"n": state["n"] + 1}

    def compiler(graph, inputs):
        (node,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.sum.dim_IntList)
        node.args = (node.args[0], [1])
        graph.recompile()
        return graph

    state, x = a_state(), torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    assert_says(
        fcg.MiscompileError,
        lambda: fcg.graph_step(total, lowering=compiler)(state, x),
        """
        `total`: what the compiler made of it computes something else; the state is unchanged.
          state['w']  differs by 1, of which rounding explains 1.91e-06, computed at {line}
        Before the first call changes the state, the compiled step is compared with its calls, run one by one.
        To fix: `lowering="aten"` runs these calls as they are; please report it, with the step.
        Docs: help(functional_cg.MiscompileError)
        """,
        line=at(total, "x.sum(0)"),
    )
    assert state.generation == 0
    state, _ = fcg.graph_step(total, lowering="aten")(state, x)
    assert state["w"].tolist() == [5.0, 8.0]


def test_asleep_error():
    @fcg.graph_step
    def step(state, x):
        return {"w": state["w"] + x}, {}

    state = fcg.sleep(fcg.place({"w": torch.zeros(2)}, can_sleep=True))
    assert_says(
        fcg.AsleepError,
        lambda: step(state, torch.ones(2)),
        """
        `step`: `state` was used while it is asleep.
        Its values are in host memory, and its own memory may belong to somebody else.
        To fix: `state = fcg.wake(state)` first.
        Docs: help(functional_cg.AsleepError)
        """,
    )
    state = fcg.wake(state)
    assert step(state, torch.ones(2))[0]["w"].tolist() == [1, 1]


def test_rank_error():
    """One of two ranks calls; ``tests/sharding`` has processes, and the rest of the advice."""
    ranks = Ranks.over(dist.HashStore(), 0, 2, 0.1)
    assert_says(
        fcg.RankError,
        lambda: ranks.agree("sample", "capture `sample`\nx  f32[2]"),
        """
        `sample`: waited 0.1 s for rank 1, on rank 0 of 2.
          rank 0 is about to capture `sample`
        A function over a sharded state is collective: all ranks call it, in the same order.
        To fix: call it on all ranks and use its result on one, `out = sample(state)`, `if rank == 0: show(out)`.
        Docs: help(functional_cg.RankError)
        """,
    )
    store = dist.HashStore()
    both = [Ranks.over(store, rank, 2, 10.0) for rank in range(2)]
    other = threading.Thread(target=both[1].agree, args=("sample", "capture `sample`"))
    other.start()
    both[0].agree("sample", "capture `sample`")
    other.join()


# -- all classes ------------------------------------------------------------------------------------------------

CLASSES = [getattr(errors, name) for name in exports(errors) if name != "FunctionalCGError"]


@pytest.mark.parametrize("error", CLASSES)
def test_each_class_has_a_message_test_and_a_manual_page(error):
    words = "".join("_" + letter.lower() if letter.isupper() else letter for letter in error.__name__)
    assert f"test{words}" in globals()
    assert issubclass(error, fcg.FunctionalCGError)
    assert issubclass(error, ValueError | RuntimeError)
    assert not issubclass(error, TypeError)  # `leaf += 1` would rebind in silence
    assert getattr(fcg, error.__name__) is error
    page = inspect.getdoc(error) or ""
    assert "Docs: help(functional_cg." + error.__name__ + ")" in str(error.of("", "is wrong."))
    assert 5 <= len(page.splitlines()) <= 20
    assert "``" in page  # the rewrite


def test_template_shows_five_rows():
    error = fcg.LayoutError.of(
        "f", "is wrong.", rows=[f"row {i}" for i in range(7)], why="So.", fix="change it."
    )
    assert str(error) == (
        "`f`: is wrong.\n  row 0\n  row 1\n  row 2\n  row 3\n  row 4\n  … and 2 more\nSo.\n"
        "To fix: change it.\nDocs: help(functional_cg.LayoutError)"
    )
