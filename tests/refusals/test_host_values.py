"""Host values that a graph bakes in: a change is refused at the call, before any launch."""

import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import functional_cg as fcg
from functional_cg import BakedValueError
from tests.refusals.judge import (
    SpyBackend,
    a_batch,
    a_state,
    accepted,
    assert_refused,
    assert_still_good,
    metric,
)

RATE = 0.5
SETTINGS = {"lr": 0.5, "deep": {"decay": 0.1}}


@dataclasses.dataclass
class Config:
    """Settings of a run."""

    lr: float = 0.5
    name: str = "adam"
    dtype: torch.dtype = torch.float32


class Model(torch.nn.Module):
    """A module whose mode the step depends on."""

    def forward(self, x):
        return x * 2 if self.training else x


def read_global():
    return (lambda s, b: (s, s["w"] * RATE)), "RATE", lambda: globals().__setitem__("RATE", 0.25)


def read_global_dict():
    return (lambda s, b: (s, s["w"] * SETTINGS["lr"])), 'SETTINGS["lr"]', lambda: SETTINGS.update(lr=0.25)


def read_cell():
    rate = 0.5

    def change():
        nonlocal rate
        rate = 0.25

    return (lambda s, b: (s, s["w"] * rate)), "rate", change


def read_default():
    def step(s, b, *, rate=0.5):
        return s, s["w"] * rate

    return step, "rate", lambda: step.__kwdefaults__.update(rate=0.25)


def read_attribute():
    config = Config()
    return (lambda s, b: (s, s["w"] * config.lr)), "config.lr", lambda: setattr(config, "lr", 0.25)


def read_string():
    config = Config()
    return (
        (lambda s, b: (s, s["w"] * (2 if config.name == "adam" else 3))),
        "config.name",
        lambda: setattr(config, "name", "sgd"),
    )


def read_dtype():
    config = Config()
    return (
        (lambda s, b: (s, s["w"].to(config.dtype))),
        "config.dtype",
        lambda: setattr(config, "dtype", torch.float64),
    )


def read_chain():
    class Trainer:
        def __init__(self):
            self.cfg = {"lr": 0.5}

        def loss(self, w):
            return w * self.cfg["lr"]

    trainer = Trainer()

    def step(s, b):
        return s, trainer.loss(s["w"])

    return step, 'trainer.cfg["lr"]', lambda: trainer.cfg.update(lr=0.25)


def read_partial():
    config = Config()

    def step(config, s, b):
        return s, s["w"] * config.lr

    bound = functools.partial(step, config)
    bound.__name__ = "step"
    return bound, "self.args[0].lr", lambda: setattr(config, "lr", 0.25)


def read_in_a_helper():
    config = Config()

    def helper(w):
        return w * config.lr

    return (lambda s, b: (s, helper(s["w"]))), "config.lr", lambda: setattr(config, "lr", 0.25)


def read_in_a_loss():
    config = Config()

    def step(s, b):
        def loss(w):
            return (w * config.lr).sum()

        return s, fcg.grad(loss)(s["w"])

    return step, "config.lr", lambda: setattr(config, "lr", 0.25)


def read_training():
    model = Model()
    return (lambda s, b: (s, model(s["w"]))), "model.training", model.eval


def read_flag():
    config = {"clip": True}
    return (
        (lambda s, b: (s, s["w"].clamp(max=1.0) if config["clip"] else s["w"])),
        'config["clip"]',
        lambda: config.update(clip=False),
    )


CASES = [
    read_global,
    read_global_dict,
    read_cell,
    read_default,
    read_attribute,
    read_string,
    read_dtype,
    read_chain,
    read_partial,
    read_in_a_helper,
    read_in_a_loss,
    read_training,
    read_flag,
]


@pytest.fixture(autouse=True)
def _restored():
    rate, settings = RATE, dict(SETTINGS)
    yield
    globals()["RATE"] = rate
    SETTINGS.update(settings)


@pytest.mark.parametrize("case", CASES)
def test_changed_value(case: Callable[[], Any]):
    function, name, change = case()
    backend, state, batch = SpyBackend(), a_state(), a_batch()
    step = fcg.graph_step(function, backend=backend)
    state, _ = step(state, batch)
    state, _ = step(state, batch)
    before = fcg.snapshot(state)
    change()
    for _ in range(2):  # as long as the value differs
        with pytest.raises(BakedValueError, match="baked in, and that has changed since") as caught:
            step(state, batch)
    message = str(caught.value)
    assert f"\n  {name}  traced " in message
    assert "   now " in message
    assert "\nTo fix: " in message
    assert (step.stats.captures, step.stats.replays) == (1, 2)
    assert_still_good(state, before, 2)


def test_value_that_comes_back_is_accepted():
    config = Config()
    step = fcg.graph_step(lambda s, b: (s, s["w"] * config.lr))
    state, first = step(a_state(), a_batch())
    config.lr = 0.25
    with pytest.raises(BakedValueError, match=r"config\.lr"):
        step(state, a_batch())
    config.lr = 0.5
    _, second = step(state, a_batch())
    assert torch.equal(first, second)


def test_advice_for_a_changed_value_works():
    """A value that changes goes in as an input, or is a static argument."""
    step = fcg.graph_step(lambda s, b, lr: (s, s["w"] * lr))
    state, half = step(a_state(), a_batch(), 0.5)
    state, quarter = step(state, a_batch(), 0.25)
    assert torch.equal(half, 2 * quarter)
    assert step.stats.traces == 1


