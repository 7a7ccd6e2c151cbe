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
    optim.polynomial(0.5, 0.1, 2.5, 20, transition_begin=5),
    optim.one_cycle(0.5, 20),
    optim.warmup_exponential(0.5, 5, 10, 0.3),
    optim.cosine_restarts(0.5, 10, 3, warmup_steps=2, length_factor=1.5, peak_factor=0.5),
    optim.join_schedules([optim.linear(0.0, 1.0, 3), optim.constant(0.2), optim.cosine(0.2, 5)], [3, 6]),
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


# -- optax, over generated arguments --------------------------------------------------------------------------------

rates = st.floats(min_value=0.01, max_value=2.0)
short = st.integers(min_value=1, max_value=200)
cycles = st.lists(st.tuples(rates, st.integers(3, 60)), min_size=1, max_size=4)


@st.composite
def pairs_of_ours_and_optax(draw: Any) -> tuple[optim.Schedule, Any]:
    optax = pytest.importorskip("optax")
    a, b, n, m, x = draw(rates), draw(rates), draw(short), draw(short), draw(st.floats(0.1, 3.0))
    kind = draw(
        st.sampled_from(
            "linear polynomial cosine warmup exponential warmup_exponential cycle sgdr join".split()
        )
    )
    if kind == "linear":
        return optim.linear(a, b, n, m), optax.linear_schedule(a, b, n, m)
    if kind == "polynomial":
        return optim.polynomial(a, b, x, n, m), optax.polynomial_schedule(a, b, x, n, m)
    if kind == "cosine":
        return optim.cosine(a, n, b), optax.cosine_decay_schedule(a, n, b / a)
    if kind == "warmup":
        return optim.warmup_cosine(a, n, n + m, b), optax.warmup_cosine_decay_schedule(0.0, a, n, n + m, b)
    if kind == "exponential":
        return optim.exponential(a, n, x, True), optax.exponential_decay(a, n, x, staircase=True)
    if kind == "warmup_exponential":
        ours = optim.warmup_exponential(a, n, m, x, init_value=b)
        return ours, optax.warmup_exponential_decay_schedule(b, a, n, m, x)
    if kind == "cycle":
        share = draw(st.sampled_from([0.25, 0.5]))
        ours = optim.one_cycle(a, n + 8, pct_start=share, div_factor=4, final_div_factor=50)
        return ours, optax.cosine_onecycle_schedule(n + 8, a, share, 4, 50)
    if kind == "sgdr":
        count, factor = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2]))
        ours = optim.cosine_restarts(
            a, n + m, count, warmup_steps=m, end_value=b, length_factor=factor, peak_factor=0.5
        )
        ends = {"init_value": b, "warmup_steps": m, "end_value": b}
        kwargs = [
            {"peak_value": a * 0.5**i, "decay_steps": (n + m) * factor**i, **ends} for i in range(count)
        ]
        return ours, optax.sgdr_schedule(kwargs)
    ours = [optim.constant(b), lambda count: a / (1 + count), optim.linear(a, b, m)]
    theirs = [optax.constant_schedule(b), ours[1], optax.linear_schedule(a, b, m)]
    return optim.join_schedules(ours, [n, n + m]), optax.join_schedules(theirs, [n, n + m])


@given(pair=pairs_of_ours_and_optax(), count=st.integers(0, 500))
def test_schedules_are_those_of_optax(pair: Any, count: int) -> None:
    ours, theirs = pair
    expected = float(theirs(count))  # in float32, with powers of numbers up to 500
    assert ours(count) == pytest.approx(expected, rel=1e-4, abs=2e-6)
    assert float(ours(torch.tensor(count))) == pytest.approx(ours(count), rel=1e-12)


