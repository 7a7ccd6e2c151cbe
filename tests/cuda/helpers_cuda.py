"""Shared helpers of the CUDA tests: models, comparisons, allocator state.

``FCG_CUDA_TESTS_DEVICE=cpu`` rehearses on the CPU what needs no GPU; tests marked with ``needs_gpu`` are skipped then.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import functional_cg as fcg
from functional_cg.stages.plan import Buffers

REPOSITORY = Path(__file__).resolve().parent.parent.parent
DEVICE = torch.device(os.environ.get("FCG_CUDA_TESTS_DEVICE", "cuda"))
ON_GPU = DEVICE.type == "cuda"

# Warnings are printed and not raised: what a compiler warns of depends on the machine.
marks = [pytest.mark.filterwarnings("default"), *([pytest.mark.cuda] if ON_GPU else [])]
needs_gpu = pytest.mark.skipif(not (ON_GPU and torch.cuda.is_available()), reason="needs a GPU")
lowerings = pytest.mark.parametrize("lowering", ["aten", "inductor"])

Batch = dict[str, Any]
Step = Callable[[Any, Any], tuple[Any, dict[str, Tensor]]]


# -- the allocator ------------------------------------------------------------------------------------------------


def wait() -> None:
    """Wait until the device is done."""
    if ON_GPU:
        torch.cuda.synchronize()


def clean() -> None:
    """Free what nothing refers to, workspaces and cached blocks included."""
    gc.collect()
    if ON_GPU:
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        gc.collect()
        torch.cuda.empty_cache()


def memory() -> tuple[int, int]:
    """Allocated and reserved bytes after cleaning up."""
    clean()
    return (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) if ON_GPU else (0, 0)


@pytest.fixture(autouse=True)
def clean_allocator() -> Iterator[None]:
    """Each test starts from, and leaves, a clean allocator. An earlier fatal error of the device shows here."""
    clean()
    yield
    clean()


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Return a function that prints a measured figure past pytest's capture."""

    def write(text: str) -> None:
        with capsys.disabled():
            sys.stdout.write(f"\n  {text}")
            sys.stdout.flush()

    return write


# -- comparisons --------------------------------------------------------------------------------------------------


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have one dtype, one shape and the same bits, NaN and the sign of zero included."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    flat = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(flat[0], flat[1].to(flat[0].device))


def assert_same(got: Any, want: Any, what: str) -> None:
    """Compare all leaves of two trees or states bitwise; the message lists the leaves that differ, and by how much."""
    got, want = fcg.snapshot(got), fcg.snapshot(want)
    pairs, _ = fcg.tree.flatten_with_path(got)
    others = fcg.tree.leaves(want)
    assert len(pairs) == len(others), what
    rows = []
    for (path, a), b in zip(pairs, others, strict=True):
        if not same_bits(a, b):
            far = (a.double() - b.double().to(a.device)).abs().max().item() if a.shape == b.shape else "shape"
            rows.append(f"{fcg.tree.path_string(path, 'state')}: {far}")
    assert not rows, f"{what}: {len(rows)} of {len(pairs)} leaves differ: {rows[:8]}"


def distance(got: Any, want: Any) -> float:
    """The largest distance of a floating leaf to its twin, relative to the twin's norm."""
    far = 0.0
    for a, b in zip(fcg.tree.leaves(fcg.snapshot(got)), fcg.tree.leaves(fcg.snapshot(want)), strict=True):
        if a.is_floating_point():
            norm = float(b.double().norm())
            far = max(far, float((a.double() - b.double()).norm()) / (norm or 1.0))
    return far


def poison(batch: Any) -> None:
    """Overwrite a caller's tensors and arrays: the call has returned, so they are the caller's again."""
    for leaf in fcg.tree.leaves(batch):
        if isinstance(leaf, Tensor):
            leaf.fill_(float("nan") if leaf.is_floating_point() else 0)
        elif hasattr(leaf, "fill"):  # numpy
            leaf.fill(0)


def copies(batch: Any) -> Any:
    """A copy of a batch that shares nothing with it."""
    return fcg.tree.map(
        lambda leaf: (
            leaf.clone() if isinstance(leaf, Tensor) else leaf.copy() if hasattr(leaf, "copy") else leaf
        ),
        batch,
    )


