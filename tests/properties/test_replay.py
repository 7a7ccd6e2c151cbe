"""Laws of replay, on the CPU backend and on the simulator: a captured step gives what the pure function gives."""

from __future__ import annotations

import gc
import itertools
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument

import functional_cg as fcg
from functional_cg import tree
from functional_cg.testing import (
    Simulator,
    assert_no_alias,
    assert_pure,
    assert_replay_equals_eager,
    assert_trees_all_close,
    assert_trees_all_equal,
)
from functional_cg.testing import strategies as fst
from tests.shares import CALLS

BACKENDS = {"cpu": lambda: "auto", "simulator": Simulator}

on_both_backends = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS.keys())


def batches(calls: int = CALLS) -> list[torch.Tensor]:
    """New data for each call."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 3, generator=generator) for _ in range(calls)]


def train_state(**fields: Any) -> Any:
    """A small training state with everything a step can have: momentum, counters, a key."""
    return fcg.TrainState.create(
        params={"w": torch.linspace(-1, 1, 6).reshape(3, 2), "b": torch.zeros(2)},
        optimizer=fcg.optim.chain(
            fcg.optim.clip_by_global_norm(1.0),
            fcg.optim.adamw(fcg.optim.warmup_cosine(0.1, 3, 20), weight_decay=0.01),
        ),
        key=fcg.random.key(0),
        **fields,
    )


def train(state: Any, x: torch.Tensor) -> Any:
    key = fcg.random.fold_in(state.key, state.step)

    def loss_fn(params: Any) -> torch.Tensor:
        hidden = fcg.random.dropout(key, x @ params["w"] + params["b"], 0.25)
        return torch.tanh(hidden).square().mean()

    loss, grads = fcg.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads), {"loss": loss, "grads": grads}


def living_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())


def poison(backend: Any) -> None:
    """Overwrite what lives in captures between calls, where the backend can."""
    if isinstance(backend, Simulator):
        backend.poison()


# -- replay = eager -----------------------------------------------------------------------------------------------


@on_both_backends
@given(data=st.data())
def test_replay_equals_eager_for_random_programs(backend: Callable[[], Any], data: st.DataObject) -> None:
    program = data.draw(fst.step_fns())
    few = data.draw(fst.inputs(program.x, 4))
    numbers = range(CALLS)
    inputs = [few[n % 4].mul(1 + n // 4) for n in numbers]  # new data at each call
    step = fcg.graph_step(program, backend=backend())
    assert_replay_equals_eager(step, program.state, inputs)
    assert (step.stats.traces, step.stats.captures) == (1, 1)


@on_both_backends
def test_replay_equals_eager_for_training(backend: Callable[[], Any]) -> None:
    assert_replay_equals_eager(fcg.graph_step(train, backend=backend()), train_state(), batches())


OPTIMIZERS = {
    "sgd": fcg.optim.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": fcg.optim.adam(fcg.optim.linear(0.1, 0.0, 20)),
    "masked": fcg.optim.adamw(0.1, weight_decay=0.1, mask=lambda p: tree.map(lambda leaf: leaf.dim() > 1, p)),
    "adagrad": fcg.optim.adagrad(0.1),
    "lamb": fcg.optim.lamb(0.1, weight_decay=0.01),
    "yogi": fcg.optim.yogi(0.1),
    "flat": fcg.optim.flatten(
        fcg.optim.chain(fcg.optim.clip_by_global_norm(0.5), fcg.optim.adamw(0.1, weight_decay=0.1))
    ),
}


@on_both_backends
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_replay_equals_eager_for_every_optimizer(backend: Callable[[], Any], optimizer: Any) -> None:
    """Fused updates write their slots in place; the metrics are the leaves before, which they must not touch."""
    state = fcg.TrainState.create(
        params={"w": torch.linspace(-1, 1, 6).reshape(3, 2), "b": torch.zeros(2)}, optimizer=optimizer
    )

    def step(state: Any, x: torch.Tensor) -> Any:
        grads = fcg.grad(lambda p: torch.tanh(x @ p["w"] + p["b"]).square().mean())(state.params)
        new = state.apply_gradients(grads)
        return new, {"before": state.params, "after": new.params, "same": state.params["w"].T, "grads": grads}

    assert_replay_equals_eager(fcg.graph_step(step, backend=backend()), state, batches())


@on_both_backends
def test_literals_and_constants_live_as_long_as_the_capture(backend: Callable[[], Any]) -> None:
    """The literals and constants that a capture reads are its own: they outlive what the caller held."""
    table = torch.arange(12.0).reshape(4, 3)

    def step(state: Any, i: torch.Tensor) -> Any:
        return {"w": state["w"] + table.index_select(0, i[None])[0] * torch.tensor([1.0, 2.0, 3.0])}, {}

    assert_replay_equals_eager(
        fcg.graph_step(step, constants=(table,), backend=backend()),
        {"w": torch.zeros(3)},
        [torch.tensor(n % 4) for n in range(CALLS)],
    )


def test_the_python_body_runs_at_trace_time_only() -> None:
    """Counted from outside: no call of the user's code object while the step replays."""
    entered = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal entered
        entered += event == "call" and frame.f_code is train.__code__

    step = fcg.graph_step(train)
    state, _ = step(train_state(), batches()[0])
    sys.setprofile(count)
    try:
        for x in batches():
            state, _ = step(state, x)
        replayed = entered
        state, _ = step.eager(state, batches()[0])
    finally:
        sys.setprofile(None)
    assert replayed == 0
    assert entered == 1  # the counter counts
    assert (step.stats.replays, step.stats.eager_calls) == (CALLS + 1, 1)


