"""H85 to H92: pools, allocator settings, and the number of captures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import functional_cg as fcg
from functional_cg.testing import assert_trees_all_equal
from tests.cuda import helpers_cuda
from tests.hazards.law import CPU, GPU, Place, as_it_is, everywhere, living_tensors
from tests.shares import CALLS

MIB = 2**20
SLACK = 96 * MIB  # workspaces of cuBLAS on the streams of warm-up and capture, and rounding to segments


def large(state: Any, x: Tensor) -> Any:
    """Temporaries of 64 MiB in float32, some of them alive at one time."""

    def loss_fn(p: Any) -> Tensor:
        wide = torch.outer(p["a"], p["b"]) * x
        return (torch.tanh(wide) * torch.sigmoid(wide)).square().mean()

    loss, grads = fcg.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads), {"loss": loss}


def mixed(state: Any, x: Tensor) -> Any:
    """Parameters and moments in float32, products and their gradients in bfloat16."""

    def loss_fn(p: Any) -> Tensor:
        hidden = x.bfloat16()
        for w in p.values():
            hidden = torch.tanh(hidden @ w.bfloat16())
        return hidden.float().square().mean()

    loss, grads = fcg.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads), {"loss": loss}


def large_run() -> tuple[Any, Any, Any]:
    params = {"a": GPU.randn(4096, seed=1), "b": GPU.randn(4096, seed=2)}
    state = fcg.TrainState.create(params=params, optimizer=fcg.optim.sgd(0.1))
    return large, state, torch.tensor(0.5, device=GPU.device)


def mixed_run() -> tuple[Any, Any, Any]:
    params = {f"w{n}": GPU.randn(2048, 2048, seed=n) / 45 for n in range(4)}
    state = fcg.TrainState.create(params=params, optimizer=fcg.optim.adamw(1e-3, weight_decay=0.1))
    return mixed, state, GPU.randn(64, 2048, seed=9)


@pytest.mark.cuda
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("run", [large_run, mixed_run])
def test_h88_a_capture_takes_the_memory_of_one_eager_step(run: Any) -> None:
    """T-STR-2, and for gradients of another dtype T-DEREF-3 (H117): neither warm-up nor a cast is held twice."""
    helpers_cuda.clean()
    fn, state, x = run()
    arena = sum(slab.nbytes for slab in state._lease.arena.slabs)
    eager = fcg.graph_step(fn, lowering="aten")
    twin = fcg.fork(state)
    _, before = helpers_cuda.memory()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        twin, _ = eager.eager(twin, x)
    torch.cuda.synchronize()
    needed = torch.cuda.max_memory_reserved() - before
    del twin, _
    step = fcg.graph_step(fn, lowering="aten")
    _, before = helpers_cuda.memory()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        state, metrics = step(state, x)
    torch.cuda.synchronize()
    assert step.stats.captures == 1
    at_most = needed + arena + SLACK
    assert torch.cuda.max_memory_reserved() - before <= at_most, "while it captured"
    del metrics
    _, after = helpers_cuda.memory()
    assert after - before <= at_most, "after the capture"
    assert needed > 60 * MIB, "the test's step is too small to see"


STORM = """
import os
os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "SETTINGS"
import torch
import functional_cg as fcg
from functional_cg.testing import assert_trees_all_equal

def step_fn(state, x):
    def loss(p):
        return (torch.tanh(x @ p["w"]) @ p["v"]).square().mean()
    value, grads = fcg.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads), {"value": value, "grads": grads}

def randn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).cuda()

state = fcg.TrainState.create(
    params={"w": randn(128, 256, seed=0) / 12, "v": randn(256, 8, seed=1) / 16},
    optimizer=fcg.optim.adamw(1e-2, weight_decay=0.1),
)
twin = fcg.fork(state)
step = fcg.graph_step(step_fn, lowering="aten")
sizes = sorted({slot.spec.nbytes for slot in state._lease.arena.plan.slots})
expected = []
for n in range(18):
    twin, metrics = step.eager(twin, randn(32, 128, seed=2 + n))
    expected.append(fcg.snapshot((twin, metrics)))
