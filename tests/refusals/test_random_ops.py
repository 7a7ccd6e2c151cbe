"""Random ops that can draw from a generator nobody manages are refused; those that cannot are accepted."""

import importlib
import random
import threading

import numpy
import pytest
import torch
import torch.nn.functional as F

import functional_cg as fcg
from functional_cg import ImplicitRandomnessError
from tests.refusals.judge import accepted, assert_refused, metric

GENERATOR = torch.Generator()
DROPOUT = torch.nn.Dropout(0.5)
EVALUATED = torch.nn.Dropout(0.5).eval()


def heads(b):
    return b["x"][None, None]


def lstm(b, dropout, *, train):
    weights = []
    for size in (3, 2):
        weights += [torch.full(shape, 0.1) for shape in ((8, size), (8, 2), (8,), (8,))]
    zero = torch.zeros(2, 1, 2)
    return torch.lstm(b["x"][None], [zero, zero.clone()], weights, True, 2, dropout, train, False, True)[0]


def gru(b, dropout, *, train):
    weights = []
    for size in (3, 2):
        weights += [torch.full(shape, 0.1) for shape in ((6, size), (6, 2), (6,), (6,))]
    return torch.gru(b["x"][None], torch.zeros(2, 1, 2), weights, True, 2, dropout, train, False, True)[0]


DRAWS = {
    "rand": lambda s, b: torch.rand(3),
    "rand_like": lambda s, b: torch.rand_like(s["w"]),
    "randn": lambda s, b: torch.randn(3),
    "randint": lambda s, b: torch.randint(0, 3, (3,)),
    "randperm": lambda s, b: torch.randperm(3),
    "normal": lambda s, b: torch.normal(s["w"], 1.0),
    "normal_": lambda s, b: torch.empty(3).normal_(),
    "uniform_": lambda s, b: torch.empty(3).uniform_(),
    "exponential_": lambda s, b: s["w"].clone().exponential_(),
    "bernoulli": lambda s, b: torch.bernoulli(s["w"].clamp(0, 1)),
    "bernoulli_": lambda s, b: s["w"].clone().bernoulli_(0.5),
    "multinomial": lambda s, b: torch.multinomial(s["w"] + 1, 2),
    "poisson": lambda s, b: torch.poisson(s["w"]),
    "dropout": lambda s, b: F.dropout(s["w"], 0.5),
    "dropout of a module": lambda s, b: DROPOUT(s["w"]),
    "dropout2d": lambda s, b: F.dropout2d(heads(b), 0.5),
    "alpha_dropout": lambda s, b: F.alpha_dropout(s["w"], 0.5, training=True),
    "dropout in a loss": lambda s, b: fcg.grad(lambda w: F.dropout(w, 0.5).sum())(s["w"]),
    "attention": lambda s, b: F.scaled_dot_product_attention(heads(b), heads(b), heads(b), dropout_p=0.5),
    "lstm": lambda s, b: lstm(b, 0.5, train=True),
    "gru": lambda s, b: gru(b, 0.5, train=True),
    "rrelu": lambda s, b: F.rrelu(s["w"], training=True),
    "gumbel_softmax": lambda s, b: F.gumbel_softmax(s["w"]),
    "initialiser": lambda s, b: torch.nn.init.normal_(torch.empty(3)),
    "module made in the step": lambda s, b: torch.nn.Linear(3, 3)(b["x"]),
    "generator": lambda s, b: torch.rand(3, generator=GENERATOR),
    "generator of bernoulli": lambda s, b: torch.bernoulli(s["w"].clamp(0, 1), generator=GENERATOR),
}

NO_DRAWS = {
    "dropout p=0": lambda s, b: F.dropout(s["w"], 0.0),
    "dropout p=1": lambda s, b: F.dropout(s["w"], 1.0),
    "dropout in evaluation": lambda s, b: F.dropout(s["w"], 0.5, training=False),
    "module in evaluation": lambda s, b: EVALUATED(s["w"]),
    "bernoulli_ p=0": lambda s, b: s["w"].clone().bernoulli_(0.0),
    "attention": lambda s, b: F.scaled_dot_product_attention(heads(b), heads(b), heads(b), dropout_p=0.0),
    "lstm p=0": lambda s, b: lstm(b, 0.0, train=True),
    "lstm in evaluation": lambda s, b: lstm(b, 0.5, train=False),
    "gru p=0": lambda s, b: gru(b, 0.0, train=True),
    "gru in evaluation": lambda s, b: gru(b, 0.5, train=False),
    "rrelu in evaluation": lambda s, b: F.rrelu(s["w"], training=False),
}

KEYED = {
    "uniform": lambda s, b: fcg.random.uniform(fcg.random.fold_in(fcg.random.key(0), s["n"]), (3,)),
    "normal": lambda s, b: fcg.random.normal(fcg.random.fold_in(fcg.random.key(0), s["n"]), (3,)),
    "dropout": lambda s, b: fcg.random.dropout(fcg.random.fold_in(fcg.random.key(0), s["n"]), s["w"], 0.5),
    "permutation": lambda s, b: fcg.random.permutation(fcg.random.fold_in(fcg.random.key(0), s["n"]), 4),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draw_is_refused(name):
    match = r"draws random numbers from a generator that is not in the state(.|\n)*To fix: draw from a key"
    where = {"lstm": lstm, "gru": gru}.get(name, DRAWS[name])
    assert_refused(metric(DRAWS[name]), ImplicitRandomnessError, match, where=where)


@pytest.mark.parametrize("name", NO_DRAWS)
def test_no_draw_is_accepted(name):
    accepted(metric(NO_DRAWS[name]))


@pytest.mark.parametrize("name", KEYED)
def test_keyed_draw_is_accepted(name):
    accepted(metric(KEYED[name]))


@pytest.mark.parametrize(
    ("name", "draw"),
    [
        ("random", random.random),
        ("random", lambda: random.shuffle([1, 2, 3])),
        ("numpy.random", lambda: numpy.random.rand()),
        (r"torch \(CPU\)", lambda: torch.manual_seed(3)),
        ("random, numpy.random", lambda: random.random() + numpy.random.rand()),
    ],
)
def test_generator_of_the_host(name, draw, monkeypatch):
    """Whether or not the number is used: the generator is moved back, nothing is baked in."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # whatever a compiler has left running

    def unused(s, b):
        draw()
        return s, {}

    assert_refused(
        unused,
        ImplicitRandomnessError,
        f"moves a random generator on the host: {name}\\.\n +at test_random_ops",
    )


def test_a_draw_in_a_library_names_the_line_of_the_user_s_own(tmp_path, monkeypatch):
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    folder = tmp_path / "site-packages"
    folder.mkdir()
    source = "import random\n\n\ndef flipped(x):\n    if random.random() < 0.5:\n        x = x.flip(0)\n    return x\n"
    (folder / "flipping_library.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    flipped = importlib.import_module("flipping_library").flipped

    def step(s, b):
        x = flipped(b["x"])
        return s, x

    message = (
        r"at flipping_library.py:5, called at test_random_ops.py:\d+\n(.|\n)*the line belongs to `flipping_library`: "
        r"call `flipped\(b\['x'\]\)` outside of the step and pass what it returns as an input"
    )
    assert_refused(step, ImplicitRandomnessError, message)


def test_generator_of_its_own_is_found_by_the_second_trace():
    generator = numpy.random.default_rng(0)

    def step(s, b):
        return s, s["w"] * generator.random()

    assert_refused(step, fcg.BakedValueError, "two traces of it differ", where=step)
