"""H40 to H50: numbers, flags, modes and Python side effects, none of which a replay would repeat."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import functional_cg as fcg
from functional_cg.testing import assert_trees_all_close, assert_trees_all_equal
from tests.hazards.law import CPU, Place, assert_law, everywhere

STEPS = 20


def xs(place: Place, calls: int = STEPS) -> list[Tensor]:
    return [place.randn(6, 3, seed=n) for n in range(calls)]


def loss_of(p: Any, x: Tensor) -> Tensor:
    return (x @ p["w"]).tanh().square().mean()


def train(state: Any, x: Tensor) -> Any:
    loss, grads = fcg.value_and_grad(loss_of)(state.params, x)
    return state.apply_gradients(grads), {"loss": loss}


@everywhere
def test_h40_a_rate_that_is_set_between_calls_is_the_rate_that_is_used(place: Place) -> None:
    """In the state by ``set_hyperparams``, and in the batch as a Python number; torch.optim is the judge."""
    sgd = fcg.optim.inject_hyperparams(fcg.optim.sgd)(learning_rate=0.5)
    w = place.randn(3, 2, seed=7)
    state: Any = fcg.TrainState.create(params={"w": w}, optimizer=sgd)
    twin, rated = fcg.fork(state), fcg.place({"w": w.clone()})
    judge = nn.Parameter(w.clone())
    optimizer = torch.optim.SGD([judge], lr=0.5)
    step = place.step(train)
    by_batch = place.step(
        lambda p, b: ({"w": p["w"] - b["rate"] * fcg.grad(loss_of)(p, b["x"])["w"]}, {}), max_captures=1
    )
    for n, x in enumerate(xs(place)):
        rate = 0.5 / (1 + n)
        state, twin = (fcg.optim.set_hyperparams(one, learning_rate=rate) for one in (state, twin))
        state, metrics = step(state, x)
        twin, expected = step.eager(twin, x)
        place.assert_same((state, metrics), (twin, expected), f"call {n}")
        rated, _ = by_batch(rated, {"x": x, "rate": rate})
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        loss_of({"w": judge}, x).backward()
        optimizer.step()
        for params in (state.params, rated):
            assert_trees_all_close(params, {"w": judge.detach()}, rtol=1e-4, atol=1e-5, name=f"call {n}")
    assert step.stats.captures == by_batch.stats.captures == 1


@everywhere
def test_h41_bias_correction_moves_with_the_count(place: Place) -> None:
    w = place.randn(3, 2, seed=7)
    judge = nn.Parameter(w.clone())
    optimizer = torch.optim.Adam([judge], lr=0.05)
    state = fcg.TrainState.create(params={"w": w}, optimizer=fcg.optim.adam(0.05))
    _, _, kept = assert_law(place, train, fcg.snapshot(state), xs(place))
    step = place.step(train)
    for n, x in enumerate(xs(place)):
        state, metrics = step(state, x)
        assert_trees_all_equal(metrics, kept[n], f"call {n}")
        optimizer.zero_grad()
        loss_of({"w": judge}, x).backward()
        optimizer.step()
        assert_trees_all_close(state.params, {"w": judge.detach()}, rtol=1e-4, atol=1e-5, name=f"call {n}")


def test_h42_optimizers_and_schedulers_of_torch_are_refused() -> None:
    """An optimizer of torch keeps its state outside; a scheduler of torch wants such an optimizer."""
    w = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([w], lr=0.1)

    def step_fn(state: Any, x: Tensor) -> Any:
        optimizer.zero_grad()
        (w * x).sum().backward()
        optimizer.step()
        return state, {}

    with pytest.raises(fcg.ForeignTensorError, match="in neither the state nor the inputs"):
        CPU.step(step_fn)({"w": torch.ones(3)}, torch.ones(3))
    assert w.tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(TypeError, match="sgd is not an Optimizer"):
        torch.optim.lr_scheduler.StepLR(fcg.optim.sgd(0.1), 1)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"one of `fcg.optim`(.|\n)*fcg.optim.from_torch\(torch.optim.AdamW, "
    ):
        fcg.TrainState.create(params={"w": torch.ones(3)}, optimizer=optimizer)  # type: ignore[arg-type]


def test_h43_settings_of_a_module_that_was_taken_over_are_noticed() -> None:
    """``apply`` is a function of a copy of the module, in eager runs too."""
    model = nn.Sequential(nn.Linear(3, 3), nn.LeakyReLU(0.5))
    apply, params, buffers = fcg.from_module(model)
    step = CPU.step(lambda p, x: (p, apply(p, buffers, x)[0]))
    x = CPU.randn(4, 3, seed=0)
    state, first = step(params, x)
    model[1].negative_slope = 0.0
    for call in (lambda: step(state, x), lambda: apply(params, buffers, x)):
        with pytest.raises(fcg.BakedValueError, match=r"`1\.negative_slope`"):
            call()
    model[1].negative_slope = 0.5
    state, then = step(state, x)
    assert_trees_all_equal(then, first)
    slope = fcg.graph_step(lambda p, b: (p, F.leaky_relu(b["x"], 0.5) * b["slope"]))  # the way: an input
    assert slope(state, {"x": x, "slope": 2.0})[1].shape == (4, 3)


def test_h48_another_number_of_micro_batches_is_refused() -> None:
    """As a list of inputs, and as a number that Python divides by."""
    count = 4

    def mean(state: Any, parts: list[Tensor]) -> Any:
        return state, sum(part.sum() for part in parts) / len(parts)

    def divided(state: Any, x: Tensor) -> Any:
        return state, x.sum() / count

    of_a_list, of_a_number = CPU.step(mean), CPU.step(divided)
    state, out = of_a_list({"w": torch.zeros(1)}, [torch.ones(3)] * 4)
    assert out == 3.0
    with pytest.raises(fcg.LayoutError, match=r"parts\[2\]  expected f32\[3\]@cpu   got nothing"):
        of_a_list(state, [torch.ones(3)] * 2)
    state, out = of_a_number(state, torch.ones(8))
    assert out == 2.0
    count = 2
    with pytest.raises(fcg.BakedValueError, match="count  traced 4   now 2"):
        of_a_number(state, torch.ones(8))


def test_h50_an_iterator_that_is_advanced_in_the_step_is_refused() -> None:
    """Python runs twice for a trace and never for a replay: tensors are foreign, numbers differ between the traces."""
    loader = iter([torch.full((3,), float(n)) for n in range(9)])
    numbers = iter(range(9))
    fetches = CPU.step(lambda s, x: ({"w": s["w"] + next(loader)}, {}))
    counts = CPU.step(lambda s, x: ({"w": s["w"] + next(numbers)}, {}))
    with pytest.raises(fcg.ForeignTensorError, match="pass it as an input"):
        fetches({"w": torch.zeros(3)}, 0)
    with pytest.raises(fcg.BakedValueError, match="two traces of it differ"):
        counts({"w": torch.zeros(3)}, 0)
