"""What a change costs: the message, the state, and what goes on; static arguments, states and batches."""

from __future__ import annotations

import collections
import copy
import dataclasses
import decimal
import enum
import fractions
import gc
import pickle
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import functional_cg as fcg
from tests.host_law import X, outcome
from tests.refusals.judge import SpyBackend, a_batch, a_state, assert_still_good


class Cfg:
    def __init__(self, lr: float = 2.0) -> None:
        self.lr = lr


def test_a_change_is_refused_before_any_launch() -> None:
    cfg, backend, batch = Cfg(), SpyBackend(), a_batch()
    step = fcg.graph_step(lambda s, b: (s, s["w"] * cfg.lr + s["w"] * cfg.lr), backend=backend)
    state, _ = step(a_state(), batch)
    state, first = step(state, batch)
    before = fcg.snapshot(state)
    cfg.lr = 3.0
    for _ in range(2):  # as long as the value differs
        with pytest.raises(fcg.BakedValueError) as caught:
            step(state, batch)
    assert str(caught.value).removeprefix("`<lambda>`") == (
        ": reads a Python value that the graph has baked in, and that has changed since; the state is unchanged.\n"
        "  cfg.lr  traced 2.0   now 3.0\n"
        "  first call that differs  traced t7 = aten.mul.Tensor(t1, 2.0), at test_errors.py:36   now t7 = "
        "aten.mul.Tensor(t1, 3.0), at test_errors.py:36\n"
        "Replay repeats kernels, not Python: it would go on with the old value.\n"
        "To fix: pass `cfg.lr` in the batch (a Python number in the inputs is live) or keep it in the state; if it "
        'seldom changes, make it an argument of its own and name it in `static_argnames=("lr",)`.\n'
        "Docs: help(functional_cg.BakedValueError)"
    )
    assert (step.stats.captures, step.stats.replays) == (1, 2)
    assert_still_good(state, before, 2)
    cfg.lr = 2.0  # it comes back
    _, second = step(state.latest(), batch)
    assert second.shape == first.shape


def test_the_advice_works() -> None:
    """A value that changes is an input, or a static argument."""
    step = fcg.graph_step(lambda s, b, lr: (s, s["w"] * lr))
    state, half = step(a_state(), a_batch(), 0.5)
    state, quarter = step(state, a_batch(), 0.25)
    assert torch.equal(half, 2 * quarter)
    assert step.stats.traces == 1


def test_the_advice_about_threads_works() -> None:
    def function(x: Any) -> Any:
        made = [x]
        return x * len(made)

    assert torch.equal(fcg.graph_fn(function)(X), X)


# What is found in a message of a long container: as traced, and as it is now.
LONG: dict[str, tuple[Callable[[], Any], Callable[[Any], float], Callable[[Any], object], str, str]] = {
    "array": (
        lambda: np.ones(100_000),
        lambda held: float(held[77_777]),
        lambda held: held.__setitem__(77_777, 3.0),
        "ndarray of ..., 1.0, 1.0,",
        "ndarray of ..., 3.0, 1.0,",
    ),
    "array of another shape": (
        lambda: np.ones((2, 3), dtype=np.int32),
        lambda held: float(held.sum() * len(held)),
        lambda held: held.resize((3, 3), refcheck=False),
        "ndarray of (2, 3), 'int32', 1, 1, 1, 1, 1, 1",
        "ndarray of (3, 3), 'int32', 1, 1, 1, 1, 1, 1, 0, 0, 0",
    ),
    "records": (
        lambda: np.zeros(500, dtype=[("k", "f8")]),
        lambda held: float(held["k"].sum()),
        lambda held: held["k"].__setitem__(400, 3.0),
        "ndarray of ..., 0, 0,",
        "ndarray of ..., 8, 64,",
    ),
    "bytes": (
        lambda: memoryview(bytearray(1000)),
        lambda held: float(held[900] + len(bytes(held))),
        lambda held: held.__setitem__(900, 7),
        "memoryview of ..., 0, 0,",
        "memoryview of ..., 7, 0,",
    ),
    "list": (
        lambda: [1] * 1000,
        sum,
        lambda held: held.__setitem__(990, 2),
        "list of ..., 1, 1,",
        "list of ..., 2, 1, 1, 1, 1, 1, 1, 1, 1, 1\n",
    ),
    "dict": (
        lambda: dict.fromkeys(range(1000), 1),
        lambda held: sum(held.values()),
        lambda held: held.__setitem__(990, 2),
        "{..., 990: 1, ",
        "{..., 990: 2, ",
    ),
    "text": (
        lambda: {"k": "a" * 10**6},
        lambda held: float(held["k"][0] == "a"),
        lambda held: held.update(k="b" * 10**6),
        "'aaa",
        "'bbb",
    ),
}