def uncaptured(step: Any, state: Any, batch: Batch) -> tuple[Any, Callable[[Batch], list[Tensor]]]:
    """The step's own plan, bound to a fork of the state and run outside of any graph.

    Returns:
      (twin, call): ``call(batch)`` updates the memory of ``twin`` and returns the metrics in order.
    """
    lowered = step.lower(state, batch)
    lowered.capture()  # a compiler compiles for the real buffers
    twin = fcg.fork(state)
    specs = lowered.layout.specs
    inputs = [torch.empty_strided(s.shape, s.stride, dtype=s.dtype, device=DEVICE) for s in specs]
    constants = [c.value.to(DEVICE, copy=True) for c in lowered.program.constants]
    run = lowered.plan.bind(Buffers(twin._lease.arena.slots, inputs, constants))

    def call(batch: Batch) -> list[Tensor]:
        for slot, leaf in zip(inputs, fcg.tree.leaves(batch), strict=True):
            slot.copy_(leaf)
        with torch.inference_mode(False), torch.no_grad():
            return [metric.clone() for metric in run(())]

    return twin, call


# -- models -------------------------------------------------------------------------------------------------------


def randn(*shape: int, seed: int, device: torch.device | str = DEVICE) -> Tensor:
    """Normal numbers from a seed, the same ones on every device; no global generator is touched."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def mlp_params(width: int = 64, layers: int = 3, seed: int = 0) -> dict[str, Any]:
    """Parameters of an MLP."""
    return {
        f"layer{i}": {
            "w": randn(width, width, seed=seed + 2 * i) / width**0.5,
            "b": randn(width, seed=seed + 2 * i + 1) / 10,
        }
        for i in range(layers)
    }


def decayed(params: Any) -> Any:
    """The leaves that decay: matrices."""
    return fcg.tree.map(lambda leaf: leaf.ndim >= 2, params)


def mlp_state(width: int = 64, layers: int = 3, seed: int = 0, **fields: Any) -> Any:
    """State of an MLP with clipped AdamW, a schedule and a key."""
    optimizer = fcg.optim.chain(
        fcg.optim.clip_by_global_norm(1.0),
        fcg.optim.adamw(fcg.optim.warmup_cosine(3e-3, 5, 40), weight_decay=0.1, mask=decayed),
    )
    return fcg.TrainState.create(
        params=mlp_params(width, layers, seed), optimizer=optimizer, key=fcg.random.key(seed), **fields
    )


def mlp(params: Any, x: Tensor, key: Tensor | None = None) -> Tensor:
    """An MLP with keyed dropout."""
    for i, layer in enumerate(params.values()):
        x = torch.tanh(F.linear(x, layer["w"], layer["b"]))
        if key is not None:
            x = fcg.random.dropout(key, x, 0.1, stream=i)
    return x


def mlp_step(state: Any, batch: Batch) -> tuple[Any, dict[str, Tensor]]:
    """A training step of the MLP; new data at each call."""
    key = fcg.random.fold_in(state.key, state.step)

    def loss_fn(params: Any) -> tuple[Tensor, Tensor]:
        out = mlp(params, batch["x"], key)
        return F.mse_loss(out, batch["y"]), out.mean()

    (loss, mean), grads = fcg.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads), {"loss": loss, "mean": mean}


def plain_step(state: Any, batch: Batch) -> tuple[Any, dict[str, Tensor]]:
    """A training step of the MLP without randomness."""
    loss, grads = fcg.value_and_grad(lambda p: F.mse_loss(mlp(p, batch["x"]), batch["y"]))(state.params)
    return state.apply_gradients(grads), {"loss": loss}


def mlp_batch(i: int, width: int = 64, rows: int = 32, device: torch.device | str = DEVICE) -> Batch:
    """Batch number ``i``."""
    return {
        "x": randn(rows, width, seed=1000 + 2 * i, device=device),
        "y": randn(rows, width, seed=1001 + 2 * i, device=device),
    }


def eager_run(fn: Step, state: Any, batches: Sequence[Batch]) -> tuple[Any, list[dict[str, Tensor]]]:
    """The oracle: the same function run eagerly on a fork."""
    step, twin, metrics = fcg.graph_step(fn), fcg.fork(state), []
    for batch in batches:
        twin, out = step.eager(twin, batch)
        metrics.append(out)
    return twin, metrics


# -- other processes ----------------------------------------------------------------------------------------------


def python(script: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own, from the repository."""
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "FCG_CUDA_TESTS_DEVICE": DEVICE.type},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
