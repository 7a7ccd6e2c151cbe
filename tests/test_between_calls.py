"""What could silently leak from one call to the next: instances, constants, objects, keys, numbers, order."""

from __future__ import annotations

import copy
import datetime
import enum
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import functional_cg as fcg
from functional_cg import tree
from functional_cg.errors import (
    AliasError,
    BakedValueError,
    DonatedStateError,
    ForeignTensorError,
    LayoutError,
    SideEffectError,
)


def zeros() -> Any:
    return fcg.place({"w": torch.zeros(1)})


# --- methods ---------------------------------------------------------------------------------------------------


class Trainer:
    def __init__(self, k: float) -> None:
        self.k = k

    @fcg.graph_step
    def train(self, state: Any) -> Any:
        return {"w": state["w"] + self.k}, {}


class Tenfold(Trainer):
    @fcg.graph_step
    def train(self, state: Any) -> Any:
        state, metrics = super().train(state)
        return {"w": state["w"] * 10}, metrics


class Deeper(Tenfold):
    @fcg.graph_step
    def train(self, state: Any) -> Any:
        state, metrics = super().train(state)
        return {"w": state["w"] - 1}, metrics


@pytest.mark.parametrize(("cls", "expected"), [(Tenfold, [10, 110, 1110]), (Deeper, [9, 99, 999])])
def test_super_leads_to_the_step_of_the_parent_and_replaces_none(
    cls: type[Trainer], expected: list[int]
) -> None:
    trainer, state, seen = cls(1.0), zeros(), []
    for _ in range(3):
        state, _ = trainer.train(state)
        seen.append(state["w"].item())
    assert seen == expected
    assert trainer.train is trainer.train
    assert trainer.train.stats.captures == 1
    state, _ = super(cls, trainer).train(zeros())
    assert trainer.train.stats.replays == 3


def test_a_copy_of_an_instance_has_a_step_of_its_own() -> None:
    trainer, state = Trainer(1.0), zeros()
    state, _ = trainer.train(state)
    twin = copy.copy(trainer)
    twin.k = 5.0
    state, _ = twin.train(state)
    state, _ = trainer.train(state)
    assert state["w"].item() == 7.0
    assert twin.train is not trainer.train


# --- static arguments, constants, metrics ----------------------------------------------------------------------


def test_a_default_is_not_the_static_argument_of_the_call_before() -> None:
    step = fcg.graph_step(
        lambda s, x, flag=False: ({"w": s["w"] + (10 if flag else 1) * x}, {}), static_argnames="flag"
    )
    state, seen = zeros(), []
    for kwargs in ({"flag": True}, {}, {}, {"flag": True}, {"flag": False}):
        state, _ = step(state, 1.0, **kwargs)
        seen.append(state["w"].item())
    assert seen == [10, 11, 12, 22, 23]


def test_a_constant_written_before_another_lowering_is_noticed() -> None:
    table = torch.ones(1)
    step = fcg.graph_step(
        lambda s, k: ({"w": s["w"] + k * table}, {}), constants=(table,), static_argnames="k"
    )
    state, _ = step(zeros(), 1)
    table.add_(1)
    for k in (2, 1):
        with pytest.raises(BakedValueError, match=r"constants\[0\]  written 1 time"):
            step(state, k)


def test_a_constant_is_a_copy() -> None:
    table = torch.ones(1)
    step = fcg.graph_step(lambda s: ({"w": s["w"] + table}, {}), constants=(table,))
    state, _ = step(zeros())
    table.data.fill_(9.0)  # which torch does not count
    state, _ = step(state)
    assert state["w"].item() == 2.0


@pytest.mark.parametrize(
    "share",
    [
        torch.from_numpy,
        torch.from_dlpack,
        torch.as_tensor,
        lambda array: torch.frombuffer(array, dtype=torch.float32),
    ],
)
def test_memory_of_others_is_no_constant(share: Callable[[Any], Tensor]) -> None:
    table = share(np.ones(1, np.float32))
    with pytest.raises(ForeignTensorError, match=r"constants\['t'\]  f32\[1\]@cpu(.|\n)*table\.clone\(\)"):
        fcg.graph_step(lambda s: (s, table), constants={"t": table})
    table = table.clone()
    fcg.graph_step(lambda s: ({"w": s["w"] + table}, {}), constants={"t": table})(zeros())


