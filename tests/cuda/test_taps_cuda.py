"""Taps and several steps per call on a GPU: no synchronization, no extra launch, eager's values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import functional_cg as fcg
from tests.cuda.helpers_cuda import (
    DEVICE,
    assert_same,
    clean_allocator,  # noqa: F401
    lowerings,
    marks,
    mlp_batch,
    mlp_state,
    mlp_step,
    needs_gpu,
    wait,
)

pytestmark = marks
CALLS = 16
STEPS = 4


def tapping(state: Any, batch: Any) -> Any:
    new, metrics = mlp_step(state, batch)
    fcg.tap("loss", metrics["loss"], keep=5)
    fcg.tap("step", state.step, keep=3)
    fcg.tap("weights", fcg.tree.leaves(state.params)[0])
    return new, metrics


@lowerings
def test_taps_are_what_the_step_computed(lowering: Any) -> None:
    step, eager = (fcg.graph_step(tapping, lowering=choice) for choice in (lowering, "aten"))
    state, twin = mlp_state(), mlp_state()
    losses = []
    for n in range(CALLS):
        before = fcg.tree.leaves(state.params)[0].clone()
        state, metrics = step(state, mlp_batch(n))
        losses.append(metrics["loss"])
        if lowering == "aten":
            twin, _ = eager.eager(twin, mlp_batch(n))
            assert torch.equal(step.taps["loss"][-1], eager.taps["loss"][-1])
        assert torch.equal(step.taps["weights"], before)
        assert torch.equal(step.taps["loss"], torch.stack(losses[-5:]))
        assert step.taps["step"].tolist() == list(range(n + 1))[-3:]
    assert step.stats.replays == CALLS


@needs_gpu
def test_a_tap_waits_for_nothing() -> None:
    step = fcg.graph_step(tapping, certify="first")
    state = mlp_state()
    batches = [mlp_batch(n) for n in range(8)]
    for batch in batches[:3]:
        state, _ = step(state, batch)
    wait()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches:
            state, _ = step(state, batch)
        last = step.taps["loss"]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert last.shape == (5,)
    assert last.device.type == DEVICE.type


@lowerings
def test_several_steps_are_one_replay(lowering: Any) -> None:
    several = fcg.graph_step(mlp_step, steps_per_call=STEPS, lowering=lowering)
    single = fcg.graph_step(mlp_step, lowering="aten")
    state, twin = mlp_state(), mlp_state()
    for n in range(CALLS):
        batches = [mlp_batch(STEPS * n + i) for i in range(STEPS)]
        state, metrics = several(state, fcg.tree.map(lambda *leaves: torch.stack(leaves), *batches))
        assert metrics["loss"].shape == (STEPS,)
        if lowering == "aten":
            losses: list[Tensor] = []
            for batch in batches:
                twin, one = single(twin, batch)
                losses.append(one["loss"])
            assert torch.equal(metrics["loss"], torch.stack(losses))
            assert_same(state, twin, f"after call {n}")
    assert (several.stats.replays, several.stats.captures) == (CALLS, 1)
    assert int(state.step) == CALLS * STEPS


@pytest.mark.parametrize("keep", [1, 7])
def test_a_ring_holds_what_it_says_and_no_more(keep: int) -> None:
    @fcg.graph_fn
    def run(x: Tensor) -> Tensor:
        fcg.tap("x", x, keep=keep)
        return x.sum()

    size, x = 2**18, torch.ones(2**18, device=DEVICE)
    for n in range(10):
        run(x * n)
    wait()
    held = torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0
    for n in range(10, 30):
        run(x * n)
    wait()
    grown = (torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0) - held
    assert grown < size * x.element_size()
    last = run.taps["x"]
    assert (last[0] if keep == 1 else last[:, 0].tolist()) == (29 if keep == 1 else list(range(23, 30)))
