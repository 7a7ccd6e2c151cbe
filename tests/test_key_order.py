"""A function sees the keys of its dicts in the order in which a call gives them, as where it is called by itself."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_cg as fcg
from functional_cg.errors import LayoutError

ROWS = {"src": torch.tensor([1.0, 2.0]), "dst": torch.tensor([3.0, 5.0]), "age": torch.tensor([7.0, 9.0])}


def unpacked(state: Any, batch: Any) -> Any:
    one, two, three = batch.values()
    return state, one - 2 * two + 4 * three


def concatenated(state: Any, batch: Any) -> Any:
    return state, torch.cat(list(batch.values()))


def looped(state: Any, batch: Any) -> Any:
    total = torch.zeros(2)
    for number, key in enumerate(batch):
        total = total + batch[key] * (number + 1)
    return state, total


def of_the_names(state: Any, batch: Any) -> Any:
    return state, {"order": ",".join(batch), "sum": batch["src"] + batch["dst"] + batch["age"]}


def of_the_first(state: Any, batch: Any) -> Any:
    return state, next(iter(batch.values()))


KINDS: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "defaultdict": lambda rows: defaultdict(list, rows),
}


def outcome(fn: Callable[..., Any], *args: Any) -> Any:
    try:
        return [one.tolist() if isinstance(one, Tensor) else one for one in fcg.tree.leaves(fn(*args)[1])]
    except LayoutError as error:
        return error


@pytest.mark.parametrize("fn", [unpacked, concatenated, looped, of_the_names, of_the_first])
@pytest.mark.parametrize("kind", KINDS)
def test_each_order_gives_what_the_function_gives_or_is_refused(fn: Any, kind: str) -> None:
    """The first order always runs; with a capture for each, all do."""
    orders = list(permutations(ROWS))
    for first, most in ((3, 1), (5, 1), (4, 6)):
        batches = [
            KINDS[kind]({key: ROWS[key] for key in one}) for one in (orders[first], *orders, orders[first])
        ]
        state, step = fcg.place(torch.zeros(1)), fcg.graph_step(fn, max_captures=most)
        for number, batch in enumerate(batches):
            got = outcome(step, state, batch)
            if isinstance(got, LayoutError):
                assert most == 1
                assert number
                assert "expected keys in the order" in str(got)
            else:
                assert got == outcome(fn, None, batch)
                state = state.latest()
        assert outcome(step.eager, state, batches[1]) == outcome(fn, None, batches[1])


@pytest.mark.parametrize("kind", KINDS)
def test_who_reads_by_name_is_not_refused_and_pays_for_one_capture(kind: str) -> None:
    step = fcg.graph_step(lambda state, batch: (state, batch["src"] - batch["dst"] * batch["age"]))
    state = fcg.place(torch.zeros(1))
    for _ in range(2):
        for order in permutations(ROWS):
            state, out = step(state, KINDS[kind]({key: ROWS[key] for key in order}))
            assert out.tolist() == [-20.0, -43.0]
    assert (step.stats.traces, step.stats.captures) == (1, 1)


def test_names_of_arguments() -> None:
    """Those that ``**more`` collects are in the order of the call, those of parameters are not seen."""

    def fn(state: Any, *, scale: Tensor, **more: Tensor) -> Any:
        one, two = more.values()
        return state, scale * one - two

    a, b, scale = torch.tensor(2.0), torch.tensor(3.0), torch.tensor(10.0)
    step, state = fcg.graph_step(fn, max_captures=2), fcg.place(torch.zeros(1))
    state, out = step(state, zeta=a, alpha=b, scale=scale)
    assert out == 17.0
    state, out = step(state, scale=scale, zeta=a, alpha=b)
    assert out == 17.0
    assert step.stats.traces == 1
    state, out = step(state, scale=scale, alpha=b, zeta=a)
    assert out == 28.0
    state, out = step(state, zeta=a, scale=scale, alpha=b)
    assert out == 17.0
    strict = fcg.graph_step(fn)
    state, _ = strict(state, scale=scale, alpha=b, zeta=a)
    with pytest.raises(LayoutError, match="arguments by name  expected alpha, zeta   got zeta, alpha"):
        strict(state, scale=scale, zeta=a, alpha=b)


def test_states() -> None:
    """A state keeps the order in which it was created; another one may come in another."""

    def fn(state: Any, x: Tensor) -> Any:
        first, second = state.values()
        return state, first - second * x

    step, x = fcg.graph_step(fn), torch.tensor(2.0)
    one = {"b": torch.tensor(1.0), "a": torch.tensor(5.0)}
    other = {"a": torch.tensor(5.0), "b": torch.tensor(1.0)}
    state, out = step(one, x)
    assert out == fn(one, x)[1] == -9.0
    with pytest.raises(LayoutError, match="state  expected keys in the order 'b', 'a'   got 'a', 'b'"):
        step(other, x)
    state, out = step(state, x)
    assert out == -9.0
    assert fcg.graph_fn(lambda state, x: fn(state, x)[1], max_captures=2)(fcg.place(other), x) == 3.0


@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_a_new_state_in_another_order(steps_per_call: int) -> None:
    """The next call would see it in the old one: refused where that makes a difference, and only there."""

    def depends(state: Any, x: Tensor) -> Any:
        first, second = state.values()
        return {"a": second + x, "b": first * 2}, first

    def by_name(state: Any, x: Tensor) -> Any:
        return {"a": state["a"] + x, "b": state["b"] * 2}, {"b": state["b"]}

    x = torch.ones(() if steps_per_call == 1 else (2,))
    tree = {"b": torch.tensor(1.0), "a": torch.tensor(5.0)}
    with pytest.raises(LayoutError, match="returns a new state with its keys in another order") as caught:
        fcg.graph_step(depends, steps_per_call=steps_per_call)(tree, x)
    assert "state  expected keys in the order 'b', 'a'   got 'a', 'b'" in str(caught.value)
    fixed = fcg.graph_step(
        lambda state, x: (lambda new, out: ({key: new[key] for key in state}, out))(*depends(state, x))
    )
    state, first = fixed(tree, torch.ones(()))
    state, second = fixed(state, torch.ones(()))
    assert (first, second) == (1.0, 2.0)
    step, state = fcg.graph_step(by_name, steps_per_call=steps_per_call), fcg.place(tree)
    for _ in range(3):
        state, _ = step(state, x)
    assert fcg.snapshot(state) == {"a": 5.0 + 3 * steps_per_call, "b": 2.0 ** (3 * steps_per_call)}
    assert list(state) == ["b", "a"]