def kind_of(value: object) -> str:
    return type(value).__name__


class Colour(enum.Enum):
    RED = 1


@dataclass(frozen=True)
class Fixed:
    name: str


class Log:
    pass


LOG = Log()


@pytest.mark.parametrize(
    "value", [{1, 2}, bytearray(2), LOG, [LOG], np.random.default_rng(0), iter(())], ids=kind_of
)
def test_objects_that_can_change_are_no_metrics(value: Any) -> None:
    step = fcg.graph_step(lambda s: (s, {"n": s["w"] + 1, "it": value}))
    with pytest.raises((SideEffectError, BakedValueError), match=r"metrics\['it'\]"):
        step(zeros())


@pytest.mark.parametrize(
    "value",
    [
        *(
            1,
            2.5,
            "text",
            b"b",
            None,
            True,
            1j,
            torch.float32,
            torch.Size([2]),
            torch.device("cpu"),
            len,
            Log,
        ),
        *(Colour.RED, Fixed("a"), frozenset({1}), datetime.date(2020, 1, 1), torch.strided, range(3)),
    ],
    ids=kind_of,
)
def test_plain_values_are_metrics(value: Any) -> None:
    step = fcg.graph_step(lambda s: (s, value))
    state = zeros()
    for _ in range(2):
        state, out = step(state)
        assert out == value


# --- numbers ---------------------------------------------------------------------------------------------------


@pytest.fixture
def doubles() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("doubles")
def test_python_floats_follow_the_default_dtype() -> None:
    state: Any = fcg.place({"lr": 1e-300, "x": np.float64(0.1)})
    assert [leaf.dtype for leaf in (state["lr"], state["x"])] == [torch.float64] * 2
    assert state["lr"].item() == 1e-300
    step = fcg.graph_step(lambda s, x: (s, x))
    for value in (1e300, 0.1):
        state, out = step(state, value)
        assert out.item() == value


def test_floats_that_float32_cannot_hold_are_refused() -> None:
    for value in (1e300, -1e39, np.float64(1e300)):
        with pytest.raises(LayoutError, match=r"float"):
            fcg.place({"a": value})
        step = fcg.graph_step(lambda s, x: (s, x))
        with pytest.raises(LayoutError, match=r"x  expected a dense tensor on cpu   got float"):
            step(zeros(), value)
    step = fcg.graph_step(lambda s, x: (s, x))
    state = zeros()
    for value in (3e38, float("inf"), -float("inf")):
        state, out = step(state, value)
        assert out.item() == pytest.approx(value)
    with pytest.raises(LayoutError, match="x"):
        step(state, 1e300)


@pytest.mark.parametrize(
    "make", [fcg.optim.sgd, fcg.optim.adam, fcg.optim.adagrad, fcg.optim.yogi, fcg.optim.rmsprop]
)
@pytest.mark.parametrize("how", ["schedule", "injected"])
def test_rates_of_double_parameters_are_double(make: Any, how: str) -> None:
    """0.1 in float32 is 1.5e-9 off: the first steps differ by it from those with a number."""
    params = {"w": torch.full((3,), 0.5, dtype=torch.float64)}
    optimizer = (
        make(fcg.optim.constant(0.1))
        if how == "schedule"
        else fcg.optim.inject_hyperparams(make)(learning_rate=0.1)
    )
    step = fcg.graph_step(lambda s: (s.apply_gradients({"w": s.params["w"] * 0 + 0.3}), {}))
    plain = fcg.graph_step(lambda s: (s.apply_gradients({"w": s.params["w"] * 0 + 0.3}), {}))
    ours = fcg.TrainState.create(params=params, optimizer=optimizer)
    theirs = fcg.TrainState.create(params=params, optimizer=make(0.1))
    for _ in range(3):
        (ours, _), (theirs, _) = step(ours), plain(theirs)
    torch.testing.assert_close(ours.params["w"].clone(), theirs.params["w"].clone(), rtol=1e-14, atol=0)


