"""Schedules against independent closed forms, and their laws at boundaries and in between."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
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
        (lambda: optim.linear(1.0, 0.0, 0), "linear: transition_steps must be positive and finite, got 0"),
        (lambda: optim.cosine(1.0, 0), "cosine: decay_steps must be positive"),
        (lambda: optim.warmup_cosine(1.0, 10, 10), "counts the warm-up in.*decay_steps=10, warmup_steps=10"),
        (lambda: optim.warmup_cosine(1.0, -1, 10), "warmup_steps must be at least 0"),
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


@given(
    losses=st.lists(st.floats(-9, 9) | st.just(-math.inf), min_size=1, max_size=30),
    rtol=st.floats(0, 0.9),
    atol=st.floats(0, 2),
)
@example([-4.0, -3.9], 0.5, 0.0)
def test_the_best_loss_of_a_plateau_falls_by_the_tolerance_or_stays(
    losses: list[float], rtol: float, atol: float
) -> None:
    """Of any sign; the formulas of optax and torch take worse losses for better where the best is negative."""
    plateau, best = optim.ReduceOnPlateau.create(rtol=rtol, atol=atol), math.inf
    for loss in losses:
        plateau = plateau.adjusted(loss)
        sign = (best > 0) - (best < 0)
        best = loss if loss < best * (1 - rtol * sign) - atol else best
        assert float(plateau.best) == best <= (plateau.adjusted(math.inf).best)


def test_a_plateau_between_steps_and_its_arguments() -> None:
    plateau = optim.ReduceOnPlateau.create(patience=1).adjusted(3.0)
    assert float(plateau.adjusted(float("nan")).scale) == 0.1
    with pytest.raises(
        ValueError, match=r"got the shape \[1\]\.\nTo fix: `plateau\.adjusted\(loss\.mean\(\)\)`"
    ):
        plateau.adjusted(torch.ones(1))
    bad = {
        "factor": (0, 1, 1.5, -1),
        "patience": (0, 1.5),
        "rtol": (-0.1, 1),
        "atol": (-0.1, math.inf),
        "cooldown": (-1, 0.5),
        "min_scale": (2, -1, 1),
    }
    for name, numbers in bad.items():
        for number in (*numbers, math.nan):
            with pytest.raises(ValueError, match=f"ReduceOnPlateau: {name} "):
                optim.ReduceOnPlateau.create(**{name: number})


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: optim.join_schedules([optim.constant(1.0), 0.1], [3]), r"To fix: `optim\.constant\(0\.1\)`"),
        (
            lambda: optim.join_schedules([optim.constant(1.0)], [3]),
            "a boundary for each of the schedules but the first",
        ),
        (lambda: optim.join_schedules([optim.constant(1.0)] * 3, [3, 1]), "boundaries must ascend"),
        (lambda: optim.one_cycle(1.0, 2), "one_cycle: of transition_steps=2, pct_start=0.3 leaves 0 to rise"),
        (lambda: optim.polynomial(1.0, 0.0, 0, 10), "power must be positive"),
        (lambda: optim.linear(-0.1, 0.0, 9), r"init_value must be at least 0 .*\nTo fix: `0\.1`; .*downhill"),
    ],
)
def test_arguments_of_joined_schedules_are_checked(make: Any, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        make()


def _ramp(t: float, steps: float) -> float:
    return min(max(t / steps, 0.0), 1.0)


def _half_period(a: float, n: float, b: float, t: float) -> float:
    part = (1 + math.cos(math.pi * _ramp(t, n))) / 2
    return a * part + b * (1 - part)


def _warm(a: float, w: int, n: int, b: float, c: float, t: float) -> float:
    return c + (a - c) * t / w if t < w else _half_period(a, n - w, b, t - w)


def _decayed(a: float, n: float, x: float, staircase: bool, end: float | None, t: float) -> float:
    out = a * x ** (math.floor(t / n) if staircase else t / n)
    return out if end is None else max(out, end) if x < 1 else min(out, end)


def _restarted(
    a: float, n: int, cycles: int, w: int, b: float, longer: float, higher: float, t: float
) -> float:
    for i in range(cycles):
        length = round(n * longer**i)
        if t < length or i == cycles - 1:
            return _warm(a * higher**i, w, length, b, b, t)
        t -= length
    raise AssertionError


def _cycle(a: float, n: int, share: float, x: float, y: float, t: float) -> float:
    top = int(share * n)
    return _half_period(a / x, top, a, t) if t < top else _half_period(a, n - top, a / x / y, t - top)


def _stairs(a: float, pairs: Any, t: float) -> float:
    return a * math.prod(scale for boundary, scale in pairs if t >= boundary)


any_rate = st.sampled_from([0.0, 1e-300, 0.25, 3.0])
any_steps = st.integers(1, 400)
any_factor = st.sampled_from([0.25, 1.0, 1.1])
any_end = st.none() | any_rate
any_boundaries = st.lists(st.integers(0, 400), min_size=1, max_size=1)
any_pairs = st.lists(st.tuples(st.integers(0, 400), any_factor), max_size=4, unique_by=lambda pair: pair[0])

# By schedule: what its arguments are drawn from, by name, and its formula in float64.
FORMULAS: dict[Any, tuple[dict[str, Any], Callable[..., float]]] = {
    optim.constant: ({"constant_value": any_rate}, lambda a, t: a),
    optim.linear: (
        {
            "init_value": any_rate,
            "end_value": any_rate,
            "transition_steps": any_steps,
            "transition_begin": any_steps,
        },
        lambda a, b, n, start, t: a + (b - a) * _ramp(t - start, n),
    ),
    optim.polynomial: (
        {
            "init_value": any_rate,
            "end_value": any_rate,
            "power": any_factor,
            "transition_steps": any_steps,
            "transition_begin": any_steps,
        },
        lambda a, b, x, n, start, t: b + (a - b) * (1 - _ramp(t - start, n)) ** x,
    ),
    optim.cosine: ({"init_value": any_rate, "decay_steps": any_steps, "end_value": any_rate}, _half_period),
    optim.warmup_cosine: (
        {
            "peak_value": any_rate,
            "warmup_steps": any_steps,
            "decay_steps": any_steps,
            "end_value": any_rate,
            "init_value": any_rate,
        },
        _warm,
    ),
    optim.piecewise_constant: ({"init_value": any_rate, "boundaries_and_scales": any_pairs}, _stairs),
    optim.exponential: (
        {
            "init_value": any_rate,
            "transition_steps": any_steps,
            "decay_rate": any_factor,
            "staircase": st.booleans(),
            "end_value": any_end,
        },
        _decayed,
    ),
    optim.warmup_exponential: (
        {
            "peak_value": any_rate,
            "warmup_steps": any_steps,
            "transition_steps": any_steps,
            "decay_rate": any_factor,
            "init_value": any_rate,
            "staircase": st.booleans(),
            "end_value": any_end,
        },
        lambda a, w, n, x, c, floor, end, t: (
            c + (a - c) * t / w if t < w else _decayed(a, n, x, floor, end, t - w)
        ),
    ),
    optim.one_cycle: (
        {
            "peak_value": any_rate,
            "transition_steps": any_steps,
            "pct_start": st.floats(0.05, 0.95),
            "div_factor": any_factor,
            "final_div_factor": any_factor,
        },
        _cycle,
    ),
    optim.cosine_restarts: (
        {
            "peak_value": any_rate,
            "decay_steps": any_steps,
            "cycles": st.integers(1, 4),
            "warmup_steps": any_steps,
            "end_value": any_rate,
            "length_factor": any_factor,
            "peak_factor": any_factor,
        },
        _restarted,
    ),
    optim.join_schedules: (
        {"schedules": st.just((optim.constant(1.0), optim.constant(2.0))), "boundaries": any_boundaries},
        lambda _, boundaries, t: 1.0 + (t >= boundaries[0]),
    ),
}


@pytest.mark.parametrize("make", FORMULAS)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_schedule_refuses_an_argument_by_name_or_is_its_formula(make: Any, data: Any) -> None:
    drawn, formula = FORMULAS[make]
    arguments = {name: data.draw(values, label=name) for name, values in drawn.items()}
    bad = {}
    for name in data.draw(st.sets(st.sampled_from(sorted(drawn)), max_size=1), label="bad"):
        number = data.draw(st.sampled_from([-1, 0, math.nan, math.inf, -math.inf]), label="number")
        if name == "boundaries":
            bad[name] = data.draw(st.sampled_from([[], [number, 3], [number]]))
        elif name == "boundaries_and_scales":
            bad[name] = data.draw(st.sampled_from([[(number, 1.0)], [(3, number)], [(3, 0.5), (3, 0.5)]]))
        elif name not in ("staircase", "schedules"):
            bad[name] = number
    arguments |= bad
    try:
        schedule = make(**arguments)
    except ValueError as error:
        said = str(error)
    else:
        said = ""
    if said:
        assert any(name in said for name in [name for name in bad if bad[name] != 0] or drawn), said
        return
    counts = torch.arange(1001)
    rates = schedule(counts)
    assert (rates >= 0).all()
    assert rates.isfinite().all()
    expected = [formula(*arguments.values(), t) for t in counts.tolist()]
    torch.testing.assert_close(rates, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-14)


def test_every_schedule_has_a_formula() -> None:
    made = {one for one in vars(optim).values() if isinstance(one, type) and issubclass(one, optim.Schedule)}
    assert made - {optim.Schedule} <= FORMULAS.keys()


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
