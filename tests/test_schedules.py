"""Schedules against independent closed forms, and their laws at boundaries and in between."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

import functional_cg as fcg
from functional_cg import optim

SCHEDULES = [
    optim.constant(0.3),
    optim.linear(0.1, 0.7, 13),
    optim.linear(0.7, 0.1, 13, transition_begin=5),
    optim.cosine(0.5, 20),
    optim.cosine(0.5, 20, end_value=0.1),
    optim.warmup_cosine(0.5, 7, 30),
    optim.warmup_cosine(0.5, 0, 30, end_value=0.05),
    optim.warmup_cosine(0.5, 7, 30, end_value=0.05, init_value=0.2),
    optim.piecewise_constant(1.0, {5: 0.5, 9: 0.1, 3: 2.0}),
    optim.exponential(0.5, 10, 0.3),
    optim.exponential(0.5, 10, 0.3, staircase=True),
    optim.exponential(0.5, 10, 0.3, end_value=0.1),
    optim.exponential(0.5, 10, 1.3, end_value=0.8),
]

values = st.floats(min_value=0.0, max_value=10.0, allow_subnormal=False)
lengths = st.integers(min_value=1, max_value=10_000)
counts = st.integers(min_value=0, max_value=20_000)


def near(value: float) -> object:
    return pytest.approx(value, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_schedules_are_values(schedule: optim.Schedule) -> None:
    copy = pickle.loads(pickle.dumps(schedule))
    assert copy == schedule
    assert hash(copy) == hash(schedule)
    assert eval(repr(schedule), vars(optim)) == schedule
    assert sum(copy == other for other in SCHEDULES) == 1


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_int_gives_float_and_tensor_gives_tensor(schedule: optim.Schedule) -> None:
    graph = make_fx(schedule, tracing_mode="fake")(torch.tensor(0))
    assert "lift_fresh" not in graph.code
    for count in range(40):
        number, tensor = schedule(count), schedule(torch.tensor(count))
        assert type(number) is float
        assert (tensor.dtype, tensor.shape) == (torch.float64, torch.Size([]))
        assert tensor.item() == pytest.approx(number, rel=1e-14, abs=1e-16)
        assert torch.equal(graph(torch.tensor(count)), tensor)


@given(value=values, count=counts)
def test_constant(value: float, count: int) -> None:
    assert optim.constant(value)(count) == value


@given(a=values, b=values, steps=lengths, begin=st.integers(0, 1000), count=counts)
def test_linear(a: float, b: float, steps: int, begin: int, count: int) -> None:
    schedule = optim.linear(a, b, steps, begin)
    inside = a + (b - a) * (count - begin) / steps
    assert schedule(count) == near(a if count <= begin else b if count >= begin + steps else inside)
    assert (schedule(begin), schedule(begin + steps)) == (a, b)


@given(a=values, b=values, steps=lengths, count=counts)
def test_cosine(a: float, b: float, steps: int, count: int) -> None:
    schedule = optim.cosine(a, steps, b)
    inside = (a + b) / 2 + (a - b) / 2 * math.cos(math.pi * count / steps)
    assert schedule(count) == near(b if count >= steps else inside)
    assert schedule(0) == a
    assert schedule(steps) == near(b)


@given(peak=values, warmup=st.integers(0, 100), decay=lengths, end=values, count=counts)
def test_warmup_cosine(peak: float, warmup: int, decay: int, end: float, count: int) -> None:
    schedule = optim.warmup_cosine(peak, warmup, warmup + decay, end)
    if count < warmup:
        expected = peak * count / warmup
    else:
        angle = math.pi * min(1.0, (count - warmup) / decay)
        expected = end + (peak - end) * math.cos(angle / 2) ** 2  # half-angle form: not how it is computed
    assert schedule(count) == near(expected)
    assert schedule(warmup) == near(peak)
    assert schedule(warmup + decay) == near(end)


@given(warmup=st.integers(1, 50), decay=st.integers(1, 50))
def test_warmup_cosine_rises_then_falls(warmup: int, decay: int) -> None:
    curve = [
        optim.warmup_cosine(1.0, warmup, warmup + decay, 0.1)(count) for count in range(warmup + decay + 5)
    ]
    assert all(a < b for a, b in pairwise(curve[: warmup + 1]))
    assert all(a > b for a, b in pairwise(curve[warmup : warmup + decay + 1]))
    assert curve[warmup + decay :] == [near(0.1)] * 5
    assert max(curve) == curve[warmup]


def test_decay_steps_count_the_warmup_in() -> None:
    schedule = optim.warmup_cosine(1.0, 10, 20)
    assert schedule(15) == near(0.5)
    assert schedule(20) == near(0.0)


@given(
    value=values,
    pairs=st.dictionaries(st.integers(1, 100), st.floats(0.1, 2.0), max_size=4),
    count=st.integers(0, 120),
)
def test_piecewise_constant(value: float, pairs: dict[int, float], count: int) -> None:
    expected = value * math.prod(factor for boundary, factor in pairs.items() if boundary <= count)
    assert optim.piecewise_constant(value, pairs)(count) == near(expected)
    backwards = dict(reversed(pairs.items()))
    assert optim.piecewise_constant(value, pairs) == optim.piecewise_constant(value, backwards)


@given(value=values, steps=st.integers(1, 100), rate=st.floats(0.1, 1.5), count=st.integers(0, 200))
def test_exponential(value: float, steps: int, rate: float, count: int) -> None:
    expected = value * math.exp(math.log(rate) * count / steps)
    assert optim.exponential(value, steps, rate)(count) == pytest.approx(expected, rel=1e-9)
    stairs = value * math.exp(math.log(rate) * (count // steps))
    assert optim.exponential(value, steps, rate, staircase=True)(count) == pytest.approx(stairs, rel=1e-9)


@given(rate=st.floats(0.1, 2.0), end=st.floats(0.0, 2.0), count=st.integers(0, 50))
def test_exponential_does_not_cross_its_end(rate: float, end: float, count: int) -> None:
    bounded = optim.exponential(1.0, 5, rate, end_value=end)(count)
    free = optim.exponential(1.0, 5, rate)(count)
    assert bounded == (max(free, end) if rate < 1 else min(free, end))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: optim.linear(1.0, 0.0, 0), "linear: transition_steps must be positive, got 0"),
        (lambda: optim.cosine(1.0, 0), "cosine: decay_steps must be positive"),
        (lambda: optim.warmup_cosine(1.0, 10, 10), "counts the warm-up in.*decay_steps=10, warmup_steps=10"),
        (lambda: optim.warmup_cosine(1.0, -1, 10), "warmup_steps must not be negative"),
        (lambda: optim.exponential(1.0, 0, 0.5), "exponential: transition_steps must be positive"),
        (lambda: optim.exponential(1.0, 5, 0.0), "exponential: decay_rate must be positive"),
    ],
)
def test_arguments_are_checked(make: Callable[[], object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: optim.linear(None, 1.0, 10), "linear: init_value must be a number, got NoneType"),
        (lambda: optim.warmup_cosine(1.0, 1, None), "warmup_cosine: decay_steps must be a number, got None"),
    ],
)
def test_none_is_no_number(make: Callable[[], object], match: str) -> None:
    with pytest.raises(TypeError, match=match):
        make()


SLOPE = optim.linear(0.5, 0.9, 6)


@pytest.mark.parametrize(
    ("factory", "name", "rest"),
    [
        (optim.adamw, "weight_decay", {"learning_rate": 0.1}),
        (optim.adamw, "learning_rate", {"weight_decay": 0.1}),
        (optim.adamw, "b1", {"learning_rate": 0.1, "weight_decay": 0.1}),
        (optim.sgd, "momentum", {"learning_rate": 0.1}),
        (optim.rmsprop, "decay", {"learning_rate": 0.1}),
        (optim.clip_by_global_norm, "max_norm", {}),
        (optim.add_decayed_weights, "weight_decay", {}),
    ],
)
@pytest.mark.parametrize("fused", [True, False])
def test_any_number_may_be_a_schedule(factory: Any, name: str, rest: Any, fused: bool) -> None:
    params = {"w": torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)}
    scheduled = optim.inject_hyperparams(factory)(**rest, **{name: SLOPE})
    injected = optim.inject_hyperparams(factory)(**rest, **{name: 0.5})
    ours, theirs = scheduled.init(params), injected.init(params)
    if fused and scheduled.step is None:
        return
    mine, other = params, params
    for i in range(8):
        theirs = optim.set_hyperparams(theirs, **{name: SLOPE(i)})
        grads = {"w": torch.full((3,), 1.0 + i, dtype=torch.float64)}
        if fused:
            mine, ours = scheduled.step(grads, ours, mine)
            other, theirs = injected.step(grads, theirs, other)
        else:
            updates, ours = scheduled.update(grads, ours, mine)
            mine = optim.apply_updates(mine, updates)
            updates, theirs = injected.update(grads, theirs, other)
            other = optim.apply_updates(other, updates)
        torch.testing.assert_close(mine, other, rtol=1e-13, atol=1e-13)
    assert int(ours.count) == 8


@pytest.mark.parametrize(
    "make",
    [
        lambda: optim.adamw(1e-3, weight_decay=SLOPE),
        lambda: optim.sgd(0.1, momentum=SLOPE),
        lambda: optim.adam(1e-3, b1=SLOPE),
        lambda: optim.clip_by_global_norm(SLOPE),
        lambda: optim.rmsprop(0.1, decay=SLOPE),
    ],
)
def test_a_schedule_of_another_number_goes_by_inject_hyperparams(make: Any) -> None:
    with pytest.raises(
        TypeError, match=r"must be a number or a tensor, got linear.*\nTo fix: .*inject_hyperparams"
    ):
        make()


def test_a_captured_step_evaluates_a_scheduled_decay() -> None:
    optimizer = optim.inject_hyperparams(optim.adamw)(learning_rate=0.1, weight_decay=SLOPE)
    start = {"w": torch.ones(3, dtype=torch.float64)}
    state = fcg.TrainState.create(params=start, optimizer=optimizer)
    step = fcg.graph_step(lambda state, grads: (state.apply_gradients(grads), None))
    judged = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    judge = torch.optim.AdamW([judged], lr=0.1)
    for i in range(8):
        judged.grad = torch.full((3,), 1.0 + i, dtype=torch.float64)
        state, _ = step(state, {"w": judged.grad.clone()})
        judge.param_groups[0]["weight_decay"] = SLOPE(i)
        judge.step()
    torch.testing.assert_close(fcg.snapshot(state.params)["w"], judged.detach(), rtol=1e-12, atol=1e-12)