@pytest.mark.parametrize("case", LONG)
def test_a_message_is_short_and_shows_the_difference(case: str) -> None:
    make, read, change, old, new = LONG[case]
    held = make()
    step = fcg.graph_fn(lambda x: x * read(held))
    step(X)
    change(held)
    with pytest.raises(fcg.BakedValueError) as caught:
        step(X)
    assert f"traced {old}" in str(caught.value)
    assert f"now {new}" in str(caught.value)
    assert len(str(caught.value)) < 6000


# -- when a value is another one --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class D:
    value: Any


class Colour(enum.Enum):
    RED = 1


VALUES = st.recursive(
    st.one_of(
        st.booleans(),
        st.integers(0, 2),
        st.sampled_from([0.0, -0.0, 1.0, 2.0, 0j, -0j, "a", b"a", None, Colour.RED]),
        st.sampled_from([torch.float32, torch.bfloat16, torch.device("cpu"), torch.device("cuda", 1)]),
    ),
    lambda parts: st.one_of(st.lists(parts, max_size=2).map(tuple), st.frozensets(parts, max_size=2)),
    max_leaves=4,
)


def text(value: Any) -> Any:
    """What tells two values apart."""
    if isinstance(value, frozenset):
        return "set", frozenset(map(text, value))
    return tuple(map(text, value)) if isinstance(value, tuple) else repr(value)


@given(VALUES, VALUES)
@example(0.0, -0.0)
@example(1, True)
@example(1, 1.0)
@example(None, 0)
@example((1, 2.0), (1, -2.0))
@example(((1,),), ((True,),))
def test_a_value_is_another_one_if_and_only_if_its_text_is(one: Any, other: Any) -> None:
    held = SimpleNamespace(value=one)
    step = fcg.graph_fn(lambda x: (x, (held.value,)))
    step(X)
    held.value = pickle.loads(pickle.dumps(one))
    step(X)  # equal, not identical
    held.value = other
    got = outcome(lambda: step(X)[1][0])
    if isinstance(got, fcg.BakedValueError):
        assert text(one) != text(other), got
    else:
        assert text(got) == text(other)


PAIRS = [
    (D(True), D(1)),
    (D(2), D(2.0)),
    (D((0.0,)), D((-0.0,))),
    (D(D(1)), D(D(True))),
    (2, 2.0),
    (1, True),
    (0.0, -0.0),
    ((1, (2.0,)), (1, (2,))),
    (decimal.Decimal("1.0"), decimal.Decimal("1.00")),
    (frozenset({1}), frozenset({True})),
    (frozenset({(0.0,)}), frozenset({(-0.0,)})),
    (complex(0.0, 0.0), complex(0.0, -0.0)),
    (np.float32(0.0), np.float32(-0.0)),
    (fractions.Fraction(1), 1),
]


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_static_arguments_that_python_calls_equal_have_graphs_of_their_own(one: Any, other: Any) -> None:
    step = fcg.graph_fn(lambda x, how: x * len(repr(how)), static_argnames="how")
    for how in (one, other, one, other, copy.deepcopy(one)):
        assert step(X, how=how).tolist() == (X * len(repr(how))).tolist()
    assert step.stats.traces == 2


@pytest.mark.parametrize(("one", "other"), [pair for pair in PAIRS if isinstance(pair[0], D)])
def test_input_objects_that_python_calls_equal_are_other_layouts(one: Any, other: Any) -> None:
    step = fcg.graph_fn(lambda x, how: x * len(repr(how)), max_captures=2)
    for how in (one, other, one, other):
        assert step(X, how).tolist() == (X * len(repr(how))).tolist()
    assert step.stats.traces == 2


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict])
def test_the_order_of_a_static_dict_counts(kind: Any) -> None:
    held = SimpleNamespace(table=kind(a=1, b=2))
    step = fcg.graph_fn(lambda x: x * float(next(iter(held.table.values()))))
    assert torch.equal(step(X), X)
    held.table = kind(a=1, b=2)
    assert torch.equal(step(X), X)
    held.table = kind(b=2, a=1)
    with pytest.raises(fcg.BakedValueError, match=r"held\.table"):
        step(X)


