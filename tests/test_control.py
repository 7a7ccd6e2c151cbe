"""``cond`` and ``scan``: against Python's own ``if`` and ``for``, in a captured step, and what they refuse."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad

import functional_cg as fcg
from functional_cg.testing import assert_replay_equals_eager, assert_trees_all_equal
from tests.shares import CALLS, share


@given(x=st.floats(-3, 3, width=32))
def test_cond_is_an_if(x: float) -> None:
    def yes(v: Tensor) -> Any:
        return {"value": v * 2, "parts": (v.sin(), v.long())}

    def no(v: Tensor) -> Any:
        return {"value": -v, "parts": (v.cos(), v.long() + 1)}

    value = torch.tensor(x)
    assert_trees_all_equal(fcg.cond(value > 0, yes, no, value), yes(value) if x > 0 else no(value))


def test_gradients_go_through_the_selected_branch_only() -> None:
    for x, expected in ((2.0, 3.0), (-2.0, -5.0)):
        got = fcg.grad(lambda v: fcg.cond(v > 0, lambda v: 3 * v, lambda v: -5 * v, v))(torch.tensor(x))
        assert float(got) == expected


class Root(torch.autograd.Function):
    """Not seen by what looks at calls of torch's functions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sqrt()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] / (2 * ctx.saved_tensors[0].sqrt())


LAYER = torch.nn.Linear(1, 1)
APPLY = fcg.from_module(LAYER)[0]
# (a side that is taken where x > 0, and whose derivatives are infinite or NaN elsewhere, the other side)
SIDES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "root": (lambda x: x.sqrt() * x, lambda x: x**3),
    "logarithm": (lambda x: x.log() * x, lambda x: -x),
    "both": (lambda x: (1 / x).sqrt(), lambda x: (-x).sqrt() + x.square()),
    "by a list": (lambda x: torch.cat([x.log()[None], x[None]]).sum(), lambda x: x.sin()),
    "by indices": (
        lambda x: (x.log() * torch.ones(2, 2))[torch.tensor(0), 1] + torch.stack([x, x.log()])[[0, 1]].sum(),
        lambda x: (x * torch.eye(2))[1, 1] * x + (x * torch.eye(2))[[0, 1]].sum(),
    ),
    "by a keyword": (lambda x: torch.pow(input=x, exponent=0.3), lambda x: x.exp()),
    "nested": (
        lambda x: fcg.cond(x <= 1, lambda: x.log() + (1 - x).sqrt(), lambda: (x - 1).log()),
        lambda x: fcg.cond(x < -1, lambda: (-1 - x).sqrt(), lambda: x * 2),
    ),
    "a module": (
        lambda x: APPLY({"weight": x.view(1, 1), "bias": x.log().view(1)}, {}, x.view(1, 1))[0].sum(),
        lambda x: APPLY({"weight": x.view(1, 1), "bias": x.view(1)}, {}, x.view(1, 1))[0].sum(),
    ),
    "of inner gradients": (lambda x: fcg.grad(lambda x: x.log() * x)(x), lambda x: x * 2),
    "a function of its own": (lambda x: Root.apply(x * 1) * x, lambda x: x),
}
POINTS = (0.0, 2.0, -2.0, 0.5, -0.5)