@given(
    losses=st.lists(st.integers(0, 12).map(lambda n: n / 4), min_size=1, max_size=40),
    numbers=st.fixed_dictionaries(
        {
            "factor": st.sampled_from([0.5, 0.25]),
            "patience": st.integers(1, 4),
            "rtol": st.sampled_from([2.0**-20, 0.25]),
            "atol": st.sampled_from([0.0, 0.5]),
            "cooldown": st.integers(0, 3),
            "min_scale": st.sampled_from([0.0, 0.125]),
        }
    ),
)
def test_a_plateau_is_that_of_optax(losses: list[float], numbers: Any) -> None:
    """Bitwise: all numbers are sums of few powers of two, and optax wants one tolerance above 0."""
    optax = pytest.importorskip("optax")
    theirs = optax.contrib.reduce_on_plateau(**numbers)
    ours, state = optim.ReduceOnPlateau.create(**numbers), theirs.init(0.0)
    for loss in losses:
        ours = ours.adjusted(torch.tensor(loss))
        _, state = theirs.update(0.0, state, value=loss)
        assert float(ours.scale) == float(state.scale)
        assert float(ours.best) == float(state.best_value)
        assert (int(ours.bad), int(ours.wait)) == (int(state.plateau_count), int(state.cooldown_count))


def test_a_plateau_between_steps_and_its_arguments() -> None:
    plateau = optim.ReduceOnPlateau.create(patience=1).adjusted(3.0)
    assert float(plateau.adjusted(float("nan")).scale) == 0.1
    for numbers, said in (
        ({"factor": 1.5}, "factor must be in"),
        ({"patience": 0}, "patience must be at least 1"),
    ):
        with pytest.raises(ValueError, match=said):
            optim.ReduceOnPlateau.create(**numbers)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: optim.join_schedules([optim.constant(1.0), 0.1], [3]), r"To fix: `optim\.constant\(0\.1\)`"),
        (
            lambda: optim.join_schedules([optim.constant(1.0)], [3]),
            "a boundary.* for each of 1 schedules but the first",
        ),
        (lambda: optim.join_schedules([optim.constant(1.0)] * 3, [3, 1]), "ascending"),
        (lambda: optim.one_cycle(1.0, 2), "one_cycle: 2 updates leave 0 to rise"),
        (lambda: optim.polynomial(1.0, 0.0, 0, 10), "power must be positive"),
    ],
)
def test_arguments_of_joined_schedules_are_checked(make: Any, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        make()


RATED = [
    (optim.adam(0.25), [0.25] * 3),
    (optim.ema(optim.chain(optim.clip_by_norm(1.0), optim.sgd(optim.linear(1.0, 0.0, 4)))), [1.0, 0.75, 0.5]),
    (optim.inject_hyperparams(optim.adamw)(learning_rate=0.5, weight_decay=0.1), [0.5] * 3),
    (optim.inject_hyperparams(optim.sgd)(learning_rate=optim.linear(1.0, 0.0, 4)), [1.0, 0.75, 0.5]),
    (
        optim.partition(
            {"a": optim.yogi(lambda c: 1 / (c + 1)), "b": optim.set_to_zero()}, {"w": "a", "b": "b"}
        ),
        [1, 0.5],
    ),
]


@pytest.mark.parametrize(("optimizer", "rates"), RATED, ids=lambda one: repr(one)[:20])
def test_the_rate_of_the_next_update_is_a_metric(optimizer: Any, rates: list[float]) -> None:
    params = {"w": torch.ones(2), "b": torch.ones(2)}
    state = fcg.TrainState.create(params=params, optimizer=optimizer)
    step = fcg.graph_step(
        lambda s, x: (s.apply_gradients({"w": x, "b": x}), {"rate": optim.learning_rate(s)})
    )
    for rate in rates:
        assert float(optim.learning_rate(state)) == rate
        state, metrics = step(state, torch.ones(2))
        assert float(metrics["rate"]) == rate


@pytest.mark.parametrize("optimizer", [optim.scale(-0.1), optim.muon(0.1, weight_decay=0.0)])
def test_no_rate_or_several_are_no_metric(optimizer: Any) -> None:
    state = fcg.TrainState.create(params={"w": torch.ones(2, 2), "b": torch.ones(2)}, optimizer=optimizer)
    with pytest.raises(ValueError, match=r"has [02] learning rates(.|\n)*`schedule\(state.step\)`"):
        optim.learning_rate(state)
