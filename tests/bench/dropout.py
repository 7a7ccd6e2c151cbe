"""Times keyed dropout against torch's dropout: ``python -m tests.bench.dropout --device cuda``.

It runs forward and backward of one dropout, at sizes where device time dominates host time. ``aten`` calls both op by
op, as an eager run does. ``inductor`` is a training step that consists of the dropout only: ours captured as a whole,
torch's with compiled forward and backward and an in-place update.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import functional_cg as fcg

from .measure import environment

__all__ = ["main"]

_ROUNDS, _TARGET_S = 15, 0.05
_RATE = 1e-6
_SHAPES = MappingProxyType({"cuda": ((16, 1024, 3072), (16, 12, 1024, 1024)), "cpu": ((16, 256, 256),)})


def _results(y: Tensor, x: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    (grad,) = torch.autograd.grad(y, x, up)
    return y.detach(), grad


def _of_torch(x: Tensor, up: Tensor, p: float) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    return _results(F.dropout(x, p), x, up)


def _keyed(key: Tensor, x: Tensor, up: Tensor, p: float) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    return _results(fcg.random.dropout(key, x, p), x, up)


def _pair(lowering: str, x: Tensor, up: Tensor, p: float) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Make ours and torch's version, ready to be called."""
    key = fcg.random.key(0).to(x.device)
    if lowering == "aten":
        return lambda: _keyed(key, x, up, p), lambda: _of_torch(x, up, p)
    return _captured(key, x, up, p), _compiled(x, up, p)


def _captured(key: Tensor, x: Tensor, up: Tensor, p: float) -> Callable[[], Any]:
    def train_step(state: Any) -> Any:
        drawn = fcg.random.fold_in(state["key"], state["step"])

        def loss_fn(x: Tensor) -> Tensor:
            total: Tensor = (fcg.random.dropout(drawn, x, p) * state["up"]).float().sum()
            return total

        loss, grad = fcg.value_and_grad(loss_fn)(state["x"])
        return {**state, "x": state["x"] - _RATE * grad, "step": state["step"] + 1}, loss

    step = fcg.graph_step(train_step, lowering="inductor")
    states: list[Any] = [fcg.place({"key": key, "x": x, "up": up, "step": torch.zeros_like(key[0])})]

    def call() -> None:
        states[0], _ = step(states[0])

    return call


def _compiled(x: Tensor, up: Tensor, p: float) -> Callable[[], Any]:
    leaf = x.detach().clone().requires_grad_()
    loss_of = torch.compile(lambda x, up: (F.dropout(x, p) * up).float().sum())

    def call() -> None:
        (grad,) = torch.autograd.grad(loss_of(leaf, up), leaf)
        with torch.no_grad():
            leaf.sub_(grad, alpha=_RATE)

    return call


def _block(call: Callable[[], Any], times: int, device: torch.device) -> float:
    """Time a block of calls, in seconds per call."""
    start = time.perf_counter()
    for _ in range(times):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / times


def _row(
    lowering: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, p: float
) -> dict[str, Any]:
    x, up = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    calls = _pair(lowering, x, up, p)
    lengths = []
    for call in calls:
        for _ in range(3):
            call()
        lengths.append(max(3, round(_TARGET_S / _block(call, 3, device))))
    blocks: tuple[list[float], list[float]] = ([], [])
    for turn in range(_ROUNDS):
        for i in (0, 1) if turn % 2 == 0 else (1, 0):
            blocks[i].append(_block(calls[i], lengths[i], device) * 1e6)
    ours, theirs = map(statistics.median, blocks)
    return {
        "lowering": lowering, "shape": list(shape), "dtype": str(dtype).removeprefix("torch."), "p": p,
        "keyed_us": round(ours, 2), "keyed_min": round(min(blocks[0]), 2), "keyed_max": round(max(blocks[0]), 2),
        "torch_us": round(theirs, 2), "torch_min": round(min(blocks[1]), 2), "torch_max": round(max(blocks[1]), 2),
        "ratio": round(ours / theirs, 3),
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program, and print a line of JSON per row."""
    parser = argparse.ArgumentParser("python -m tests.bench.dropout", description=__doc__)
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--lowering", choices=("aten", "inductor"), nargs="+", default=["aten", "inductor"])
    parser.add_argument("--p", type=float, default=0.1, help="probability of a zero")
    options = parser.parse_args(argv)
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    print(json.dumps(environment(device)), flush=True)
    for lowering in options.lowering:
        for shape in _SHAPES[device.type]:
            for dtype in (torch.float32, torch.bfloat16):
                print(json.dumps(_row(lowering, shape, dtype, device, options.p)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