@pytest.mark.filterwarnings("ignore:.*depends on no leaf")
@pytest.mark.parametrize("closes_over", [True, False])
@pytest.mark.parametrize("kind", share(SIDES, 3))
def test_the_other_side_puts_no_nan_into_gradients(kind: str, *, closes_over: bool) -> None:
    """Of first and second order, in a step and under `torch.func`, they are those of an `if`."""
    yes, no = SIDES[kind]

    def by_cond(x: Tensor) -> Tensor:
        if closes_over:
            return fcg.cond(x > 0, lambda: yes(x), lambda: no(x))
        return fcg.cond(x > 0, yes, no, x)

    def orders(f: Callable[..., Tensor]) -> Callable[[Tensor], Any]:
        once = fcg.grad(lambda x: f(x * 1.0))
        return lambda x: (f(x), once(x), fcg.grad(once)(x))

    fn = fcg.graph_fn(orders(by_cond), lowering="aten")
    for number in POINTS:
        x = torch.tensor(number)
        expected = orders(yes if number > 0 else no)(x)
        torch.testing.assert_close(fn(x), expected, equal_nan=True)
        assert_trees_all_equal(fn(x), orders(by_cond)(x))
        if kind in ("root", "logarithm", "both"):
            torch.testing.assert_close(torch.func.grad(by_cond)(x), expected[1])
            torch.testing.assert_close(torch.func.jvp(by_cond, (x,), (torch.ones(()),))[1], expected[1])
    if kind in ("root", "logarithm", "both"):
        xs = torch.tensor(POINTS)
        expected = torch.stack(
            [orders(yes if number > 0 else no)(torch.tensor(number))[1] for number in POINTS]
        )
        torch.testing.assert_close(torch.vmap(torch.func.grad(by_cond))(xs), expected)
        torch.testing.assert_close(torch.func.grad(lambda xs: torch.vmap(by_cond)(xs).sum())(xs), expected)


@pytest.mark.cuda
@pytest.mark.parametrize("lowering", ["aten", "inductor"])
@pytest.mark.parametrize("kind", ["root", "both", "nested", "of inner gradients"])
def test_the_other_side_puts_no_nan_into_gradients_of_a_gpu(kind: str, lowering: Any) -> None:
    yes, no = SIDES[kind]

    def gradient(f: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        return fcg.grad(lambda x: f(x * 1.0))

    fn = fcg.graph_fn(gradient(lambda x: fcg.cond(x > 0, yes, no, x)), lowering=lowering)
    # For a compiler, minus zero is zero: the derivative of a root there is infinite, of either sign.
    for number in POINTS[1:] if kind == "both" else POINTS:
        x = torch.tensor(number).cuda()
        torch.testing.assert_close(fn(x), gradient(yes if number > 0 else no)(x), equal_nan=True)
    assert fn.stats.captures == 1


@given(
    n=st.integers(1, 5),
    reverse=st.booleans(),
    start=st.floats(-1, 1, width=32),
)
def test_scan_is_a_loop(n: int, start: float, *, reverse: bool) -> None:
    def body(carry: Any, x: Any) -> Any:
        new = {"a": carry["a"] * 0.5 + x["p"].sum(), "n": carry["n"] + 1}
        return new, (new["a"] * 2, x["q"] + carry["n"])

    torch.manual_seed(n)
    xs = {"p": torch.randn(n, 2), "q": torch.arange(n)}
    carry: Any = {"a": torch.tensor(start), "n": torch.tensor(0)}
    got = fcg.scan(body, carry, xs, reverse=reverse)
    ys: list[Any] = [None] * n
    for i in reversed(range(n)) if reverse else range(n):
        carry, ys[i] = body(carry, {"p": xs["p"][i], "q": xs["q"][i]})
    expected = carry, (torch.stack([y[0] for y in ys]), torch.stack([y[1] for y in ys]))
    assert_trees_all_equal(got, expected)


def test_scan_over_nothing_but_a_length() -> None:
    carry, ys = fcg.scan(lambda c, _: (c * 2, c), torch.tensor(1), None, length=4)
    assert int(carry) == 16
    assert ys.tolist() == [1, 2, 4, 8]


def recurrent(state: Any, xs: Tensor) -> Any:
    """A recurrent net through time, whose update is skipped where the loss is large."""

    def loss_fn(p: Any) -> Tensor:
        def cell(h: Tensor, x: Tensor) -> Any:
            h = torch.tanh(x @ p["in"] + h @ p["back"])
            return h, h @ p["out"]

        _, ys = fcg.scan(cell, torch.zeros(3, device=xs.device), xs)
        return (ys**2).mean()

    loss, grads = fcg.value_and_grad(loss_fn)(state.params)
    new = state.apply_gradients(grads)
    params = fcg.cond(loss < 0.2, lambda: new.params, lambda: fcg.tree.map(torch.clone, state.params))
    return new.replace(params=params), {"loss": loss, "taken": loss < 0.2}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_a_captured_step_is_the_eager_one(device: str) -> None:
    torch.manual_seed(0)
    params = {"in": torch.randn(2, 3), "back": torch.randn(3, 3), "out": torch.randn(3, 1)}
    params = {name: leaf.to(device) for name, leaf in params.items()}
    state = fcg.TrainState.create(params=params, optimizer=fcg.optim.sgd(0.05))
    twin, step = fcg.fork(state), fcg.graph_step(recurrent, lowering="aten")
    taken = []
    for call in range(CALLS):
        xs = torch.randn(5, 2, device=device)
        state, metrics = step(state, xs)
        twin, expected = step.eager(twin, xs)
        assert_trees_all_equal((state, metrics), (twin, expected), f"call {call}")
        taken.append(bool(metrics["taken"]))
    assert len(set(taken)) == 2, "both branches are to be seen"
    assert (step.stats.captures, step.stats.replays) == (1, CALLS)


@fcg.graph_step(lowering="aten")
def one_step(state: Any, batch: Any) -> Any:
    key = fcg.random.fold_in(state.key, state.step)

    def loss_fn(p: Any) -> Tensor:
        return ((fcg.random.dropout(key, batch["x"], 0.3) @ p["w"] - batch["y"]) ** 2).mean()

    loss, grads = fcg.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads), {"loss": loss, "step": state.step}