# --- keys and steps --------------------------------------------------------------------------------------------


def test_another_optimizer_goes_on_counting() -> None:
    state = fcg.TrainState.create(
        params={"w": torch.ones(2)}, optimizer=fcg.optim.sgd(0.1), key=fcg.random.key(0), step=5
    )
    adam = fcg.optim.adam(0.1)
    with pytest.raises(ValueError, match=r"would repeat the random numbers(.|\n)*step=state\.step"):
        fcg.TrainState.create(params=state.params, optimizer=adam, key=state.key)
    for step in (state.step, 5, torch.tensor(5)):
        other = fcg.TrainState.create(params=state.params, optimizer=adam, key=state.key, step=step)
        assert int(other.step) == 5
    fresh = fcg.TrainState.create(params=state.params, optimizer=adam, key=fcg.random.key(1))
    assert int(fresh.step) == 0
    for step in (1.5, True, "1", torch.ones(2, dtype=torch.int64)):
        with pytest.raises((TypeError, ValueError)):
            fcg.TrainState.create(params=state.params, optimizer=adam, step=step)  # type: ignore[arg-type]


def test_init_makes_each_parameter_from_a_key_of_its_own() -> None:
    shapes = {"a": torch.empty(3, device="meta"), "b": torch.empty(3, device="meta")}
    asked: list[str] = []

    def init(path: str, leaf: Tensor, key: Tensor) -> Tensor:
        asked.append(path)
        return fcg.random.normal(key, leaf.shape)

    def make(**more: Any) -> Any:
        return fcg.TrainState.create(params=shapes, optimizer=fcg.optim.sgd(0.1), init=init, **more)

    with pytest.raises(TypeError, match=r"`init` needs keys: `key=fcg\.random\.key\(seed\)`"):
        make()
    state = make(key=fcg.random.key(0), step=3)
    assert asked == ["params['a']", "params['b']"]
    assert not torch.equal(state.params["a"], state.params["b"])
    assert int(state.step) == 3


# --- order -----------------------------------------------------------------------------------------------------

names = st.lists(st.sampled_from("zyxabc"), min_size=1, max_size=6, unique=True)


@given(keys=names, kind=st.sampled_from([dict, OrderedDict]), data=st.data())
def test_dicts_come_back_in_the_order_in_which_they_were_put_in(
    keys: list[str], kind: Any, data: Any
) -> None:
    flat = kind((key, torch.full((2,), float(ord(key)))) for key in keys)
    nest = {"o": flat, "n": kind((key, flat[key].clone()) for key in reversed(keys))}
    assert [list(part) for part in tree.map(lambda leaf: leaf, nest).values()] == [keys, keys[::-1]]
    state: Any = fcg.place(nest)
    assert (list(state), list(state["o"]), list(state["n"])) == (["o", "n"], keys, keys[::-1])
    assert list(fcg.snapshot(state)["o"]) == keys
    for (name, leaf), value in zip(state["o"].items(), flat.values(), strict=True):
        assert torch.equal(leaf, value), name
    shuffled = {key: flat[key] for key in data.draw(st.permutations(keys))}
    assert tree.flatten(kind(shuffled))[1] == tree.flatten(flat)[1]
    assert list(tree.map(lambda a, b: a - b, flat, kind(shuffled))) == keys
    state = state.replace(o=kind(shuffled))
    assert list(state["o"]) == keys