@on_both_backends
def test_call_n_is_n_updates(backend: Callable[[], Any]) -> None:
    """Warm-up leaves no trace: neither in counters nor in running statistics."""

    def step(state: Any, x: torch.Tensor) -> Any:
        mean = state["mean"].lerp(x.mean(0), 0.1)
        return {"count": state["count"] + 1, "mean": mean, "seen": state["seen"] | (x > 0).any()}, {
            "count": state["count"]
        }

    state: Any = {"count": torch.tensor(0), "mean": torch.zeros(3), "seen": torch.tensor(data=False)}
    mean = torch.zeros(3)
    captured = fcg.graph_step(step, backend=backend())
    for n, x in enumerate(batches()):
        state, metrics = captured(state, x)
        mean = mean.lerp(x.mean(0), 0.1)
        assert metrics["count"].item() == n
        assert_trees_all_equal(
            state, {"count": torch.tensor(n + 1), "mean": mean, "seen": torch.tensor(data=True)}, f"call {n}"
        )


@on_both_backends
def test_bias_correction_and_schedule_move_with_the_count(backend: Callable[[], Any]) -> None:
    """AdamW under a schedule equals torch.optim.AdamW with a learning rate set by hand at each step."""
    schedule = fcg.optim.warmup_cosine(0.1, 3, 20)
    w = torch.nn.Parameter(torch.linspace(-1, 1, 3))
    judge = torch.optim.AdamW([w], lr=1.0, weight_decay=0.01)
    state: Any = fcg.TrainState.create(
        params={"w": w.detach()}, optimizer=fcg.optim.adamw(schedule, weight_decay=0.01)
    )

    @fcg.graph_step(backend=backend())
    def step(state: Any, x: torch.Tensor) -> Any:
        loss, grads = fcg.value_and_grad(lambda p: (x @ p["w"]).square().mean())(state.params)
        return state.apply_gradients(grads), {"loss": loss}

    for n, x in enumerate(batches(20)):
        state, _ = step(state, x)
        judge.param_groups[0]["lr"] = schedule(n)
        judge.zero_grad()
        (x @ w).square().mean().backward()
        judge.step()
        # The schedule is computed in float32 on the device and in float64 on the host.
        assert_trees_all_close(state.params, {"w": w.detach()}, rtol=1e-5, atol=1e-6, name=f"call {n}")


# -- commit -------------------------------------------------------------------------------------------------------