@fcg.graph_step(lowering="aten")
def four_steps(state: Any, batches: Any) -> Any:
    return fcg.scan(one_step, state, batches)


def test_steps_in_one_graph_are_as_many_calls() -> None:
    torch.manual_seed(0)
    optimizer = fcg.optim.chain(fcg.optim.clip_by_global_norm(1.0), fcg.optim.adamw(0.01, weight_decay=0.1))
    several = fcg.TrainState.create(params={"w": torch.randn(3)}, optimizer=optimizer, key=fcg.random.key(5))
    single = fcg.fork(several)
    for call in range(5):
        batches = {"x": torch.randn(4, 8, 3), "y": torch.randn(4, 8)}
        several, metrics = four_steps(several, batches)
        for i in range(4):
            single, expected = one_step(single, fcg.tree.map(lambda leaf, i=i: leaf[i].clone(), batches))
            assert_trees_all_equal(fcg.tree.map(lambda leaf, i=i: leaf[i], metrics), expected)
        assert_trees_all_equal(several, single, f"call {call}")
    assert metrics["step"].tolist() == [16, 17, 18, 19]
    assert (four_steps.stats.replays, one_step.stats.replays) == (5, 20)


@pytest.mark.parametrize(
    ("pred", "got"),
    [(True, "True"), (torch.ones(()), "f32[]@cpu"), (torch.tensor([True]), "bool[1]@cpu")],
    ids=["Python", "a number", "a vector"],
)
def test_a_condition_is_one_bool(pred: Any, got: str) -> None:
    with pytest.raises(
        TypeError, match=f"`pred` has to be a tensor of dtype bool and shape .., got {re.escape(got)}; a"
    ):
        fcg.cond(pred, torch.sin, torch.cos, torch.ones(2))


@pytest.mark.parametrize(
    ("other", "row"),
    [
        (lambda x: {"a": x.double()}, "false_fn['a']  expected f32[2]@cpu   got f64[2]@cpu"),
        (lambda x: {"a": x[:1]}, "false_fn['a']  expected f32[2]@cpu   got f32[1]@cpu"),
        (lambda x: {"a": 1.0}, "false_fn['a']  expected f32[2]@cpu   got 1.0"),
        (lambda x: {"b": x}, "false_fn['b']  expected nothing   got a leaf"),
    ],
    ids=["dtype", "shape", "a number", "structure"],
)  # fmt: skip
def test_branches_that_differ_are_refused(other: Any, row: str) -> None:
    with pytest.raises(fcg.LayoutError, match="`false_fn` is unlike true_fn") as error:
        fcg.cond(torch.tensor(True), lambda x: {"a": x}, other, torch.ones(2))
    assert row in str(error.value)