def test_gradients_states_and_metrics_are_in_the_order_of_what_went_in() -> None:
    params = {"w": torch.ones(2), "b": torch.zeros(1), "a": {"z": torch.ones(1), "y": torch.ones(1)}}

    def loss_fn(p: Any) -> Tensor:
        return (p["w"] * 2).sum() + p["b"].sum() + p["a"]["z"].sum() * 3 + p["a"]["y"].sum() * 4

    _, grads = fcg.value_and_grad(loss_fn)(params)
    assert (list(grads), list(grads["a"])) == (["w", "b", "a"], ["z", "y"])
    assert [g.shape for g in tree.leaves(grads)] == [p.shape for p in tree.leaves(params)]
    seen: list[list[str]] = []

    @fcg.graph_step
    def step(state: Any) -> Any:
        loss, grads = fcg.value_and_grad(loss_fn)(state.params)
        seen.append([*state.params, *grads])
        new = state.apply_gradients(grads)
        return new.replace(params=dict(sorted(new.params.items()))), {"z": loss, "a": loss + 1}

    state = fcg.TrainState.create(params=params, optimizer=fcg.optim.adam(0.1))
    for _ in range(2):
        state, metrics = step(state)
        assert list(metrics) == ["z", "a"]
        assert (list(state.params), list(state.params["a"])) == (["w", "b", "a"], ["z", "y"])
        assert list(state.opt_state[0].mu) == ["w", "b", "a"]
    state, metrics = step.eager(state)
    assert (list(metrics), list(state.params)) == (["z", "a"], ["w", "b", "a"])
    # Once more in the order that it returns, which makes no difference here.
    assert seen.count(["a", "b", "w"] * 2) == 1
    assert seen.count(["w", "b", "a"] * 2) == len(seen) - 1


def test_states_with_keys_in_different_orders() -> None:
    """They share no trace if the function tells the orders apart; ``eager`` goes by the state that it gets."""

    def number(s: Any) -> Any:
        return {name: leaf + i for i, (name, leaf) in enumerate(s.items())}, {}

    step, twice = fcg.graph_step(number), fcg.graph_step(number, max_captures=2)
    for one in (step, twice):
        one(fcg.place({"a": torch.zeros(1), "b": torch.zeros(1)}))
    other: Any = fcg.place({"b": torch.zeros(1), "a": torch.zeros(1)})
    other, _ = step.eager(other)
    assert (other["b"].item(), other["a"].item()) == (0.0, 1.0)
    with pytest.raises(LayoutError, match="s  expected keys in the order 'a', 'b'   got 'b', 'a'"):
        step(other)
    other, _ = twice(other)
    assert (other["b"].item(), other["a"].item()) == (0.0, 2.0)
    assert list(other) == ["b", "a"]
    assert twice.stats.traces == 2


# --- parameters without a gradient -----------------------------------------------------------------------------

OPTIMIZERS = [
    fcg.optim.adamw(0.1, weight_decay=0.1),
    fcg.optim.chain(fcg.optim.clip_by_global_norm(0.5), fcg.optim.sgd(0.1, 0.9)),
    fcg.optim.adafactor(0.1),
    fcg.optim.partition({"a": fcg.optim.adamw(0.1, weight_decay=0.1), "b": fcg.optim.lion(0.1, weight_decay=0.1)},
                        {"w": "a", "head": {"w": "b", "b": "a"}}),
]  # fmt: skip


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda tx: type(tx).__name__)
@pytest.mark.parametrize("out", ["head", "leaf"])
def test_none_in_place_of_gradients_leaves_parameters_out(optimizer: Any, out: str) -> None:
    params = {"w": torch.ones(2), "head": {"w": torch.ones(2, 2), "b": torch.ones(1)}}
    state = fcg.TrainState.create(params=params, optimizer=optimizer)
    ones = tree.map(torch.ones_like, params)
    step = fcg.graph_step(
        lambda s, grads, whole: (s.apply_gradients(grads if whole else {**grads, "head": part(grads)}), {}),
        static_argnames="whole",
    )

    def part(grads: Any) -> Any:
        return None if out == "head" else {"w": grads["head"]["w"], "b": None}

    state, _ = step(state, ones, whole=True)
    before = dict(tree.flatten_with_path(fcg.snapshot(state.tree))[0])
    state, _ = step(state, ones, whole=False)
    after = dict(tree.flatten_with_path(fcg.snapshot(state.tree))[0])
    for path, leaf in after.items():
        ends = tree.path_string(path[-2:])
        left = "['head']" in ends if out == "head" else ends == "['head']['b']"
        if left:
            assert torch.equal(leaf, before[path]), path
    assert not torch.equal(state.params["w"], before[next(p for p in before if str(p[-1]) == "['w']")])


