"""The loss scale follows torch's rule, in a captured step that skips updates on the device."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import functional_cg as fcg
from functional_cg.testing import assert_trees_all_equal

CALLS = 24


@given(
    finite=st.lists(st.booleans(), min_size=1, max_size=30),
    interval=st.integers(1, 5),
    exponent=st.integers(-3, 127),
)
def test_the_rule_is_that_of_torch(finite: list[bool], interval: int, exponent: int) -> None:
    ours = fcg.LossScale.create(2.0**exponent, growth_interval=interval)
    scale, tracker = torch.tensor(2.0**exponent), torch.tensor(0, dtype=torch.int32)
    for ok in finite:
        ours = ours.adjusted(torch.tensor(ok))
        torch._amp_update_scale_(scale, tracker, torch.tensor(float(not ok)), 2.0, 0.5, interval)
        assert torch.equal(ours.scale, scale)
        assert torch.equal(ours.good, tracker)


class State(fcg.TrainState):
    loss_scale: fcg.LossScale


def train_step(state: Any, batch: Any) -> Any:
    def loss_fn(params: Any) -> Tensor:
        hidden = torch.relu(batch["x"].half() @ params["in"].half())
        loss = ((hidden @ params["out"].half()).float().squeeze(1) - batch["y"]).square().mean()
        scaled: Tensor = state.loss_scale.scaled(loss)
        return scaled

    loss, grads = fcg.value_and_grad(loss_fn)(state.params)
    grads = state.loss_scale.unscaled(grads)
    finite = fcg.optim.global_norm(grads).isfinite()
    new = fcg.cond(finite, lambda: state.apply_gradients(grads), lambda: state)
    metrics = {"loss": state.loss_scale.unscaled(loss), "finite": finite, "scale": state.loss_scale.scale}
    return new.replace(loss_scale=state.loss_scale.adjusted(finite)), metrics


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_a_captured_step_skips_on_the_device(device: str) -> None:
    """Overflowing steps leave parameters, moments and counters as they are; the others train as in float32."""
    torch.manual_seed(0)
    params = {"in": torch.randn(8, 16, device=device) / 3, "out": torch.randn(16, 1, device=device) / 4}
    state = State.create(
        params=params, optimizer=fcg.optim.adam(0.01),
        loss_scale=fcg.LossScale.create(2.0**20, growth_interval=4, device=device),
    )  # fmt: skip
    twin, step = fcg.fork(state), fcg.graph_step(train_step, lowering="aten")
    skipped, scales, losses = [], [], []
    for call in range(CALLS):
        x = torch.randn(32, 8, device=device)
        batch = {"x": x, "y": x.sum(1)}
        before = fcg.snapshot(state)
        state, metrics = step(state, batch)
        twin, expected = step.eager(twin, batch)
        assert_trees_all_equal((state, metrics), (twin, expected), f"call {call}")
        skipped.append(not metrics["finite"])
        scales.append(float(metrics["scale"]))
        losses.append(float(metrics["loss"]))
        if skipped[-1]:
            after = fcg.snapshot(state)
            assert_trees_all_equal(
                (after.params, after.opt_state, after.step), (before.params, before.opt_state, before.step)
            )
    assert skipped[0]
    assert 1 <= sum(skipped) < CALLS / 2
    assert int(state.step) == CALLS - sum(skipped)
    assert min(scales) < scales[0]
    assert any(after > before for before, after in pairwise(scales)), "it never grew"
    taken = [loss for loss, skip in zip(losses, skipped, strict=True) if not skip]
    assert taken[-1] < taken[0]
    assert (step.stats.captures, step.stats.replays) == (1, CALLS)


def test_what_the_scale_is_for() -> None:
    """A gradient that float16 rounds to zero comes through."""

    def gradient(scale: float) -> float:
        loss_scale = fcg.LossScale.create(scale)
        grad = fcg.grad(lambda w: loss_scale.scaled((w.half() * 1e-8).float()))(torch.tensor(1.0))
        return float(loss_scale.unscaled(grad))

    assert gradient(1.0) == 0.0
    assert gradient(2.0**12) == pytest.approx(1e-8, rel=1e-2)


def test_leaves_that_are_no_numbers_stay() -> None:
    tree = {"loss": torch.tensor(1.5), "count": torch.tensor(3), "name": "x"}
    scaled = fcg.LossScale.create(4.0).scaled(tree)
    assert (float(scaled["loss"]), int(scaled["count"]), scaled["name"]) == (6.0, 3, "x")  # type: ignore[arg-type, call-overload]


@pytest.mark.parametrize(
    "options",
    [
        {"initial": 0.0},
        {"initial": float("nan")},
        {"initial": float("inf")},
        {"initial": 1e39},  # infinite in float32: no step would ever be finite
        {"initial": "2"},
        {"growth_interval": 0},
        {"growth_interval": 2.5},
        {"factor": 1.0},
        {"factor": float("inf")},
    ],
    ids=str,
)
def test_numbers_out_of_range_are_refused(options: Any) -> None:
    with pytest.raises(
        ValueError, match=r"(initial|factor) must be a number > [01]|growth_interval must be an int >= 1"
    ):
        fcg.LossScale.create(**options)


def test_all_numbers_that_float32_holds_are_scales() -> None:
    largest = torch.finfo(torch.float32).max
    assert float(fcg.LossScale.create(initial=largest, factor=largest).scale) == largest


@pytest.mark.parametrize("finite", [True, torch.tensor(1.0), torch.tensor([True])], ids=str)
def test_whether_gradients_are_finite_is_one_bool_on_the_device(finite: Any) -> None:
    with pytest.raises(TypeError, match=r"`finite` as a tensor of dtype bool and shape \[\], got .*isfinite"):
        fcg.LossScale.create().adjusted(finite)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
def test_scales_are_float32_under_any_default_dtype(default: torch.dtype) -> None:
    torch.set_default_dtype(default)
    try:
        loss_scale, fp8 = fcg.LossScale.create(), fcg.nn.Fp8Scaling.create(2)
        adjusted = loss_scale.adjusted(torch.tensor(True))
        x = torch.ones(16, 16, dtype=torch.float32)
        seen = fcg.grad(lambda scaling: fcg.nn.fp8_linear(x, x, None, scaling[1]).sum())(fp8)
    finally:
        torch.set_default_dtype(torch.float32)
    assert (loss_scale.scale.dtype, adjusted.scale.dtype) == (torch.float32, torch.float32)
    assert all(leaf.dtype == torch.float32 for leaf in fcg.tree.leaves((fp8, fp8.updated(seen))))
