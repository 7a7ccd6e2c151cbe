"""A compiled CPU step that raises midway leaves the state unchanged, and names the user's line."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import functional_cg as fcg
from functional_cg.testing import assert_trees_all_equal
from tests.shares import share

MANY = 200_000  # a loop over as many runs on several threads, where an exception ends the process


@torch.library.custom_op("fcg_tests::refuse_seven", mutates_args=())
def refuse_seven(x: Tensor) -> Tensor:
    if bool((x == 7).any()):
        raise ValueError("seven is refused")
    return x.clone()


@refuse_seven.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("fcg_tests::huge_for_seven", mutates_args=())
def huge_for_seven(x: Tensor) -> Tensor:
    return x.clone() if not bool((x == 7).any()) else torch.empty(2**60)


@huge_for_seven.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def rows(state: Any, i: Tensor) -> Tensor:
    return state["table"][i]


def columns(state: Any, i: Tensor) -> Tensor:
    return state["table"].T[:, i]


def embedding(state: Any, i: Tensor) -> Tensor:
    return torch.nn.functional.embedding(i, state["table"])


def gathered(state: Any, i: Tensor) -> Tensor:
    return state["table"].gather(0, i[:, None])


def selected(state: Any, i: Tensor) -> Tensor:
    return state["table"].index_select(0, i)


def taken(state: Any, i: Tensor) -> Tensor:
    return torch.take(state["table"], i)


def put(state: Any, i: Tensor) -> Tensor:
    return state["table"].index_put((i,), torch.ones(2))


def added(state: Any, i: Tensor) -> Tensor:
    return state["table"].index_add(0, i, torch.ones(len(i), 2))


def scattered(state: Any, i: Tensor) -> Tensor:
    return state["table"].scatter_add(0, i[:, None], torch.ones(len(i), 1))


def filled(state: Any, i: Tensor) -> Tensor:
    return state["table"].index_fill(0, i, 1.0)


def loss_of(state: Any, i: Tensor) -> Tensor:
    return torch.nn.functional.nll_loss(state["table"].T.sum(0).log_softmax(0).expand(len(i), 100), i)


def gradient(state: Any, i: Tensor) -> Tensor:
    """Of the rows nothing is read but their gradient."""
    return fcg.grad(lambda table: torch.nn.functional.embedding(i, table).sum())(state["table"])


def quotient(state: Any, i: Tensor) -> Tensor:
    return torch.div(9, i - 7, rounding_mode="trunc") + torch.div(i, i - 7, rounding_mode="trunc")


def rounded_down(state: Any, i: Tensor) -> Tensor:
    return i // (i - 7)


def rest(state: Any, i: Tensor) -> Tensor:
    return (3 * i) % (i - 7)


def entropy(state: Any, i: Tensor) -> Tensor:
    return torch.nn.functional.binary_cross_entropy(i / 50, torch.ones(len(i)))


def refused(state: Any, i: Tensor) -> Tensor:
    return refuse_seven(i)


def too_large(state: Any, i: Tensor) -> Tensor:
    return huge_for_seven(i)


def singular(state: Any, i: Tensor) -> Tensor:
    return torch.linalg.cholesky(torch.eye(3) - 2 * (i == 100).any() * torch.eye(3))


INDEXED = (rows, columns, embedding, gradient, gathered, selected, taken, put, added, scattered, filled)


def assert_atomic(looked_up: Callable[..., Tensor], good: Tensor, bad: Tensor, error: Any) -> None:
    """A step that updates leaves before and after a call that raises, in every order of names."""

    def train_step(state: Any, i: Tensor) -> Any:
        found = looked_up(state, i)
        new = {
            "a": state["a"] + 1,
            "n": state["n"] + 1,
            "table": state["table"] * 2,
            "z": state["z"] - found.sum(),
        }
        return new, {"found": found, "old": state["a"].clone()}

    start = {"a": torch.zeros(5), "n": torch.tensor(0), "table": torch.randn(100, 2), "z": torch.zeros(3)}
    state, step = fcg.place(start), fcg.graph_step(train_step, lowering="inductor")
    for _ in range(2):
        state, _ = step(state, good)
    before = fcg.snapshot(state)
    with pytest.raises(error) as caught:
        step(state, bad)
    lines, first = inspect.getsourcelines(looked_up)
    place = f"test_host_errors.py:{first + len(lines) - 1}"
    assert (
        f"`train_step`: raised by its replay, at {place}; the state is unchanged." in caught.value.__notes__
    )
    assert state.generation == 2
    assert_trees_all_equal(state, before)
    twin = fcg.fork(state)
    state, _ = step(state, good)
    twin, _ = step.eager(twin, good)
    torch.testing.assert_close(fcg.snapshot(state), fcg.snapshot(twin), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("looked_up", share(INDEXED, 4), ids=lambda function: function.__name__)
def test_an_index_out_of_range(looked_up: Callable[..., Tensor]) -> None:
    good = torch.arange(16)
    assert_atomic(looked_up, good, good.clone().index_fill(0, torch.tensor([3]), 1000), IndexError)


# Of a table [4, 3] and indices; along both dimensions, with all options that change what is allowed.
LOOKUPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index": lambda t, i: t[i],
    "index of columns": lambda t, i: t[:, i],
    "index of both": lambda t, i: t[i.clamp(0, 3), i],
    "index_put": lambda t, i: t.index_put((i,), t[:2]),
    "index_put of columns": lambda t, i: t.index_put((i.clamp(0, 1), i), t[0, :2], accumulate=True),
    "gather": lambda t, i: t.gather(0, i[:, None]),
    "gather of columns": lambda t, i: t.gather(-1, i[:, None]),
    "gather of a number": lambda t, i: t.sum().gather(0, i[:1]),
    "scatter": lambda t, i: t.scatter(0, i[:, None], t),
    "scatter_add": lambda t, i: t.scatter_add(1, i[:, None], t),
    "scatter_reduce": lambda t, i: t.scatter_reduce(1, i[:, None], t, "amax"),
    "index_select": lambda t, i: t.index_select(1, i),
    "index_add": lambda t, i: t.index_add(0, i, t[:2]),
    "index_copy": lambda t, i: t.index_copy(1, i, t[:, :2]),
    "index_fill": lambda t, i: t.index_fill(0, i, 1.0),
    "index_reduce": lambda t, i: t.index_reduce(0, i, t[:2], "amin"),
    "embedding": lambda t, i: F.embedding(i, t),
    "its gradient": lambda t, i: fcg.grad(lambda w: F.embedding(i, w, padding_idx=1).sum())(t),
    "nll_loss": lambda t, i: F.nll_loss(t[:2], i),
    "nll_loss that ignores": lambda t, i: F.nll_loss(t[:2], i, ignore_index=-1),
    "nll_loss of one": lambda t, i: F.nll_loss(t[0], i[0]),
    "nll_loss of images": lambda t, i: F.nll_loss(t[None, :, :2], i[None] * torch.ones(1, 1, dtype=i.dtype)),
    "its gradient, of one": lambda t, i: fcg.grad(lambda w: F.nll_loss(w[0] * w[0], i[0]))(t),
    "take": lambda t, i: t.take(i),
    "put": lambda t, i: t.put(i, t[0, :2]),
}


@pytest.mark.filterwarnings("ignore:index_reduce.. is in beta")
def test_an_index_is_refused_where_the_function_refuses_it() -> None:
    """The first and the last index that are allowed, and those next to them, of every op that takes indices."""
    lookups = dict(share(LOOKUPS.items(), 2))

    def looked_up(t: Tensor, i: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: found(t, i[name]) for name, found in lookups.items()}

    def train_step(state: Any, i: dict[str, Tensor]) -> Any:
        return {"t": state["t"] + 1}, looked_up(state["t"], i)

    def raises(act: Callable[..., Any], *args: Any) -> bool:
        try:
            act(*args)
        except (IndexError, RuntimeError):
            return True
        return False

    step = fcg.graph_step(train_step, lowering="inductor")
    fine = {name: torch.tensor([0, 0]) for name in lookups}
    state, _ = step({"t": torch.arange(12.0).view(4, 3)}, fine)
    refused, wrong = 0, []
    for name, found in lookups.items():
        for index in (-13, -12, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 11, 12):
            table, i = fcg.snapshot(state)["t"], torch.tensor([index, 0])
            expected = raises(found, table, i)
            if raises(step, state, {**fine, name: i}) != expected:
                wrong.append((name, index))
            state = state.latest()
            assert torch.equal(state["t"], table) == expected
            refused += expected
    assert wrong == []
    assert 3 * len(lookups) < refused < 14 * len(lookups)


@pytest.mark.parametrize(
    "looked_up", share([embedding, rows, loss_of], 3), ids=lambda function: function.__name__
)
def test_an_index_out_of_range_among_many(looked_up: Callable[..., Tensor]) -> None:
    good = torch.arange(MANY) % 100
    assert_atomic(looked_up, good, good.clone().index_fill(0, torch.tensor([MANY // 2]), 1000), IndexError)


@pytest.mark.parametrize(
    ("looked_up", "bad", "error"),
    [
        (refused, 7, ValueError),
        (too_large, 7, RuntimeError),
        (singular, 100, RuntimeError),
        (quotient, 7, RuntimeError),
        (rounded_down, 7, RuntimeError),
        (rest, 7, RuntimeError),
        (entropy, 100, RuntimeError),
    ],
    ids=[
        "an op of one's own",
        "memory",
        "a singular matrix",
        "a quotient",
        "rounded down",
        "a rest",
        "an entropy",
    ],
)
def test_what_else_raises(looked_up: Callable[..., Tensor], bad: int, error: type[Exception]) -> None:
    assert_atomic(looked_up, torch.arange(3), torch.tensor([1, bad, 2]), error)


def test_indices_from_the_end_are_fine() -> None:
    def train_step(state: Any, i: Tensor) -> Any:
        new = state["w"].index_put((i,), torch.ones(2)).index_fill(0, i[:1], 5.0)
        return {"w": new}, {"rows": state["w"][i], "taken": torch.take(state["w"], i)}

    state, step = fcg.place({"w": torch.randn(6, 2)}), fcg.graph_step(train_step, lowering="inductor")
    twin = fcg.fork(state)
    for i in (torch.tensor([-1, 0, -6]), torch.tensor([5, -3, 2])):
        twin, expected = step.eager(twin, i)
        state, metrics = step(state, i)
        assert_trees_all_equal((state, metrics), (twin, expected))