def test_loops_that_have_no_shape_are_refused() -> None:
    with pytest.raises(fcg.LayoutError, match=r"carry  expected f32\[\]@cpu   got f32\[2\]@cpu"):
        fcg.scan(lambda c, x: (c + x, c), torch.tensor(0.0), torch.ones(3, 2))
    with pytest.raises(fcg.LayoutError, match=r"y  expected f32\[\]@cpu   got f32\[1\]@cpu"):
        fcg.scan(lambda c, x: (c + 1, x if c is zero else x[None]), zero := torch.tensor(0), torch.ones(3))
    with pytest.raises(fcg.LayoutError, match=r"xs\['b'\]  expected a tensor \[n, ...\]   got f32\[2\]@cpu"):
        fcg.scan(lambda c, x: (c, x), torch.tensor(0), {"a": torch.ones(3), "b": torch.ones(2)})
    with pytest.raises(fcg.LayoutError, match=r"xs  expected a tensor \[4, ...\]   got f32\[3\]@cpu"):
        fcg.scan(lambda c, x: (c, x), torch.tensor(0), torch.ones(3), length=4)
    with pytest.raises(ValueError, match="there is no element"):
        fcg.scan(lambda c, x: (c, x), torch.tensor(0), torch.ones(0, 2))
    with pytest.raises(ValueError, match="there is no element"):
        fcg.scan(lambda c, x: (c, x), torch.tensor(0), None)
    with pytest.raises(ValueError, match="there is no element"):
        fcg.scan(lambda c, x: (c, x), torch.tensor(0), None, length=-1)
    with pytest.raises(TypeError, match=r"`length` has to be an integer, got 2\.5"):
        fcg.scan(lambda c, x: (c, x), torch.tensor(0), None, length=2.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"`fn` has to return a pair \(carry, y\), got Tensor"):
        fcg.scan(lambda c, x: c, torch.tensor(0), torch.ones(3))


@pytest.mark.parametrize("n", [1, 3])
def test_a_number_of_python_is_refused_and_a_tensor_does(n: int) -> None:
    with pytest.raises(fcg.LayoutError, match=r"y\['lr'\]  expected a tensor   got 0\.1") as error:
        fcg.scan(lambda c, x: (c, {"lr": 0.1}), torch.tensor(0), None, n)
    assert "a number as `torch.full((), 0.0)`" in str(error.value)
    assert fcg.scan(lambda c, x: (c, torch.full((), 0.1)), torch.tensor(0), None, n)[1].shape == (n,)
    with pytest.raises(fcg.LayoutError, match=r"carry  expected a tensor   got 0\n"):
        fcg.scan(lambda c, x: (c + x, c), 0, torch.ones(n))


def test_a_leaf_that_both_branches_return_is_not_selected() -> None:
    """It costs nothing, and is not taken for a new value that was dropped."""

    @fcg.graph_step(lowering="aten")
    def step(state: Any, x: Tensor) -> Any:
        new = fcg.cond(x > 0, lambda: {**state, "n": state["n"] + x}, lambda: state)
        return {**new, "kept": state["kept"]}, {}

    state = {"n": torch.zeros(()), "kept": torch.ones(3)}
    inspection = step.lower(state, torch.ones(())).inspection
    assert inspection.calls["aten.where.self"] == 1
    assert not inspection.dropped
    assert inspection.unchanged == ("state['kept']",)
    assert_replay_equals_eager(step, state, [torch.tensor(float(i % 3 - 1)) for i in range(6)])


def counted(s: Any, xs: Tensor) -> Any:
    number = 0

    def body(c: Tensor, x: Tensor) -> Any:
        nonlocal number
        number += 1
        return (c * 2 if number == 6 else c + x), c * number

    return fcg.scan(body, s["w"], xs)


def gated_late(s: Any, xs: Tensor) -> Any:
    class Gate:
        calls = 0

        def body(self, c: Tensor, x: Tensor) -> Any:
            self.calls += 1
            return (c * 2 if self.calls == 6 else c + x), c

    return fcg.scan(Gate().body, s["w"], xs)


def in_slots(s: Any, xs: Tensor) -> Any:
    class Gate:
        __slots__ = ("calls",)

        def __init__(self) -> None:
            self.calls = [0]

        def body(self, c: Tensor, x: Tensor) -> Any:
            self.calls[0] += 1
            return (c * 2 if self.calls[0] == 6 else c + x), c

    return fcg.scan(functools.partial(Gate().body), s["w"], xs)