def test_a_parameter_that_the_loss_does_not_use_has_a_gradient_of_zeros() -> None:
    """It decays, as in JAX and unlike in torch, where it has no gradient."""
    state = fcg.TrainState.create(
        params={"used": torch.ones(1), "unused": torch.ones(1)},
        optimizer=fcg.optim.adamw(0.1, weight_decay=0.5),
    )
    step = fcg.graph_step(lambda s: (s.apply_gradients(fcg.grad(lambda p: p["used"].sum())(s.params)), {}))
    state, _ = step(state)
    assert state.params["unused"].item() == pytest.approx(0.95)


def test_gradients_that_are_missing_are_not_left_out() -> None:
    state = fcg.TrainState.create(
        params={"a": torch.ones(1), "b": torch.ones(1)}, optimizer=fcg.optim.sgd(0.1)
    )
    for grads in (
        {"a": None},
        {"a": torch.ones(1)},
        {"a": None, "c": torch.ones(1)},
        {"a": None, "b": torch.ones(2)},
    ):
        with pytest.raises(LayoutError, match="gradients are unlike the parameters"):
            state.tree.apply_gradients(grads)


# --- ownership -------------------------------------------------------------------------------------------------


def test_scalars_that_share_memory_are_refused() -> None:
    one = torch.tensor(1.0)
    for a, b in ((one, one), (one, one.view(1)), (one.expand(1)[0], one)):
        with pytest.raises(AliasError, match=r"state\['a'\](.|\n)*state\['b'\]"):
            fcg.place({"a": a, "b": b})


def test_an_eager_run_sees_inputs_in_their_strides() -> None:
    x = torch.arange(6.0).view(2, 3).T
    fn = fcg.graph_fn(lambda s, x: (x.stride(), x.sum()))
    assert fn.eager(zeros(), x)[0] == (1, 3)
    assert fn(zeros(), x)[0] == (1, 3)


def test_metrics_of_an_eager_run_are_the_callers() -> None:
    step = fcg.graph_step(lambda s: ({"w": s["w"] + 1}, {"old": s["w"], "again": s["w"], "view": s["w"][:1]}))
    state, metrics = step.eager(zeros())
    assert len({leaf.untyped_storage().data_ptr() for leaf in metrics.values()}) == 3
    metrics["old"].fill_(9.0)
    assert (metrics["again"].item(), metrics["view"].item(), state["w"].item()) == (0.0, 0.0, 1.0)
    outputs = fcg.graph_fn(lambda s: {"a": s["w"], "b": s["w"]}).eager(state)
    outputs["a"].fill_(9.0)
    assert (outputs["b"].item(), state["w"].item()) == (1.0, 1.0)


def test_an_eager_run_that_loses_its_state_meanwhile_writes_nothing() -> None:
    state = zeros()

    def fn(s: Any) -> Any:
        state.latest().replace(w=torch.full((1,), 5.0))
        return {"w": s["w"] + 1}, {}

    with pytest.raises(DonatedStateError):
        fcg.graph_step(fn).eager(state)
    assert state.latest()["w"].item() == 5.0


@pytest.mark.parametrize("initial", [2.0**127, 3e38, 1.0])
def test_a_loss_scale_stays_finite(initial: float) -> None:
    scale = fcg.LossScale.create(initial, growth_interval=1)
    for _ in range(3):
        scale = scale.adjusted(torch.tensor(True))
        assert torch.isfinite(scale.scale)
    assert scale.scale.item() >= initial


def test_fp8_scales_take_a_history_of_one() -> None:
    assert fcg.nn.Fp8Scaling.create(1, history=1) is not None
    for history in (0, -1):
        with pytest.raises(ValueError, match="history must be an int of 1 or more"):
            fcg.nn.Fp8Scaling.create(1, history=history)


def test_costs_as_a_dict_have_each_attribute_once() -> None:
    costs = fcg.graph_step(lambda s: ({"w": s["w"] + 1}, {})).lower(zeros()).cost_analysis(1.0)
    found = costs.as_dict()
    assert found.keys() == {*costs.__slots__, "distance"}
    assert all(isinstance(kind, dict) for kind in found["kinds"].values())
    assert (found["seconds"], found["distance"]) == (costs.seconds, costs.distance)
