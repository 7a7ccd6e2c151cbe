"""Host values that move between two traces of a step: refused before anything is launched, and nothing is lost.

What else a graph bakes in, and what moves, is in `tests/host`.
"""

import itertools
import time

import pytest
import torch

import functional_cg as fcg
from functional_cg import BakedValueError
from tests.refusals.judge import accepted, assert_refused, metric

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


@pytest.mark.parametrize("function", [clock, counter])
def test_value_that_moves(function):
    assert_refused(function, BakedValueError, "two traces of it differ(.|\n)*first t", where=function)


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


def test_literals_that_stay_are_accepted():
    def literals(s, b):
        nan, negative_zero = torch.tensor(float("nan")), torch.tensor(-0.0)
        return s["w"] * torch.tensor([1.0, 2.0, 3.0]), 1 / negative_zero, nan.isnan(), s["w"] * -0.0

    out = accepted(metric(literals))["out"]
    assert out[1] == -torch.inf
    assert out[2]
    assert torch.signbit(out[3]).tolist() == [True, True, True]