def collected(s: Any, xs: Tensor) -> Any:
    seen: list[Tensor] = []

    def body(c: Tensor, x: Tensor) -> Any:
        seen.append(c * x)
        return c + x, None

    return fcg.scan(body, s["w"], xs)[0], torch.stack(seen)


def in_a_default(s: Any, xs: Tensor) -> Any:
    def body(c: Tensor, x: Tensor, seen: list[int] = []) -> Any:  # noqa: B006 - that is the point
        seen.append(1)
        return (c * 2 if len(seen) == 6 else c + x), c

    return fcg.scan(body, s["w"], xs)


def in_its_own_attribute(s: Any, xs: Tensor) -> Any:
    def body(c: Tensor, x: Tensor) -> Any:
        vars(body)["calls"] += 1
        return (c * 2 if vars(body)["calls"] == 6 else c + x), c

    vars(body)["calls"] = 0
    return fcg.scan(body, s["w"], xs)


def by_an_iterator(s: Any, xs: Tensor) -> Any:
    numbers = iter(range(100))
    return fcg.scan(lambda c, x: (c * 2 if next(numbers) == 6 else c + x, c), s["w"], xs)


def by_a_generator(s: Any, xs: Tensor) -> Any:
    def flags() -> Any:
        yield from (number == 6 for number in range(100))

    rest = flags()
    return fcg.scan(lambda c, x: (c * 2 if next(rest) else c + x, c), s["w"], xs)


def by_dice(s: Any, xs: Tensor) -> Any:
    dice = random.Random(4)
    return fcg.scan(lambda c, x: (c * 2 if dice.random() < 0.1 else c + x, c), s["w"], xs)


def by_a_cache(s: Any, xs: Tensor) -> Any:
    calls: list[int] = []

    @functools.lru_cache
    def count() -> int:
        calls.append(1)
        return len(calls)

    def body(c: Tensor, x: Tensor) -> Any:
        count.cache_clear()
        return (c * 2 if count() == 6 else c + x), c

    return fcg.scan(body, s["w"], xs)


def learning(s: Any, xs: Tensor) -> Any:
    def body(c: Tensor, x: Tensor) -> Any:
        loss, grads = fcg.value_and_grad(lambda p: ((p * x).tanh() ** 2).mean())(c)
        return c - 0.1 * grads, loss

    return fcg.scan(body, s["w"], xs, reverse=True)


def differentiated(s: Any, xs: Tensor) -> Any:
    def loss(p: Tensor) -> Tensor:
        c, ys = fcg.scan(lambda c, x: ((c * x + p).tanh(), c.sum()), p, xs)
        return (c * c).sum() + ys.sum()

    value, grads = fcg.value_and_grad(loss)(s["w"])
    return s["w"] - 0.1 * grads, value


def exchanged(s: Any, xs: Tensor) -> Any:
    (a, b), ys = fcg.scan(lambda c, x: ((c[1], c[0] + x), c[0]), (s["w"], s["w"] * 2), xs)
    return a, (b, ys)


def written(s: Any, xs: Tensor) -> Any:
    def body(c: Tensor, x: Tensor) -> Any:
        c = c.clone()
        c[0] = x.sum()
        return c.add_(x), c[:2]

    return fcg.scan(body, s["w"], xs)


def written_outside(s: Any, xs: Tensor) -> Any:
    total = torch.zeros(3)

    def body(c: Tensor, x: Tensor) -> Any:
        total.add_(x)
        return c + total, total.clone()

    c, ys = fcg.scan(body, s["w"], xs)
    return c, (ys, total)


def with_literals(s: Any, xs: Tensor) -> Any:
    return fcg.scan(lambda c, x: (c + torch.tensor([1.0, 2.0, 3.0]) * x, torch.zeros(2)), s["w"], xs)


def nested(s: Any, xs: Tensor) -> Any:
    def body(c: Tensor, x: Tensor) -> Any:
        inner, ys = fcg.scan(lambda c, k: (c + k * x, c), c, xs)
        return inner, ys.sum()

    return fcg.scan(body, s["w"], xs)