@on_both_backends
def test_commit_is_parallel(backend: Callable[[], Any]) -> None:
    """Swap and rotate: after each call every leaf has the value that its source had before."""

    def step(state: Any, x: torch.Tensor) -> Any:
        a, b = state["pair"]
        p, q, r = state["ring"]
        return {"pair": (b, a), "ring": [q, r, p + x], "mirror": state["mirror"].T}, {}

    pair = (torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
    ring = [torch.tensor(1.0), torch.tensor(2.0), torch.tensor(3.0)]
    mirror = torch.arange(9.0).reshape(3, 3)
    state: Any = {"pair": pair, "ring": ring, "mirror": mirror}
    captured = fcg.graph_step(step, backend=backend())
    for n in range(8):
        x = torch.tensor(10.0 * (n + 1))
        state, _ = captured(state, x)
        pair, mirror = pair[::-1], mirror.T
        ring = [ring[1], ring[2], ring[0] + x]
        assert_trees_all_equal(state, {"pair": pair, "ring": ring, "mirror": mirror}, f"call {n}")


@on_both_backends
@given(order=st.permutations(range(5)))
def test_any_permutation_of_leaves_commits_in_parallel(backend: Callable[[], Any], order: list[int]) -> None:
    values = [torch.full((2,), float(n)) for n in range(5)]
    step = fcg.graph_step(lambda s, x: ([s[i] for i in order], {"x": x}), backend=backend())
    state: Any = values
    for n in range(8):
        state, _ = step(state, torch.zeros(1))
        values = [values[i] for i in order]
        assert_trees_all_equal(state, values, f"call {n}")


@on_both_backends
def test_one_tensor_returned_in_two_places_fills_both(backend: Callable[[], Any]) -> None:
    def step(state: Any, x: torch.Tensor) -> Any:
        new = state["a"] + x
        return {"a": new, "b": new}, {"new": new, "again": new, "view": new[:1]}

    state: Any = {"a": torch.zeros(2), "b": torch.ones(2)}
    captured = fcg.graph_step(step, backend=backend())
    for n in range(1, 5):
        state, metrics = captured(state, torch.ones(2))
        value = torch.full((2,), float(n))
        assert_trees_all_equal(state, {"a": value, "b": value})
        assert_trees_all_equal(metrics, {"new": value, "again": value, "view": value[:1]})
        assert_no_alias(metrics, state)
    state = fcg.tree.at(lambda s: s["a"], state, torch.zeros(2))
    assert state["b"].tolist() == [4.0, 4.0]  # the slots are two


# -- donation -----------------------------------------------------------------------------------------------------


@on_both_backends
@given(data=st.data())
def test_a_donated_state_and_its_leaves_are_loud(backend: Callable[[], Any], data: st.DataObject) -> None:
    program = data.draw(fst.step_fns(max_operations=4))
    step = fcg.graph_step(program, backend=backend())
    state = fcg.place(program.state)
    for _ in range(3):
        old, leaves = state, tree.leaves(state)
        state, _ = step(state, program.x)
        before = fcg.snapshot(state)
        for use in (fcg.snapshot, lambda s: s["key"], lambda s: step(s, program.x)):
            with pytest.raises(fcg.DonatedStateError, match="donated"):
                use(old)
        for leaf in leaves:
            with pytest.raises(fcg.DonatedStateError, match="donated"):
                leaf + leaf
        assert_trees_all_equal(state, before, "state")


@on_both_backends
def test_an_old_state_never_shows_new_values(backend: Callable[[], Any]) -> None:
    """Either an error or the old value: for the handle, for a leaf and for a view of a leaf taken earlier."""
    step = fcg.graph_step(lambda s, x: ({"w": s["w"] + x}, {}), backend=backend())
    state = fcg.place({"w": torch.zeros(2)})
    leaf, view, total = state["w"], state["w"][:1], state["w"].sum()
    new, _ = step(state, torch.ones(2))
    for use in (
        lambda: state["w"],
        lambda: leaf.tolist(),
        lambda: view + 0,
        lambda: step(state, torch.ones(2)),
    ):
        with pytest.raises(fcg.DonatedStateError, match="donated"):
            use()
    assert total.item() == 0
    assert new["w"].tolist() == [1.0, 1.0]


# -- layout -------------------------------------------------------------------------------------------------------

SHAPE = (4, 1, 3)


def broadcastable(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Every other shape that broadcasts to ``shape``, or that it broadcasts to, with up to one more dimension."""
    sides = [(1, n) if n > 1 else (1, 2) for n in shape]
    tails = [tail for k in range(len(shape) + 1) for tail in itertools.product(*sides[k:])]
    more = [(*(1,) * (len(shape) + 1 - len(tail)), *tail) for tail in tails]
    return sorted({*tails, *more, (2, *shape)} - {shape})


@pytest.fixture(scope="module")
def strict_step() -> Any:
    return fcg.graph_step(lambda s, x: ({"w": s["w"] + x.sum()}, {"x": x}), backend=Simulator())


@pytest.mark.parametrize("shape", broadcastable(SHAPE), ids=str)
def test_a_broadcastable_shape_is_refused(strict_step: Any, shape: tuple[int, ...]) -> None:
    state, _ = strict_step({"w": torch.zeros(())}, torch.ones(SHAPE))
    with pytest.raises(fcg.LayoutError, match=r"x  expected f32\[4,1,3\]"):
        strict_step(state, torch.ones(shape))
    state, metrics = strict_step(state, 2 * torch.ones(SHAPE))  # the state is still valid, a right call works
    assert state["w"].item() == 36
    assert torch.equal(metrics["x"], 2 * torch.ones(SHAPE))


OTHER_DTYPES = (
    torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
    torch.bool, torch.complex64,
)  # fmt: skip


@pytest.mark.parametrize("dtype", OTHER_DTYPES, ids=str)
def test_another_dtype_is_refused(strict_step: Any, dtype: torch.dtype) -> None:
    state, _ = strict_step({"w": torch.zeros(())}, torch.ones(SHAPE))
    with pytest.raises(fcg.LayoutError, match=r"x  expected f32\[4,1,3\]"):
        strict_step(state, torch.ones(SHAPE, dtype=dtype))
    state, _ = strict_step(state, torch.ones(SHAPE))
    assert state["w"].item() == 24


@pytest.mark.parametrize("dtype", OTHER_DTYPES, ids=str)
def test_a_state_of_another_dtype_is_refused(dtype: torch.dtype) -> None:
    step = fcg.graph_step(lambda s, x: ({"w": s["w"]}, {"x": x}), backend=Simulator())
    state, _ = step({"w": torch.zeros(2)}, torch.ones(1))
    with pytest.raises(fcg.LayoutError, match=r"s\['w'\]  expected f32\[2\]"):
        step({"w": torch.zeros(2, dtype=dtype)}, torch.ones(1))
    assert state["w"].tolist() == [0.0, 0.0]


@given(x=fst.like(torch.zeros(SHAPE)))
def test_strides_and_offsets_do_not_matter(strict_step: Any, x: torch.Tensor) -> None:
    _, metrics = strict_step({"w": torch.zeros(())}, x)
    assert torch.equal(metrics["x"], x)


def test_one_address_with_other_strides_is_read_anew(strict_step: Any) -> None:
    """The same memory handed in twice, transposed and then written by the caller: each call reads what is there."""
    step = fcg.graph_step(lambda s, x: (s, {"x": x * 1}), backend=Simulator())
    buffer = torch.arange(9.0).reshape(3, 3)
    state, metrics = step({"w": torch.zeros(1)}, buffer)
    assert torch.equal(metrics["x"], torch.arange(9.0).reshape(3, 3))
    state, metrics = step(state, buffer.T)
    assert torch.equal(metrics["x"], torch.arange(9.0).reshape(3, 3).T)
    buffer.fill_(7)
    state, metrics = step(state, buffer)
    assert torch.equal(metrics["x"], torch.full((3, 3), 7.0))


# -- many states, many steps --------------------------------------------------------------------------------------


@on_both_backends
def test_accumulation_over_calls_is_the_sum_in_order(backend: Callable[[], Any]) -> None:
    """Accumulate and apply steps share one arena; three micro-batches a step, gradients added in order."""
    sim = backend()

    @fcg.graph_step(backend=sim)
    def accumulate(state: Any, x: torch.Tensor) -> Any:
        loss, grads = fcg.value_and_grad(lambda p: (x @ p["w"] + p["b"]).square().mean())(state.params)
        return state.replace(grads=tree.map(torch.add, state.grads, grads)), {"loss": loss}

    @fcg.graph_step(backend=sim)
    def apply(state: Any) -> Any:
        new = state.apply_gradients(state.grads)
        return new.replace(grads=tree.map(torch.zeros_like, state.grads)), {}

    state = train_state(accumulate=True)
    w, b = (torch.nn.Parameter(state.params[name] + 0) for name in "wb")
    for n, x in enumerate(batches(9)):
        for parameter, name in ((w, "w"), (b, "b")):
            with torch.no_grad():
                parameter.copy_(state.params[name])
        (x @ w + b).square().mean().backward()  # adds to .grad in the same order
        state, _ = accumulate(state, x)
        poison(sim)
        assert_trees_all_equal(state.grads, {"b": b.grad, "w": w.grad}, f"call {n}: grads")
        if n % 3 == 2:
            state, _ = apply(state)
            w.grad = b.grad = None
            assert not any(leaf.any() for leaf in tree.leaves(state.grads))
    assert state.step.item() == 3
    assert (accumulate.stats.captures, apply.stats.captures) == (1, 1)  # one arena


@on_both_backends
def test_evaluation_between_steps_changes_nothing(backend: Callable[[], Any]) -> None:
    sim = backend()
    step = fcg.graph_step(train, backend=sim)
    evaluate = fcg.graph_fn(lambda s, x: {"out": x @ s.params["w"], "w": s.params["w"]}, backend=sim)
    plain, mixed = train_state(), train_state()
    for n, x in enumerate(batches()):
        plain, expected = step(plain, x)
        mixed, metrics = step(mixed, x)
        generation = mixed.generation
        out = evaluate(mixed, x)
        assert torch.equal(out["out"], x @ (mixed.params["w"] + 0))
        assert mixed.generation == generation
        assert_trees_all_equal((mixed, metrics), (plain, expected), f"call {n}")
    assert evaluate.stats.captures == 1


@on_both_backends
def test_forks_stepped_in_turn_equal_separate_runs(backend: Callable[[], Any]) -> None:
    data = batches()
    alone = []
    for xs in (data, data[::-1]):
        step, state = fcg.graph_step(train, backend=backend()), train_state()
        for x in xs:
            state, _ = step(state, x)
        alone.append(fcg.snapshot(state))
    step, left = fcg.graph_step(train, backend=backend()), train_state()
    right = fcg.fork(left)
    for x, y in zip(data, data[::-1], strict=True):
        left, _ = step(left, x)
        right, _ = step(right, y)
    assert_trees_all_equal((left, right), tuple(alone), "forks")
    assert (step.stats.traces, step.stats.captures) == (1, 2)


@on_both_backends
def test_two_trainers_interleaved_equal_separate_runs(backend: Callable[[], Any]) -> None:
    class Trainer:
        def __init__(self, rate: float) -> None:
            self.state: Any = fcg.TrainState.create(
                params={"w": torch.linspace(-1, 1, 6).reshape(3, 2)}, optimizer=fcg.optim.sgd(rate)
            )

        @fcg.graph_step(backend=backend())
        def step(self, state: Any, x: torch.Tensor) -> Any:
            loss, grads = fcg.value_and_grad(lambda p: (x @ p["w"]).square().mean())(state.params)
            return state.apply_gradients(grads), {"loss": loss}

        def run(self, x: torch.Tensor) -> None:
            self.state, self.metrics = self.step(self.state, x)

    alone = [Trainer(rate) for rate in (0.1, 0.01)]
    for trainer in alone:
        for x in batches():
            trainer.run(x)
    together = [Trainer(rate) for rate in (0.1, 0.01)]
    for x in batches():
        for trainer in together:
            trainer.run(x)
    for one, other in zip(alone, together, strict=True):
        assert_trees_all_equal((other.state, other.metrics), (one.state, one.metrics), "trainer")


def test_a_thousand_fresh_trees_cost_one_trace_and_flat_memory() -> None:
    step = fcg.graph_step(lambda s, x: ({"w": s["w"] + x, "n": s["n"] + 1}, {"sum": s["w"].sum()}))
    x = torch.ones(64)
    tensors = 0
    for n in range(1000):
        mine = {"w": torch.full((64,), float(n)), "n": torch.tensor(n)}
        state, metrics = step(mine, x)
        assert metrics["sum"].item() == 64 * n
        assert state["w"][0].item() == mine["w"][0].item() + 1 == n + 1
        if n == 9:
            tensors = living_tensors()
    assert living_tensors() <= tensors
    assert step.stats.traces == 1
    assert step.stats.captures <= 2


@on_both_backends
def test_fresh_trees_never_take_an_arena_that_is_in_use(backend: Callable[[], Any]) -> None:
    """Two steps have captured one arena whose state is gone: both would like to take it over."""
    sim = backend()
    steps = [fcg.graph_step(lambda s, x: ({"w": s["w"] + x}, {}), backend=sim) for _ in range(2)]
    x = torch.ones(2)
    state: Any = {"w": torch.zeros(2)}
    for step in steps:
        state, _ = step(state, x)
    del state
    first, _ = steps[0]({"w": torch.zeros(2)}, x)
    second, _ = steps[1]({"w": torch.full((2,), 100.0)}, x)
    assert (first["w"].tolist(), second["w"].tolist()) == ([1.0, 1.0], [101.0, 101.0])
    assert_no_alias(first, second)


@on_both_backends
def test_a_fresh_tree_waits_for_its_own_arena_not_for_that_of_a_second_state(
    backend: Callable[[], Any],
) -> None:
    step = fcg.graph_step(lambda s, t, x: ({"w": s["w"] + t["w"]}, {}), backend=backend())
    teacher = fcg.place({"w": torch.ones(2)})
    student, _ = step({"w": torch.zeros(2)}, teacher, torch.ones(1))
    teacher = fcg.place({"w": torch.full((2,), 2.0)})  # the first teacher is gone, its student is not
    other, _ = step({"w": torch.full((2,), 100.0)}, teacher, torch.ones(1))
    assert (student["w"].tolist(), other["w"].tolist()) == ([1.0, 1.0], [102.0, 102.0])


# -- the laws catch planted bugs ----------------------------------------------------------------------------------


def test_the_replay_law_catches_a_frozen_value() -> None:
    values = iter(range(1000))

    class Frozen:
        """A backend that replays what the first call gave."""

        name = "frozen"

        def capture(self, plan: Any, buffers: Any, scratch: Any) -> Any:
            run = plan.bind(buffers)

            class Replay:
                fresh = True
                first: Any = None

                def __call__(self, before: Any) -> Any:
                    out = run(before)
                    self.first = self.first or out
                    return [value.clone() for value in self.first]

                def close(self) -> None:
                    pass

            return Replay()

    step = fcg.graph_step(lambda s, x: ({"w": s["w"] + x}, {"m": x.sum()}), backend=Frozen())
    assert next(values) == 0
    with pytest.raises(AssertionError, match=r"call 2 of 4: replay differs from eager at metrics\['m'\]"):
        assert_replay_equals_eager(step, {"w": torch.zeros(4, 3)}, batches(4))


def test_the_replay_law_catches_a_step_that_runs_eagerly() -> None:
    step = fcg.graph_step(lambda s, x: ({"w": s["w"] + x}, {}), backend="eager")
    with pytest.raises(AssertionError, match="call 1 of 4 did not replay"):
        assert_replay_equals_eager(step, {"w": torch.zeros(4, 3)}, batches(4))


def test_the_replay_law_has_a_tolerance_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """An oracle that is off by 1e-4 in one leaf, which is what a compiler's other order of arithmetic could do."""
    step = fcg.graph_step(lambda s, x: ({"w": s["w"] + 0 * x, "n": s["n"] + 1}, {}))
    state: Any = {"w": torch.ones(4, 3), "n": torch.tensor(0)}
    eager = step.eager

    def off(s: Any, x: torch.Tensor) -> Any:
        new, metrics = eager(s, x)
        return new.replace(w=torch.full((4, 3), 1 + 1e-4)), metrics

    monkeypatch.setattr(step, "eager", off)
    with pytest.raises(AssertionError, match=r"call 1 of 1.*\['w'\](.|\n)*greatest difference 0.0001"):
        assert_replay_equals_eager(step, state, batches(1))
    assert_replay_equals_eager(step, state, batches(1), rtol=2e-4)
    with pytest.raises(AssertionError, match=r"\['w'\]"):
        assert_replay_equals_eager(step, state, batches(1), rtol=5e-5)
    monkeypatch.setattr(step, "eager", lambda s, x: (eager(s, x)[0].replace(n=torch.tensor(2)), {}))
    with pytest.raises(AssertionError, match=r"\['n'\]"):
        assert_replay_equals_eager(step, state, batches(1), rtol=10.0)  # counters have no tolerance


def test_the_purity_law_passes_a_pure_step_and_catches_impure_ones() -> None:
    state = {"w": torch.zeros(4, 3)}
    assert_pure(lambda s, x: ({"w": s["w"] + x}, {}), state, batches(1)[0])
    counter = itertools.count()

    def counts(s: Any, x: torch.Tensor) -> Any:
        return {"w": s["w"] + next(counter)}, {}

    def writes(s: Any, x: torch.Tensor) -> Any:
        return {"w": s["w"].add_(x)}, {}

    outside = torch.ones(3)
    for impure, said in (
        (counts, "two traces"),
        (writes, "writes in place"),
        (lambda s, x: (s, {"o": outside * x}), "reads"),
    ):
        with pytest.raises(AssertionError, match=said):
            assert_pure(impure, state, batches(1)[0])


def test_the_purity_law_catches_what_only_values_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host number that moves between eager runs only."""
    step = fcg.graph_step(lambda s, x: ({"w": s["w"] + x}, {}))
    runs = itertools.count()
    eager = step.eager
    monkeypatch.setattr(step, "eager", lambda s, x: eager(s, x + next(runs)))
    with pytest.raises(AssertionError, match=r"two runs from equal arguments differ at result\[0\]\['w'\]"):
        assert_pure(step, {"w": torch.zeros(4, 3)}, batches(1)[0])


def test_the_alias_law_catches_views_and_twins() -> None:
    base = torch.arange(4.0)
    assert_no_alias({"a": base, "b": base.clone()}, [torch.zeros(0), torch.zeros(0)])
    with pytest.raises(AssertionError, match=r"trees\[0\]\['a'\](.|\n)*trees\[0\]\['b'\]"):
        assert_no_alias({"a": base, "b": base[1:]})
    with pytest.raises(AssertionError, match="share one storage"):
        assert_no_alias({"a": base[:2]}, {"b": base[2:]})
    with pytest.raises(AssertionError, match="overlaps itself"):
        assert_no_alias(base.expand(2, 4))
    state = fcg.place({"a": torch.zeros(2), "b": torch.zeros(2)})
    assert_no_alias(state, fcg.snapshot(state))
    with pytest.raises(AssertionError, match="share memory"):
        assert_no_alias(state, state)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"a": torch.tensor([1.0, 2.5])}, r"tree\['a'\](.|\n)*greatest difference 0.5"),
        ({"a": torch.tensor([1, 2])}, r"tree\['a'\](.|\n)*i64\[2\]"),
        ({"a": torch.tensor([[1.0, 2.0]])}, r"tree\['a'\](.|\n)*f32\[1,2\]"),
        ({"b": torch.tensor([1.0, 2.0])}, "structures differ"),
        ({"a": [1.0, 2.0]}, "structures differ"),
        ({"a": None}, "structures differ"),
    ],
    ids=["value", "dtype", "shape", "key", "list", "none"],
)
def test_tree_equality_is_strict(other: Any, said: str) -> None:
    mine = {"a": torch.tensor([1.0, 2.0])}
    assert_trees_all_equal(mine, {"a": torch.tensor([1.0, 2.0])})
    with pytest.raises(AssertionError, match=said):
        assert_trees_all_equal(other, mine)


def test_tree_equality_is_of_bits() -> None:
    assert_trees_all_equal([torch.tensor(torch.nan)], [torch.tensor(torch.nan)])
    with pytest.raises(AssertionError, match=r"tree\[0\]"):
        assert_trees_all_equal([torch.tensor(0.0)], [torch.tensor(-0.0)])


def test_tree_closeness_has_a_limit() -> None:
    mine = {"a": torch.tensor([1.0]), "n": 3}
    assert_trees_all_close({"a": torch.tensor([1.0 + 1e-6]), "n": 3}, mine)
    for wrong in (
        {"a": torch.tensor([1.1]), "n": 3}, {"a": torch.tensor([1.0]), "n": 4}, {"a": torch.tensor([1.0])},
        {"a": torch.tensor([1.0], dtype=torch.float64), "n": 3}, {"a": torch.tensor([torch.nan]), "n": 3},
    ):  # fmt: skip
        with pytest.raises(AssertionError, match="tree"):
            assert_trees_all_close(wrong, mine)
    with pytest.raises(AssertionError, match="tree"):
        assert_trees_all_close({"a": torch.tensor([1.0 + 1e-6]), "n": 3}, mine, rtol=0, atol=0)


# -- the simulator ------------------------------------------------------------------------------------------------


def test_the_simulator_overwrites_what_lives_in_the_pool() -> None:
    """A step that reads a temporary of the call before finds no number there."""
    sim = Simulator()
    kept: list[torch.Tensor] = []

    class Leaky:
        """A plan that keeps a temporary of its first run and returns it for ever."""

        name = "leaky"

        def capture(self, plan: Any, buffers: Any, scratch: Any) -> Any:
            replay = sim.capture(plan, buffers, scratch)
            call = replay.__call__

            class Replay:
                fresh = True

                def __call__(self, before: Any) -> Any:
                    kept[:] = kept or list(call(before))
                    return kept

                close = replay.close

            return Replay()

    step = fcg.graph_step(lambda s, x: (s, {"f": x * 2, "i": x.long(), "b": x > 0}), backend=Leaky())
    _, metrics = step({"w": torch.zeros(1)}, torch.ones(3))
    values = fcg.snapshot(metrics)
    sim.poison()
    assert metrics["f"].isnan().all()
    assert not (metrics["i"] == values["i"]).any()
    assert not (metrics["b"] == values["b"]).any()


def test_the_simulator_warms_up_on_scratch_memory() -> None:
    """It runs the plan before recording, as CUDA does, but not on the state."""
    writes: list[bool] = []
    sim = Simulator()

    class Watched:
        name = "watched"

        def capture(self, plan: Any, buffers: Any, scratch: Any) -> Any:
            def watched() -> Any:
                warm = scratch()
                writes.append(any(a is b for a, b in zip(warm.slots, buffers.slots, strict=True)))
                return warm

            before = [slot.clone() for slot in buffers.slots]
            replay = sim.capture(plan, buffers, watched)
            assert_trees_all_equal(list(buffers.slots), before)
            return replay

    step = fcg.graph_step(lambda s, x: ({"w": s["w"] + x}, {}), backend=Watched())
    state, _ = step({"w": torch.zeros(2)}, torch.ones(2))
    assert state["w"].tolist() == [1.0, 1.0]
    assert writes == [False]


def test_the_simulator_refuses_compiled_plans() -> None:
    step = fcg.graph_step(
        lambda s, x: ({"w": s["w"] + x}, {}), backend=Simulator(), lowering=lambda g, i: g.forward
    )
    with pytest.raises(TypeError, match='lowering="aten"'):
        step({"w": torch.zeros(2)}, torch.ones(2))


# -- the strategies -----------------------------------------------------------------------------------------------

KINDS: dict[str, Callable[[fst.StepProgram], bool]] = {
    "gradient": lambda p: any(o.name == "gradient" for o in p.operations),
    "random draw": lambda p: any(o.name in ("noise", "masked") for o in p.operations),
    "write into a temporary": lambda p: any(o.name == "into_clone" for o in p.operations),
    "literal": lambda p: any(o.name == "plus_literal" for o in p.operations),
    "swap": lambda p: any(i != n and p.new_state[i : i + 1] == (n,) for n, i in enumerate(p.new_state)),
    "one tensor in two places": lambda p: len(set(p.new_state)) < len(p.new_state),
    "leaf passed through": lambda p: any(i == n for n, i in enumerate(p.new_state)),
    "old leaf as metric": lambda p: any(i < len(p.new_state) for i in p.metrics),
    "new leaf as metric": lambda p: any(i in p.new_state for i in p.metrics if i > len(p.new_state)),
    "input as metric": lambda p: len(p.new_state) in p.metrics,
    "view as metric": lambda p: any(
        p.operations[i - len(p.new_state) - 1].name in ("transpose", "head", "expand", "alias")
        for i in p.metrics
        if i > len(p.new_state)
    ),
    "zero-size leaf": lambda p: any(leaf.numel() == 0 for leaf in tree.leaves(p.state)),
    "strided leaf": lambda p: any(not leaf.is_contiguous() for leaf in tree.leaves(p.state)),
    "three dtypes": lambda p: len({leaf.dtype for leaf in tree.leaves(p.state)}) > 4,
}


def test_random_programs_contain_all_kinds() -> None:
    """What the strategy promises is drawn, and the kinds that steps get wrong most are not left to luck."""
    seen: Counter[str] = Counter()
    missing = set(KINDS)

    @settings(max_examples=75, phases=[Phase.generate], database=None, derandomize=True)
    @given(fst.step_fns())
    def count(program: fst.StepProgram) -> None:
        seen.update(["programs", *program.kinds])
        missing.difference_update([kind for kind in missing if KINDS[kind](program)])

    count()
    more = settings(max_examples=400, phases=[Phase.generate], database=None, derandomize=True)
    assert all(KINDS[kind](find(fst.step_fns(), KINDS[kind], settings=more)) for kind in missing)
    rates = {kind: number / seen["programs"] for kind, number in seen.items()}
    assert {kind for kind, rate in rates.items() if rate >= 0.2} == {
        "programs", "gradients", "randomness", "swapped leaves", "tied weights", "zero-size leaves", "mixed dtypes",
    }, rates  # fmt: skip


@on_both_backends
@given(optimizer=fst.optimizers())
@settings(max_examples=6)
def test_replay_equals_eager_for_drawn_optimizers(backend: Callable[[], Any], optimizer: Any) -> None:
    state = fcg.TrainState.create(params={"w": torch.linspace(-1, 1, 6).reshape(3, 2)}, optimizer=optimizer)

    def step(state: Any, x: torch.Tensor) -> Any:
        loss, grads = fcg.value_and_grad(lambda p: torch.tanh(x @ p["w"]).square().mean())(state.params)
        return state.apply_gradients(grads), {"loss": loss}

    assert_replay_equals_eager(fcg.graph_step(step, backend=backend()), state, batches())


@given(data=st.data())
def test_like_keeps_the_layout_and_takes_elements_by_path(data: st.DataObject) -> None:
    tree_ = data.draw(fst.pytrees())
    other = data.draw(fst.like(tree_))
    leaves, treedef = tree.flatten(tree_)
    others, other_def = tree.flatten(other)
    assert treedef == other_def
    assert [(a.shape, a.dtype) for a in leaves] == [(b.shape, b.dtype) for b in others]
    ones = data.draw(fst.like({"x": torch.zeros(3), "y": torch.zeros(2)}, elements={"['y']": st.just(1.0)}))
    assert ones["y"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (
            lambda: fst.like({"x": torch.zeros(3)}, elements={"['z']": st.just(1.0)}),
            r"no leaf is named \['z'\]; there are \['x'\]",
        ),
        (lambda: fst.tensors(shapes=(2, 3)), r"`shapes` must be a strategy, got \(2, 3\).*like\(torch.zeros"),
        (lambda: fst.tensors(dtypes=torch.float32), "`dtypes` must be a strategy"),
        (lambda: fst.step_fns(states={"w": torch.zeros(2)}), "`states` must be a strategy"),
    ],
    ids=["like", "shapes", "dtypes", "states"],
)
def test_a_bad_argument_is_refused_when_drawn(strategy: Callable[[], Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        find(strategy(), lambda _: True)