for n in range(18):
    state, metrics = step(state, randn(32, 128, seed=2 + n))
    for size in sizes:
        blocks = [torch.full((max(size, 1),), 0xFF, dtype=torch.uint8, device="cuda") for _ in range(8)]
        del blocks[::2]
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    assert_trees_all_equal((state, metrics), expected[n], f"call {n}")
assert step.stats.captures == 1
print("DONE", step.stats.replays)
"""
SETTINGS = {
    "as it is": "",
    "expandable": "expandable_segments:True",
    "not expandable": "expandable_segments:False",
    "collected": "garbage_collection_threshold:0.1",
    "split": "max_split_size_mb:32",
    "async": "backend:cudaMallocAsync",
}


@pytest.mark.cuda
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_h86_allocator_settings_and_storms_do_no_harm(settings: str) -> None:
    """H89 too: with the driver's own allocator, whose allocations would be nodes of the graph."""
    run = helpers_cuda.python(STORM.replace("SETTINGS", settings))
    assert run.returncode == 0, run.stderr[-4000:]
    assert "DONE 18" in run.stdout


@as_it_is
def test_h90_layouts_are_counted_and_capped(place: Place) -> None:
    """64 sequence lengths: one capture, or as many as were asked for; then an error, never a slow silence."""

    def step_fn(state: Any, x: Tensor) -> Any:
        return {"sum": state["sum"] + x.sum()}, {}

    for cap in (1, 4):
        step = place.step(step_fn, max_captures=cap)
        state: Any = fcg.place({"sum": torch.zeros((), device=place.device)})
        for length in range(1, cap + 1):
            state, _ = step(state, torch.ones(length, device=place.device))
        tensors = living_tensors()
        for length in range(cap + 1, 65):
            with pytest.raises(fcg.LayoutError, match=rf"max_captures={cap}"):
                step(state, torch.ones(length, device=place.device))
        assert living_tensors() <= tensors
        assert float(state["sum"]) == cap * (cap + 1) / 2
        assert (step.stats.captures, step.stats.replays, step.stats.eager_calls) == (cap, cap, 0)


@everywhere
def test_h91_one_function_is_captured_again_and_again(place: Place) -> None:
    """Nothing of the function is rebound; the counts prove that each call was a replay."""

    def step_fn(state: Any, x: Tensor) -> Any:
        return {"w": state["w"] * 0.5 + x}, {"x": x * 2}

    state, twin = (fcg.place({"w": place.randn(3, seed=0)}) for _ in range(2))
    for n in range(5):
        with place.step(step_fn) as step:
            for call in range(3):
                state, metrics = step(state, place.randn(3, seed=10 * n + call))
                twin, expected = step.eager(twin, place.randn(3, seed=10 * n + call))
                assert_trees_all_equal((state, metrics), (twin, expected), f"step {n}, call {call}")
            assert step.__wrapped__ is step_fn
            assert (step.stats.traces, step.stats.captures, step.stats.replays) == (1, 1, 3)


@everywhere
def test_h105_running_eagerly_is_asked_for_and_counted(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """No silent fallback: what cannot be captured raises, and ``FCG_DISABLE_CAPTURE`` shows in the counts."""

    def step_fn(state: Any, x: Tensor) -> Any:
        if x.sum() > 0:
            x = -x
        return {"w": state["w"] + x}, {}

    state, x = fcg.place({"w": torch.zeros(2, device=place.device)}), torch.ones(2, device=place.device)
    step = place.step(step_fn)
    with pytest.raises(fcg.HostSyncError, match=r"if x\.sum\(\) > 0"):
        step(state, x)
    assert (step.stats.captures, step.stats.replays, step.stats.eager_calls) == (0, 0, 0)
    monkeypatch.setenv("FCG_DISABLE_CAPTURE", "1")
    for _ in range(2):
        state, _ = step(state, x)
    assert state["w"].tolist() == [-2.0, -2.0]
    assert (step.stats.captures, step.stats.replays, step.stats.eager_calls) == (0, 0, 2)


def test_h92_what_a_module_keeps_of_a_step_is_refused() -> None:
    """``self.last_hidden = h`` would show the values of the trace for ever."""

    class Net(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.last_hidden = torch.tanh(x)
            return self.last_hidden * 2

    net = Net()
    state = fcg.place({"w": torch.zeros(3)})
    with pytest.raises(fcg.SideEffectError, match="keeps a tensor of the step"):
        CPU.step(lambda s, x: (s, net(x)))(state, torch.ones(3))

    def fixed(state: Any, x: Tensor) -> Any:
        hidden = torch.tanh(x)
        return state, {"out": hidden * 2, "hidden": hidden}

    step, kept = CPU.step(fixed), []
    for n in range(CALLS):
        state, metrics = step(state, torch.full((3,), n / 10))
        kept.append(metrics["hidden"])
    assert_trees_all_equal(kept, [torch.tanh(torch.full((3,), n / 10)) for n in range(CALLS)])