# -- states, batches, static arguments --------------------------------------------------------------------------------


def test_attributes_of_a_states_class_are_compared() -> None:
    class State(fcg.TrainState):
        rate = 2.0

        def scaled(self, x: Any) -> Any:
            return x * self.rate

    state = State.create(params={"w": X}, optimizer=fcg.optim.sgd(0.1))
    step = fcg.graph_fn(lambda state, x: state.scaled(x))
    assert step(state, X).tolist() == [2.0, 4.0]
    State.rate = 5.0
    with pytest.raises(fcg.BakedValueError, match=r"rate  traced 2.0   now 5.0"):
        step(state, X)
    State.rate = 2.0
    step(state, X)
    State.scaled = lambda self, x: x * 7  # type: ignore[method-assign,assignment]
    with pytest.raises(fcg.BakedValueError, match="scaled  traced as defined then   now defined anew"):
        step(state, X)


def test_a_method_of_a_batch_is_compared() -> None:
    @fcg.tree.register_dataclass
    @dataclasses.dataclass
    class Batch:
        x: Any

        def scaled(self) -> Any:
            return self.x * 2

    step = fcg.graph_fn(lambda batch: batch.scaled())
    assert step(Batch(X)).tolist() == [2.0, 4.0]
    Batch.scaled = lambda self: self.x * 5  # type: ignore[method-assign]
    with pytest.raises(fcg.BakedValueError, match=r"Batch\.scaled"):
        step(Batch(X))


class WithSlots:
    __slots__ = ("lr",)

    def __init__(self) -> None:
        self.lr = 2.0


@pytest.mark.parametrize("kind", [WithSlots, Cfg])
@pytest.mark.parametrize("static", ["a field", "an argument"])
def test_what_is_read_of_what_is_static_is_compared(kind: Any, static: str) -> None:
    @fcg.tree.register_dataclass(static=["cfg"])
    @dataclasses.dataclass
    class State:
        w: Any
        cfg: Any

    cfg: Any = Cfg()
    cfg.inner = kind()
    named: dict[str, Any] = {}
    if static == "a field":
        step, first = fcg.graph_fn(lambda state: state.w * state.cfg.inner.lr), fcg.place(State(X, cfg))
    else:
        step, first = fcg.graph_fn(lambda x, cfg: x * cfg.inner.lr, static_argnames="cfg"), X
        named["cfg"] = cfg
    assert step(first, **named).tolist() == [2.0, 4.0]
    cfg.inner.lr = 5.0
    with pytest.raises(fcg.BakedValueError, match=r"inner\.lr  traced 2.0   now 5.0"):
        step(first, **named)


def test_another_part_of_a_state_is_another_argument() -> None:
    """Of one arena, one layout and one generation: what tells them apart is where they start."""
    double = fcg.graph_fn(lambda part: part["w"] * 2)
    state: Any = fcg.place({"p": {"w": torch.tensor([1.0])}, "q": {"w": torch.tensor([2.0])}})
    for part, twice in (("p", 2.0), ("q", 4.0), ("p", 2.0), ("q", 4.0)):
        assert double(state[part]).item() == twice


# -- what a step keeps alive ------------------------------------------------------------------------------------------

KEPT: dict[str, Callable[[Any], float]] = {
    "attribute": lambda held: held["part"].lr,
    "item of an attribute": lambda held: held["part"].parts[0],
    "all of an attribute": lambda held: sum(held["part"].parts),
    "loop": lambda held: sum(part.lr for part in (held["part"],)),
    "vars": lambda held: vars(held["part"])["lr"],
}


@pytest.mark.parametrize("read", KEPT)
def test_a_step_keeps_nothing_alive_that_the_program_has_replaced(read: str) -> None:
    def part(lr: float) -> Any:
        made = Cfg(lr)
        made.parts = [lr]  # type: ignore[attr-defined]
        return made

    held = {"part": part(2.0)}
    step = fcg.graph_fn(lambda x: x * KEPT[read](held))
    step(X)
    first = weakref.ref(held["part"])
    held["part"] = part(2.0)
    gc.collect()
    assert first() is None
    assert step(X).tolist() == [2.0, 4.0]
    held["part"] = part(3.0)
    with pytest.raises(fcg.BakedValueError):
        step(X)
