"""Measures how fast a device copies and multiplies, and places a step's time beside that."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch

from functional_cg.step.costs import peak_flops

from .system import waiter
from .workloads import Workload

__all__ = ["copy_rate", "model_flops", "product_rate", "utilization"]

_COPIED = (2**28, 2**25)  # bytes on a GPU and on a CPU, larger than their caches, to measure the copy rate
_PRODUCT = (4096, 512)  # matrix sizes, to measure the product rate
_CALLS = 10
_BEST_OF_S = 0.1  # minimum duration, so that slow first calls do not matter


@functools.cache
def model_flops(work: Workload) -> float:
    """Count the FLOPs of a step, as :meth:`.workloads.Workload.model_flops` does; a module is built for it once."""
    return work.model_flops()


def utilization(work: Workload, device: torch.device, ms: float) -> float | None:
    """Return the model's FLOPs per second over the peak that the vendor states; None if one of them is unknown.

    Args:
      work: The workload.
      device: Where it ran.
      ms: Milliseconds of a step.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    peak = peak_flops(name, torch.bfloat16 if work.bf16 else torch.float32)
    flops = model_flops(work)
    return None if peak is None or not flops else flops / (ms / 1e3) / peak


@functools.cache
def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the FLOPs per second of a large matrix product."""
    size = _PRODUCT[device.type == "cpu"]
    x = torch.ones(size, size, device=device, dtype=dtype)
    return 2 * size**3 / _shortest(lambda: torch.mm(x, x), device)


@functools.cache
def copy_rate(device: torch.device) -> float:
    """Measure the bytes per second that a copy reads and writes."""
    size = _COPIED[device.type == "cpu"]
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _shortest(lambda: target.copy_(source), device)


def _shortest(call: Callable[[], Any], device: torch.device) -> float:
    """Time the fastest of several calls, in seconds."""
    wait = waiter(device)
    times: list[float] = []
    while len(times) < _CALLS or sum(times) < _BEST_OF_S:
        wait()
        begin = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - begin)
    return min(times)
