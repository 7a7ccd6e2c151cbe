"""Profiles of steps on a GPU: times of kernels, an untouched state, ranges of NVTX on replays."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import functional_cg as fcg
from functional_cg.testing import assert_trees_all_equal
from tests.cuda.helpers_cuda import DEVICE, ON_GPU, clean_allocator, lowerings, marks, needs_gpu  # noqa: F401

pytestmark = marks
WIDTH, ROWS = 512, 4096


def training(lowering: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(WIDTH, 8 * WIDTH), nn.GELU(), nn.Linear(8 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)
    )
    apply, params, _ = fcg.from_module(net.to(DEVICE))
    state = fcg.TrainState.create(params=params, optimizer=fcg.optim.adamw(1e-3, weight_decay=0.1))

    @fcg.graph_step(lowering=lowering)
    def train_step(state: Any, x: Any) -> Any:
        loss_fn = lambda p: F.mse_loss(apply(p, {}, x)[0], x)  # noqa: E731
        loss, grads = fcg.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads), {"loss": loss}

    return train_step, state


def rows(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(ROWS if ON_GPU else 8, WIDTH, generator=generator).to(DEVICE)


@lowerings
def test_rows_add_up_and_the_state_stays(lowering: str) -> None:
    step, state = training(lowering)
    before = fcg.snapshot(state)
    profile = step.profile(state, rows(0))
    assert_trees_all_equal(fcg.snapshot(state), before)
    for found in (profile.by_module(), profile.by_line()):
        assert sum(row.calls for row in found) == len(profile.calls)
        assert math.isclose(math.fsum(row.seconds for row in found), profile.seconds)
    names = {row.name: row for row in profile.by_module()}
    for name in ("Sequential.0", "Sequential.2"):
        assert names[name].forward_s > 0
        assert names[name].backward_s > 0
    assert names["(optimizer)"].update_s > 0
    assert profile.compiled is (lowering == "inductor")
    assert ("not compiled" in str(profile)) is profile.compiled
    twin_step, twin = training(lowering)
    for number in range(1, 4):
        state, metrics = step(state, rows(number))
        twin, expected = twin_step(twin, rows(number))
        if lowering == "aten":
            assert_trees_all_equal((fcg.snapshot(state), metrics), (fcg.snapshot(twin), expected))


def profile_of(step: Any, state: Any) -> Any:
    """A profile whose kernels take about as long as the graph; in some, other processes may use the GPU meanwhile."""
    profiles = [step.profile(state, rows(0)) for _ in range(5)]
    apart = [abs(math.log2(one.seconds / one.call_s)) for one in profiles]
    assert min(apart) < 0.6, [str(one) for one in profiles]
    return profiles[apart.index(min(apart))]


@needs_gpu
def test_kernels_take_about_as_long_one_by_one_as_in_the_graph() -> None:
    step, state = training("aten")
    profile = profile_of(step, state)
    products = math.fsum(one.seconds for one in profile.calls if one.op in ("addmm", "mm"))
    assert products > profile.seconds / 3


@needs_gpu
def test_kernels_of_a_compiled_step_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FCG_PROFILE_KERNELS", "1")
    step, state = training("inductor")
    profile = profile_of(step, state)
    lost = [one.seconds for one in profile.kernels if any(call.line == "(unknown)" for call in one.calls)]
    assert math.fsum(lost) < 0.05 * profile.seconds
    products = [row for row in profile.by_kernel() if "Sequential.0" in row.modules and "mm" in row.name]
    assert {phase for row in products for phase in row.phases} == {"forward", "backward"}


@needs_gpu
def test_a_replay_in_a_range_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    push = torch.cuda.nvtx.range_push
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: (said.append(name), push(name))[1])
    step, state = training("aten")
    state, expected = step(state, rows(0))
    assert said == []
    monkeypatch.setenv("FCG_NVTX", "1")
    step, state = training("aten")
    state, metrics = step(state, rows(0))
    assert_trees_all_equal(metrics, expected)
    state, _ = step(state, rows(1))
    assert said == ["train_step"] * 2
