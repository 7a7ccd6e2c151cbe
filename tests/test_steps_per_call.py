"""Several steps in one graph: bitwise equal to as many calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import functional_cg as fcg
from tests.shares import CALLS

STEPS = 4


def batches(n: int, steps: int = STEPS) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(n)
    return {
        "x": torch.randn(steps, 5, 3, generator=generator),
        "y": torch.randn(steps, 5, generator=generator),
    }


def train_step(state: Any, batch: dict[str, Tensor], *, power: int = 2) -> Any:
    keep = fcg.random.bernoulli(fcg.random.fold_in(state.key, state.step), 0.8, batch["x"].shape)

    def loss_fn(params: Any) -> Tensor:
        return ((batch["x"] * keep @ params["w"] + params["b"] - batch["y"]).abs() ** power).mean()

    loss, grads = fcg.value_and_grad(loss_fn)(state.params)
    fcg.tap("loss", loss, keep=STEPS)
    return state.apply_gradients(grads), {"loss": loss, "norms": {"w": grads["w"].norm()}}


def fresh() -> Any:
    params = {"w": torch.linspace(-1, 1, 3), "b": torch.zeros(())}
    return fcg.TrainState.create(
        params=params, optimizer=fcg.optim.adamw(1e-2, weight_decay=0.1), key=fcg.random.key(0)
    )


@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_a_call_is_bitwise_that_many_calls(backend: Any) -> None:
    several = fcg.graph_step(train_step, steps_per_call=STEPS, static_argnames="power", backend=backend)
    single = fcg.graph_step(train_step, static_argnames="power")
    state, twin = fresh(), fresh()
    for n in range(CALLS):
        batch = batches(n)
        state, metrics = several(state, batch, power=2)
        for i in range(STEPS):
            twin, one = single(twin, {name: value[i] for name, value in batch.items()}, power=2)
            assert torch.equal(metrics["loss"][i], one["loss"])
            assert torch.equal(metrics["norms"]["w"][i], one["norms"]["w"])
        assert torch.equal(several.taps["loss"], metrics["loss"])
        assert all(
            torch.equal(a, b) for a, b in zip(fcg.tree.leaves(state), fcg.tree.leaves(twin), strict=True)
        )
    assert int(state.step) == CALLS * STEPS
    assert (several.stats.replays, several.stats.eager_calls) == (
        (CALLS, 0) if backend == "auto" else (0, CALLS)
    )


def test_replays_are_eager_runs_and_verify_agrees() -> None:
    step = fcg.graph_step(train_step, steps_per_call=STEPS, static_argnames="power", debug="verify")
    state, twin = fresh(), fresh()
    for n in range(CALLS):
        state, metrics = step(state, batches(n))
        twin, expected = step.eager(twin, batches(n))
        assert torch.equal(metrics["loss"], expected["loss"])
        assert torch.equal(state.params["w"], twin.params["w"])


def test_a_step_without_inputs_and_a_method() -> None:
    class Trainer:
        rate = 2.0

        @fcg.graph_step(steps_per_call=3)
        def step(self, state: Any) -> Any:
            return {"w": state["w"] * self.rate}, {"w": state["w"]}

    state, metrics = Trainer().step({"w": torch.ones(())})
    assert state["w"] == 8
    assert metrics["w"].tolist() == [1, 2, 4]


def test_another_state_is_the_same_for_all_steps() -> None:
    @fcg.graph_step(steps_per_call=2)
    def step(state: Any, x: Tensor, teacher: Any) -> Any:
        return {"w": state["w"] + x * teacher["w"]}, {}

    teacher = fcg.place({"w": torch.tensor([1.0, 10.0, 100.0])})
    state, _ = step({"w": torch.zeros(3)}, torch.tensor([[1.0], [2.0]]), teacher)
    assert state["w"].tolist() == [3, 30, 300]


@pytest.mark.parametrize("steps", [0, -1, 1.5, True])
def test_a_number_that_is_none_is_refused(steps: Any) -> None:
    with pytest.raises(ValueError, match="steps_per_call must be an int of at least 1"):
        fcg.graph_step(train_step, steps_per_call=steps)


def test_inputs_that_are_not_stacked_are_refused_before_anything_runs() -> None:
    step = fcg.graph_step(train_step, steps_per_call=STEPS, static_argnames="power")
    state = fcg.place(fresh())
    with pytest.raises(
        fcg.LayoutError, match=r"takes 4 steps per call(.|\n)*torch.stack\(leaves\)"
    ) as caught:
        step(state, batches(0, steps=3))
    assert "batch['x']  expected [4, ...]   got f32[3,5,3]@cpu" in str(caught.value)
    assert "batch['y']  expected [4, ...]   got f32[3,5]@cpu" in str(caught.value)
    state, metrics = step(state, batches(0))
    assert metrics["loss"].shape == (STEPS,)
    with pytest.raises(fcg.LayoutError, match="takes 4 steps per call"):
        step(state, batches(1, steps=5))
    step(state, batches(1))


def test_inside_of_another_step_it_is_refused_with_the_way_to_go() -> None:
    inner = fcg.graph_step(train_step, steps_per_call=2)
    outer = fcg.graph_step(lambda state, batch: inner(state, batch))
    with pytest.raises(fcg.LayoutError, match=r"`fcg\.scan"):
        outer(fresh(), batches(0, steps=2))


def test_a_read_only_function_has_no_such_option() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'steps_per_call'"):
        fcg.graph_fn(lambda x: x, steps_per_call=2)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda state, x: {"n": state["n"]}, "does not return a pair of new state and metrics"),
        (lambda state, x: ({"n": state["n"].double()}, {}), "state['n']  expected f32[]@cpu   got f64[]@cpu"),
        (lambda state, x: ({"m": state["n"]}, {}), "state['m']  expected nothing   got a leaf"),
        (lambda state, x: (state, {"lr": 0.1}), "metrics['lr']  expected a tensor   got 0.1"),
    ],
    ids=["no pair", "dtype", "structure", "a number"],
)  # fmt: skip
@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_what_is_returned_is_refused_in_the_words_of_the_step(fn: Any, words: str, backend: Any) -> None:
    """Not in those of the loop, which is nothing that was called."""
    fn.__name__ = "my_step"
    step = fcg.graph_step(fn, steps_per_call=2, backend=backend)
    state = fcg.place({"n": torch.zeros(())})
    with pytest.raises(fcg.LayoutError, match="`my_step`: ") as caught:
        step(state, torch.ones(2))
    assert words in str(caught.value)
    assert "scan" not in str(caught.value)
    assert float(state["n"]) == 0


@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_a_leaf_has_the_strides_of_the_state_at_every_step(backend: Any) -> None:
    """Between two steps of a call as between two calls, whatever strides the step returns."""

    def turn(state: Any, b: Tensor) -> Any:
        seen = {"in order": state["a"].as_strided((9,), (1,)), "flat": state["a"].view(-1) + b}
        return {"a": state["a"].t(), "wide": state["wide"].contiguous()}, {
            **seen,
            "wide": state["wide"].clone(),
        }

    start = {
        "a": torch.arange(9.0).view(3, 3),
        "wide": torch.zeros(1, 2, 2, 2).to(memory_format=torch.channels_last),
    }
    several = fcg.graph_step(turn, steps_per_call=STEPS, backend=backend)
    single = fcg.graph_step(turn, backend=backend)
    state, twin = fcg.place(start), fcg.place(start)
    for _ in range(CALLS):
        state, metrics = several(state, torch.zeros(STEPS))
        for i in range(STEPS):
            twin, one = single(twin, torch.zeros(()))
            assert all(torch.equal(metrics[name][i], value) for name, value in one.items())
    assert state["wide"].stride() == twin["wide"].stride()