def viewed(s: Any, xs: Tensor) -> Any:
    return fcg.scan(lambda c, x: ((c.reshape(1, 3) + x).view(3), x.expand(2, 3)), s["w"], xs)


def selected(s: Any, xs: Tensor) -> Any:
    return fcg.scan(lambda c, x: (fcg.cond(c.sum() > 0, lambda: c - x, lambda: c + x), c), s["w"], xs)


def accumulated(s: Any, xs: Tensor) -> Any:
    weight = s["w"].detach().clone().requires_grad_()

    def body(c: Tensor, x: Tensor) -> Any:
        (weight * x * c).sum().backward()
        return c + 1, None

    return fcg.scan(body, s["w"], xs)[0], weight.grad


def mapped(s: Any, xs: Tensor) -> Any:
    def one(a: Tensor) -> Tensor:
        return fcg.scan(lambda c, x: (c + x * a, c * a), s["w"], xs)[1]  # type: ignore[no-any-return]

    return s["w"] + 1, torch.vmap(one)(xs[0])


def by_a_known_value(s: Any, xs: Tensor) -> Any:
    """A literal, and what is computed from it, may be read on the host."""

    def body(carry: Any, x: Tensor) -> Any:
        number, c = carry
        return (number + 1, c * 2 if number.item() == 6 else c + x), c

    (_, c), ys = fcg.scan(body, (torch.zeros((), dtype=torch.int64), s["w"]), xs)
    return c, ys


def by_a_bound_method(s: Any, xs: Tensor) -> Any:
    take = [float(number == 2) for number in range(9)].pop
    return fcg.scan(lambda c, x: (c * 2 if take() else c + x, c), s["w"], xs)


def on_a_tensor(s: Any, xs: Tensor) -> Any:
    box: Any = torch.zeros(1)
    box.calls = 0

    def body(c: Tensor, x: Tensor) -> Any:
        box.calls += 1
        return (c * 2 if box.calls == 6 else c + x), c

    return fcg.scan(body, s["w"], xs)


def by_identity(s: Any, xs: Tensor) -> Any:
    turns = (s["w"], s["w"] + 1, s["w"] + 2)
    scales = {turns[0]: 1.0, turns[1]: 2.0, turns[2]: 3.0}
    (_, _, c), ys = fcg.scan(lambda r, x: ((r[1], r[2], r[0]), r[0] * scales[r[0]] + x), turns, xs)
    return c / 4, ys


def with_tangents(s: Any, xs: Tensor) -> Any:
    with forward_ad.dual_level():
        weight = forward_ad.make_dual(s["w"], torch.ones(3))
        c, ys = fcg.scan(lambda c, x: (c + 1, weight * x), s["w"], xs)
        return c, forward_ad.unpack_dual(ys).tangent.clone()


BODIES = (
    *(counted, gated_late, in_slots, collected, in_a_default, in_its_own_attribute, by_an_iterator),
    *(by_a_generator, by_dice, by_a_cache, learning, differentiated, exchanged, written, written_outside),
    *(with_literals, nested, viewed, selected, accumulated, mapped, by_a_known_value, by_a_bound_method),
    *(on_a_tensor, by_identity, with_tangents),
)


@pytest.mark.parametrize("loop", BODIES)
def test_a_loop_in_a_step_is_the_loop_of_python(loop: Callable[[Any, Tensor], Any]) -> None:
    """Whatever its body keeps on the host from one time to the next, and however late that matters."""

    def step(s: Any, xs: Tensor) -> Any:
        new, metrics = loop(s, xs)
        return {"w": new / 8}, metrics

    captured, state = fcg.graph_step(step), fcg.place({"w": torch.tensor([0.1, 0.2, 0.3])})
    expected: Any = {"w": torch.tensor([0.1, 0.2, 0.3])}
    for call in range(CALLS):
        xs = torch.randn(9, 3, generator=torch.Generator().manual_seed(call))
        state, metrics = captured(state, xs)
        expected, twins = step(expected, xs)
        expected = {"w": expected["w"].detach()}
        assert_trees_all_equal((fcg.snapshot(state), metrics), (expected, twins))
