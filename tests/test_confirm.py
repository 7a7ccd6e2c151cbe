"""A value on the host moves: the step goes on if it would do the same, and raises if not."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import functional_cg as fcg
from functional_cg.testing import assert_trees_all_equal
from functional_cg.testing.simulator import Simulator

pytestmark = pytest.mark.usefixtures("scalar_loops")

X = torch.tensor([1.0, -2.0])
COUNT = 0

# The function of a step, what changes before each call, and the change that the step must not miss.
Case = tuple[Callable[[Any, Tensor], Any], Callable[[int], None], Callable[[], None], Callable[[], None]]


def trained(w: Tensor, x: Tensor, rate: float) -> Any:
    return {"w": w - rate * x}, {"loss": (w * x).sum()}


def a_counter() -> Case:
    hold = types.SimpleNamespace(count=0)

    def f(state: Any, x: Tensor) -> Any:
        return trained(state["w"], x, 0.5 if hold.count >= 1000 else 0.25)

    def at(count: int) -> Callable[..., None]:
        return lambda *_: setattr(hold, "count", count)

    return f, lambda n: at(n + 1)(), at(1000), at(3)


def a_global_counter() -> Case:
    def f(state: Any, x: Tensor) -> Any:
        return trained(state["w"], x, 0.5 if COUNT == 1000 else 0.25)

    def put(count: int) -> None:
        global COUNT
        COUNT = count

    put(0)
    return f, lambda n: put(n + 1), lambda: put(1000), lambda: put(0)


def a_list_that_grows() -> Case:
    history: list[int] = []

    def f(state: Any, x: Tensor) -> Any:
        return trained(state["w"], x, 0.5 if len(history) > 100 else 0.25)

    return f, history.append, lambda: history.extend(range(200)), lambda: history.__delitem__(slice(50, None))


def a_dict_that_grows() -> Case:
    table: dict[Any, float] = {"rate": 0.25}

    def f(state: Any, x: Tensor) -> Any:
        return trained(state["w"], x, table["rate"])

    return (
        f,
        lambda n: table.update({n: 1.0}),
        lambda: table.update(rate=0.5),
        lambda: table.update(rate=0.25),
    )


def a_flag_without_effect() -> Case:
    hold = types.SimpleNamespace(flag=False)

    def f(state: Any, x: Tensor) -> Any:
        rate = 0.25
        if hold.flag is None:
            rate = 0.5
        elif hold.flag:
            rate = 1 / 4
        return trained(state["w"], x, rate)

    def put(flag: Any) -> Callable[[], None]:
        return lambda: setattr(hold, "flag", flag)

    return f, lambda n: put(n % 2 == 0)(), put(None), put(True)


def an_equal_object_anew() -> Case:
    hold = types.SimpleNamespace(config=types.SimpleNamespace(rate=0.25))

    def f(state: Any, x: Tensor) -> Any:
        return trained(state["w"], x, hold.config.rate)

    def put(rate: float) -> Callable[..., None]:
        return lambda *_: setattr(hold, "config", types.SimpleNamespace(rate=rate))

    return f, put(0.25), put(0.5), put(0.25)


CASES: dict[str, tuple[Callable[[], Case], str]] = {
    "counter": (a_counter, "hold.count"),
    "global counter": (a_global_counter, "COUNT"),
    "list that grows": (a_list_that_grows, "len(history)"),
    "dict that grows": (a_dict_that_grows, 'table["rate"]'),
    "flag without effect": (a_flag_without_effect, "hold.flag"),
    "equal object": (an_equal_object_anew, "hold.config.rate"),
}
OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "aten": lambda: {"lowering": "aten"},
    "verified": lambda: {"debug": "verify"},
    "simulated": lambda: {"backend": Simulator()},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("make", "name"), CASES.values(), ids=CASES)
def test_a_step_goes_on_until_its_program_changes(
    make: Callable[[], Case], name: str, options: Callable[[], dict[str, Any]], recwarn: Any
) -> None:
    f, change, decide, undo = make()
    step = fcg.graph_step(f, **options())
    state, judge = fcg.place({"w": torch.ones(2)}), {"w": torch.ones(2)}

    def call(where: str) -> None:
        nonlocal state, judge
        judge, expected = f(judge, X)
        state, metrics = step(state, X)
        assert_trees_all_equal((fcg.snapshot(state), metrics), (judge, expected), where)

    for n in range(16):
        call(f"call {n}")
        assert n > 0 or step.stats.traces == 1
        change(n)
    said = [str(one.message) for one in recwarn]
    often = [text for text in said if "such a call traces the step again" in text]
    assert len(often) == (step.stats.traces > 4)
    assert all(name in text and "To fix: " in text for text in often)
    decide()
    for _ in range(2):
        with pytest.raises(fcg.BakedValueError) as caught:
            step(state, X)
        message = str(caught.value)
        assert f"\n  {name}  traced " in message
        assert "\n  first call that differs  traced t" in message
        assert f", at {__file__.rpartition('/')[2]}:" in message.replace(
            __file__, __file__.rpartition("/")[2]
        )
    undo()
    call("after the refusal")
    assert step.stats.captures == 1


@given(st.lists(st.integers(0, 6), min_size=1, max_size=8), st.integers(0, 6))
def test_a_step_goes_on_exactly_as_long_as_it_does_the_same(counts: list[int], limit: int) -> None:
    hold = types.SimpleNamespace(count=counts[0])
    f = fcg.graph_fn(lambda x: x * 2 if hold.count >= limit else x * 3)
    for count in counts:
        hold.count = count
        expected = X * 2 if count >= limit else X * 3
        if (count >= limit) == (counts[0] >= limit):
            assert_trees_all_equal(f(X), expected, f"count {count}")
        else:
            with pytest.raises(fcg.BakedValueError, match=r"hold\.count  traced"):
                f(X)
    assert f.stats.captures == 1


def of_a_flag(choose: Callable[[bool, Tensor, Tensor], Any]) -> tuple[Any, Any]:
    """Return a step that computes two values in any case, and what has the flag that says where they go."""
    hold = types.SimpleNamespace(flag=False)

    @fcg.graph_step
    def step(state: Any, x: Tensor) -> Any:
        return choose(hold.flag, state["w"] + 1, state["v"] + 2)

    return step, hold


def shows(act: Callable[[Tensor], None]) -> Callable[[bool, Tensor, Tensor], Any]:
    def choose(flag: bool, a: Tensor, b: Tensor) -> Any:
        act(a if flag else b)
        return {"w": a, "v": b}, {}

    return choose


PLACES: dict[str, Callable[[bool, Tensor, Tensor], Any]] = {
    "new state": lambda flag, a, b: ({"w": a, "v": b} if flag else {"w": b, "v": a}, {}),
    "metrics": lambda flag, a, b: ({"w": a, "v": b}, {"m": a if flag else b}),
    "number": lambda flag, a, b: ({"w": a, "v": b}, {"m": 1 if flag else 1.0}),
    "names": lambda flag, a, b: ({"w": a, "v": b}, {"m" if flag else "n": a}),
    "literal": lambda flag, a, b: ({"w": a * torch.tensor([1.0, 2.0 + flag]), "v": b}, {}),
    "printed": shows(lambda one: fcg.debug_print("{}", one)),
    "tapped": shows(lambda one: fcg.tap("one", one)),
}


@pytest.mark.parametrize("choose", PLACES.values(), ids=PLACES)
def test_what_leaves_a_step_by_another_way_is_another_program(choose: Any) -> None:
    step, hold = of_a_flag(choose)
    state = fcg.place({"w": torch.ones(2), "v": torch.zeros(2)})
    state, _ = step(state, X)
    hold.flag = True
    with pytest.raises(fcg.BakedValueError, match=r"hold\.flag  traced False   now True"):
        step(state, X)
    hold.flag = False
    step(state, X)


def test_an_error_of_the_step_says_what_has_changed() -> None:
    hold = types.SimpleNamespace(rate=0.5)

    def scaled(x: Tensor) -> Tensor:
        if hold.rate < 0:
            raise ValueError("a rate is positive")
        return x * hold.rate

    f = fcg.graph_fn(scaled)
    f(X)
    hold.rate = -1.0
    with pytest.raises(
        fcg.BakedValueError, match=r"hold\.rate  traced 0\.5   now -1\.0(.|\n)*raised ValueError"
    ):
        f(X)
    hold.rate = 0.5
    assert_trees_all_equal(f(X), X * 0.5)


def test_what_a_new_branch_does_to_the_host_is_refused_as_at_a_first_call() -> None:
    hold = types.SimpleNamespace(flag=False, calls=0)

    def doubled(x: Tensor) -> Tensor:
        if hold.flag:
            hold.calls += 1
        return x * 2

    f = fcg.graph_fn(doubled)
    f(X)
    hold.flag = True
    with pytest.raises(fcg.BakedValueError, match="the step now changes a value of the host") as caught:
        f(X)
    assert isinstance(caught.value.__cause__, fcg.SideEffectError)
    hold.flag = False
    assert_trees_all_equal(f(X), X * 2)


def test_a_module_that_takes_the_place_of_another_is_watched_from_then_on() -> None:
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    (one, params, _), (other, _, _) = map(fcg.from_module, models)
    hold = types.SimpleNamespace(apply=one)
    f = fcg.graph_fn(lambda params, x: hold.apply(params, {}, x)[0])
    expected = f(params, X)
    hold.apply = other
    assert_trees_all_equal(f(params, X), expected)
    models[1].weight.requires_grad_(False)
    with pytest.raises(fcg.BakedValueError, match="was changed after `from_module` copied it"):
        f(params, X)


def test_steps_that_share_traces_share_what_was_found() -> None:
    hold = types.SimpleNamespace(count=0)
    one = fcg.graph_fn(lambda x: x * 2 if hold.count < 9 else x)
    other = one.anew()
    one(X), other(X)
    hold.count = 1
    assert_trees_all_equal(one(X), X * 2)
    assert_trees_all_equal(other(X), X * 2)
    assert (one.stats.traces, other.stats.traces) == (2, 0)


def test_an_order_of_keys_is_looked_at_again() -> None:
    """Under the old value the order does not matter; under the new one it does, but not for the order of the trace."""
    hold = types.SimpleNamespace(flag=False)

    def first(batch: Any) -> Tensor:
        key = next(iter(batch)) if hold.flag else "a"
        return batch[key] * 2  # type: ignore[no-any-return]

    f = fcg.graph_fn(first)
    batch = {"a": X, "b": -X}
    turned = {"b": -X, "a": X}
    for given_batch in (batch, turned):
        assert_trees_all_equal(f(given_batch), X * 2)
    hold.flag = True
    try:
        got = f(turned)
    except fcg.FunctionalCGError:
        pass
    else:
        assert_trees_all_equal(got, -X * 2)
    assert_trees_all_equal(f(batch), X * 2)


def test_a_mode_of_torch_is_refused_without_a_trace() -> None:
    f = fcg.graph_fn(lambda x: x * 2)
    f(X)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(fcg.BakedValueError, match="are_deterministic_algorithms_enabled"):
            f(X)
    finally:
        torch.use_deterministic_algorithms(False)
    f(X)
    assert f.stats.traces == 1


def test_what_is_planned_without_a_call_is_asked_alike() -> None:
    hold = types.SimpleNamespace(rate=0.5)
    f = fcg.graph_fn(lambda x: x * hold.rate)
    f.lower(X)
    hold.rate = 0.25
    for ask in (f.lower, f.profile, f):
        with pytest.raises(fcg.BakedValueError, match=r"hold\.rate"):
            ask(X)