# -- torch's modes ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def tf32():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        (deterministic, r"torch.are_deterministic_algorithms_enabled\(\)  traced False   now True"),
        (default_dtype, r"torch.get_default_dtype\(\)  traced torch.float32   now torch.float64"),
        (tf32, r"torch.backends.cuda.matmul.fp32_precision  traced 'ieee'   now 'tf32'"),
        (lambda: torch.autocast("cpu", dtype=torch.bfloat16), r"torch.autocast\('cpu'\)  expected off"),
    ],
)
def test_changed_mode(mode, name):
    step = fcg.graph_step(lambda s, b: (s, b["x"] @ b["x"].t()))
    state, first = step(a_state(), a_batch())
    before, batch = fcg.snapshot(state), a_batch()
    with mode(), pytest.raises(BakedValueError, match=name):
        step(state, batch)
    assert step.stats.replays == 1
    assert_still_good(state, before, 1)
    assert torch.equal(first, accepted(metric(lambda s, b: b["x"] @ b["x"].t()))["out"])


def test_ambient_autocast_at_the_first_call():
    step = fcg.graph_step(lambda s, b: (s, b["x"] @ b["x"].t()))
    state = a_state()
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(BakedValueError, match="is called under autocast"),
    ):
        step(state, a_batch())
    assert step.stats.traces == 0

    def inside(s, b):  # the advice
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return b["x"] @ b["x"].t()

    assert accepted(metric(inside))["out"].dtype is torch.bfloat16


@pytest.mark.parametrize("ambient", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_gradient_modes_around_the_call_change_nothing(ambient):
    def gradient(s, b):
        return fcg.grad(lambda w: (w**2).sum())(s["w"])

    step = fcg.graph_step(metric(gradient))
    with ambient():
        state, first = step(a_state(), a_batch())
    _, second = step(state, a_batch())
    assert first["out"].tolist() == second["out"].tolist() == [0.0, 2.0, 4.0]


# -- values that move between two traces ------------------------------------------------------------------------

COUNTER = itertools.count()


def clock(s, b):
    return s, s["w"] * time.perf_counter()


def seconds():
    return torch.tensor(time.perf_counter(), dtype=torch.float64)


def clock_literal(s, b):
    return s, s["w"] * seconds()


def clock_metric(s, b):
    return s, {"w": s["w"], "time": time.perf_counter()}


def counter(s, b):
    return s, s["w"] + next(COUNTER)


def counter_shape(s, b):
    return s, s["w"].repeat(next(COUNTER))


def counter_branch(s, b):
    return s, s["w"] + 1 if next(COUNTER) % 2 else s["w"] - 1


@pytest.mark.parametrize("function", [clock, counter, counter_shape, counter_branch])
def test_value_that_moves(function):
    assert_refused(function, BakedValueError, "two traces of it differ(.|\n)*  first t", where=function)


@pytest.mark.parametrize(
    ("numbers", "rows"),
    [
        ((1, 2), r"first call that differs  first nothing   then t\d = aten\.add"),
        ((3, 1), r"first call that differs  first t\d = aten\.add.*   then nothing"),
        ((0, 1), r"first call that differs  first nothing   then t\d = aten\.add"),
    ],
)
def test_number_of_calls_that_moves(numbers, rows):
    lengths = iter(numbers)

    def loop(s, b):
        w = s["w"]
        for _ in range(next(lengths)):
            w = w + 1
        return s, w

    assert_refused(loop, BakedValueError, rf"two traces of it differ(.|\n)*{rows}", where=loop)


def test_literal_that_moves():
    match = r"a tensor literal differs between two traces(.|\n)*f64\[\]@cpu"
    assert_refused(clock_literal, BakedValueError, match, where=seconds)


def test_new_leaves_that_change_places():
    turns = iter((False, True))

    def exchanging(s, b):
        one, other = s["w"] + 1, s["w"] + 2
        if next(turns):
            one, other = other, one
        return {"w": one, "v": other}, {}

    step = fcg.graph_step(exchanging)
    with pytest.raises(
        BakedValueError, match=r"two traces of it differ(.|\n)*s\['w'\]  first t\d   then t\d"
    ):
        step(fcg.place({"w": torch.ones(3), "v": torch.ones(3)}), torch.ones(3))


def test_metric_that_moves():
    match = r"returns Python values that differ between two traces(.|\n)*metrics\['time'\]  first"
    assert_refused(clock_metric, BakedValueError, match)


def test_structure_of_metrics_that_moves():
    def step(s, b):
        return s, {f"call{next(COUNTER)}": s["w"]}

    assert_refused(step, BakedValueError, "returns Python values that differ between two traces")


def test_literals_that_stay_are_accepted():
    def literals(s, b):
        nan, negative_zero = torch.tensor(float("nan")), torch.tensor(-0.0)
        return s["w"] * torch.tensor([1.0, 2.0, 3.0]), 1 / negative_zero, nan.isnan(), s["w"] * -0.0

    out = accepted(metric(literals))["out"]
    assert out[1] == -torch.inf
    assert out[2]
    assert torch.signbit(out[3]).tolist() == [True, True, True]
