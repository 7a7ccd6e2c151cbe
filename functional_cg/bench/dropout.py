"""Time keyed dropout beside torch's own: ``python -m functional_cg.bench.dropout --device cuda``.

Forward and backward of one dropout, at sizes where the device's time counts and not the host's. ``aten`` calls both op
by op, as an eager run does; ``inductor`` compiles both into one kernel with the sums of their results, as a model's
neighbouring ops would be: ours as a captured function, torch's by ``torch.compile``.
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
_SHAPES = MappingProxyType({"cuda": ((16, 1024, 3072), (16, 12, 1024, 1024)), "cpu": ((16, 256, 256),)})


def _results(y: Tensor, x: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    (grad,) = torch.autograd.grad(y, x, up)
    return y.detach(), grad


def _torchs(x: Tensor, up: Tensor, p: float) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    return _results(F.dropout(x, p), x, up)


def _keyed(key: Tensor, x: Tensor, up: Tensor, p: float) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return _results(fcg.random.dropout(key, x, p), x, up)


def _sums(results: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(result.float().sum() for result in results)


def _pair(lowering: str, x: Tensor, up: Tensor, p: float) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Ours and torch's, ready to be called."""
    key = fcg.random.key(0).to(x.device)
    if lowering == "aten":
        return lambda: _keyed(key, x, up, p), lambda: _torchs(x, up, p)
    state = fcg.place({"key": key, "x": x, "up": up})

    @fcg.graph_fn(lowering="inductor")
    def keyed(state: Any) -> Any:
        return _sums(_keyed(state["key"], state["x"], state["up"], p))

    def forward_and_backward(x: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        y = F.dropout(x, p)
        return _sums((y, up * (y != 0) / (1 - p)))

    compiled = torch.compile(forward_and_backward)
    return lambda: keyed(state), lambda: compiled(x, up)


def _block(call: Callable[[], Any], times: int, device: torch.device) -> float:
    """Seconds a call."""
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
    """Run the program: a line of JSON per row."""
    parser = argparse.ArgumentParser("python -m functional_cg.bench.dropout", description=__doc__)
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
