"""Times systems: checks their losses, then runs each in turns with ours, on one clock.

A sample is the wall-clock time of a block of steps between two device synchronizations, divided by the number of steps.
That is the one clock that torch and jax share. Ours and an opponent take turns, and the order alternates, so that
clocks and temperature are the same for both. Host time is the time until a single call returns on an idle device.
"""

from __future__ import annotations

import gc
import json
import math
import platform
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from .rates import copy_rate, model_flops, product_rate, utilization
from .system import FEW, OURS, System, Unavailable
from .systems.opponents import build
from .workloads import Batch, Workload

__all__ = ["BATCHES", "WARM_UPS", "Row", "Samples", "bench", "environment", "in_turns", "start"]

BATCHES = 4
_LOSSES = 5
WARM_UPS = 3
_ROUNDS = 10
_HOST_CALLS = (5, 300)  # minimum and maximum
_HOST_MS = 600  # approximate limit on their total time


@dataclass(frozen=True)
class Samples:
    """Times of one system in one comparison, in ms per step.

    Attributes:
      median: Median of the blocks.
      least: The fastest block.
      most: The slowest block.
      steps: Number of timed steps.
    """

    median: float
    least: float
    most: float
    steps: int

    @classmethod
    def of(cls, blocks: Sequence[float], steps: int) -> Samples:
        """Summarize blocks, each in ms per step."""
        return cls(statistics.median(blocks), min(blocks), max(blocks), steps)


@dataclass
class Row:
    """Results of one system on one workload.

    Attributes:
      workload: Name of the workload.
      system: Name of the system.
      status: ``ok``, ``skipped`` or ``failed``.
      reason: Why it was skipped, or the first line of the error.
      ms: Its times in ms per step.
      ours_ms: Our times in the same rounds.
      ratio: Its median over ours; above 1, ours is faster.
      host_us: Median time until a call returns on an idle device, in µs.
      ours_host_us: Our host time, measured in turns with it.
      host_ratio: Its host time over ours.
      peak_bytes: Peak of allocated memory from the start of the build to the last compared loss.
      reserved_bytes: Growth of the allocator's reserved memory in use, graph pools included.
      start_bytes: Peak of reserved memory from the start of the build through the first step.
      steady_bytes: Peak of reserved memory from the second step on.
      first_step_s: Seconds from the start of the build until the first loss is available, compilation included.
      losses: The first losses.
      loss_distance: Their largest relative distance from those of the reference system.
      losses_agree: Whether this distance is within the workload's tolerance.
      counts: Captures and replays, where the system counts them.
      nodes: Kernels, copies and fills on the device in one step.
      floor_ms: Lower bound of the step time on this device; see :meth:`functional_cg.Lowered.cost_analysis`.
      over_floor: Its median over the floor.
      tokens_per_s: Tokens per second, for a language model.
      utilization: FLOPs of the model, by nanoGPT's count, over the peak that the vendor of the device states.
      notes: Remarks for readers.
    """

    workload: str
    system: str
    status: str = "ok"
    reason: str = ""
    ms: Samples | None = None
    ours_ms: Samples | None = None
    ratio: float | None = None
    host_us: float | None = None
    ours_host_us: float | None = None
    host_ratio: float | None = None
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    start_bytes: int | None = None
    steady_bytes: int | None = None
    first_step_s: float | None = None
    losses: list[float] = field(default_factory=list)
    loss_distance: float | None = None
    losses_agree: bool | None = None
    counts: dict[str, int] = field(default_factory=dict)
    nodes: int | None = None
    floor_ms: float | None = None
    over_floor: float | None = None
    tokens_per_s: float | None = None
    utilization: float | None = None
    notes: list[str] = field(default_factory=list)

    def as_json(self, environment: dict[str, Any]) -> str:
        """Format the row as a line of JSON; NaN and infinity become null."""
        return json.dumps(_finite({**asdict(self), **environment}))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def environment(device: torch.device) -> dict[str, Any]:
    """Return the device and versions."""
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else f"cpu, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "cuda": torch.version.cuda if on_gpu else None,
        "python": platform.python_version(),
    }


def _clean(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def start(name: str, work: Workload, device: torch.device, batches: Sequence[Batch], row: Row) -> System:
    """Build a system and take its first steps, and record time to first loss, losses and memory.

    Args:
      name: The system.
      work: What it trains.
      device: Where.
      batches: Batches on the CPU.
      row: The row to fill in.
    Raises:
      Unavailable: If it cannot run here.
    """
    _clean(device)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    begin = time.perf_counter()
    system = build(name, work, device, batches)
    for i in range(_LOSSES):
        row.losses.append(float(system.step(system.batches[i % len(system.batches)])))
        if i == 0:
            system.wait()
            row.first_step_s = time.perf_counter() - begin
            if on_gpu:
                row.peak_bytes = torch.cuda.max_memory_allocated(device) - allocated
                row.start_bytes = torch.cuda.max_memory_reserved(device) - reserved
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(device)
    own = system.peak_bytes()
    if own is not None:
        row.peak_bytes, row.start_bytes = own, None
    elif on_gpu:
        row.peak_bytes = max(row.peak_bytes or 0, torch.cuda.max_memory_allocated(device) - allocated)
        row.steady_bytes = torch.cuda.max_memory_reserved(device) - reserved
        torch.cuda.empty_cache()
        row.reserved_bytes = torch.cuda.memory_reserved(device) - reserved
    for i in range(WARM_UPS):
        system.step(system.batches[i % len(system.batches)])
    system.wait()
    return system


def _compare(row: Row, reference: Sequence[float], tolerance: float) -> None:
    """Compare the first losses with those of the reference system."""
    distances = [abs(a - b) / max(abs(b), 1e-12) for a, b in zip(row.losses, reference, strict=True)]
    row.loss_distance = math.inf if any(map(math.isnan, distances)) else max(distances)
    row.losses_agree = row.loss_distance <= tolerance


def _block(system: System, steps: int) -> float:
    """Time one block, in ms per step."""
    step, batches, count = system.step, system.batches, len(system.batches)
    system.wait()
    start = time.perf_counter()
    for i in range(steps):
        step(batches[i % count])
    system.wait()
    return (time.perf_counter() - start) * 1e3 / steps


def in_turns(systems: Sequence[System], steps: int) -> list[Samples]:
    """Time systems in turns; the order is reversed in every other round."""
    rounds = min(_ROUNDS, steps)
    length = -(-steps // rounds)
    for system in systems:
        _block(system, min(length, WARM_UPS))
    blocks: dict[int, list[float]] = {i: [] for i in range(len(systems))}
    for turn in range(rounds):
        order = list(enumerate(systems))
        for i, system in order if turn % 2 == 0 else reversed(order):
            blocks[i].append(_block(system, length))
    return [Samples.of(blocks[i], length * rounds) for i in range(len(systems))]


def _host_us(systems: Sequence[System], calls: int) -> list[float]:
    """Return each system's median time per call on an idle device, in turns; the device must be idle at first."""
    times: list[list[float]] = [[] for _ in systems]
    for i in range(calls):
        for system, spent in zip(systems, times, strict=True):
            batch = system.batches[i % len(system.batches)]
            start = time.perf_counter()
            system.step(batch)
            spent.append(time.perf_counter() - start)
            system.wait()
    return [statistics.median(spent) * 1e6 for spent in times]


def bench(
    work: Workload,
    against: Sequence[str],
    device: torch.device,
    emit: Callable[[Row], None],
    *,
    anchor: str = OURS[0],
    steps: int | None = None,
    deadline: float = math.inf,
    nodes: bool = False,
) -> list[Row]:
    """Time ours and the opponents on one workload. A system that fails gets a row, and the others continue.

    Args:
      work: The workload.
      against: Names of the systems beside ours, in order.
      device: Where.
      emit: Called with each completed row.
      anchor: Which of our systems the others are compared with; it stays alive throughout.
      steps: Timed steps for each system.
      deadline: Time, by ``time.monotonic``, after which no system is started.
      nodes: Whether to count the nodes of opponents, too. The profiler that counts them may slow down later timings;
        ours are counted at the end.
    """
    steps = work.steps if steps is None else steps
    batches = work.batches(BATCHES)
    rows: list[Row] = []
    ours: System | None = None
    reference: list[float] | None = None
    for name in dict.fromkeys([anchor, *against]):
        row = Row(work.name, name)
        rows.append(row)
        system: System | None = None
        try:
            if time.monotonic() > deadline:
                raise Unavailable("the time limit was reached")
            system = start(name, work, device, batches, row)
            reference = reference or row.losses
            _compare(row, reference, work.tolerance)
            _fill(row, system, ours, steps)
            if name != FEW:  # a step over fewer leaves has another floor
                _place_above_floor(row, rows[0], work, system, device)
            if nodes and name != anchor:
                row.nodes = _nodes(system, device)
        except Unavailable as error:
            row.status, row.reason = "skipped", str(error)
        except Exception as error:
            row.status, row.reason = "failed", _last_line(error)
            traceback.print_exc()
        emit(row)
        if name == anchor:
            ours = system if row.status == "ok" else None
        elif system is not None:
            _shut(system, row)
        system = None
    if ours is not None:
        rows[0].nodes = _nodes(ours, device)
        _shut(ours, rows[0])
    return rows


def _fill(row: Row, system: System, ours: System | None, steps: int) -> None:
    both = [system] if ours is None else [ours, system]
    times = in_turns(both, steps)
    row.ms = times[-1]
    least, most = _HOST_CALLS
    host_us = _host_us(both, max(least, min(most, steps, int(_HOST_MS / row.ms.median))))
    row.host_us = host_us[-1]
    if ours is not None:
        row.ours_ms, row.ours_host_us = times[0], host_us[0]
        row.ratio = row.ms.median / row.ours_ms.median
        row.host_ratio = row.host_us / row.ours_host_us
    row.counts = system.counts()
    row.notes = system.notes


def _shut(system: System, row: Row) -> None:
    try:
        system.close()
    except Exception as error:
        print(f"{row.workload}: closing {row.system} failed: {_last_line(error)}", flush=True)
        traceback.print_exc()


def _last_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"


def _place_above_floor(row: Row, anchor: Row, work: Workload, system: System, device: torch.device) -> None:
    """Fill in the floor, which comes from ours, and how far the system is above it."""
    assert row.ms is not None
    if row is anchor:
        costs = system.costs(None, None)
        if costs is not None and costs.floor_s is None:
            dtype = torch.bfloat16 if work.bf16 else torch.float32
            costs = system.costs(copy_rate(device), product_rate(device, dtype))
            row.notes.append(
                f"the floor is that of rates measured in this run, of a copy and of a product of {dtype}"
            )
        row.floor_ms = None if costs is None or costs.floor_s is None else costs.floor_s * 1e3
    row.floor_ms = anchor.floor_ms
    row.over_floor = None if not row.floor_ms else row.ms.median / row.floor_ms
    if flops := model_flops(work):
        row.tokens_per_s = work.batch * work.time * 1e3 / row.ms.median
        row.utilization = utilization(work, device, row.ms.median)
        achieved = flops * 1e3 / row.ms.median
        rate = product_rate(device, torch.bfloat16 if work.bf16 else torch.float32)
        row.notes.append(
            f"{achieved / 1e12:.3g} TFLOP/s of the model, {achieved / rate:.1%} of a large product's"
        )
    if work.kind == "optimizer" and work.rule == "adamw":
        rate = 28 * work.leaves * work.width / row.ms.median * 1e3
        row.notes.append(
            f"{rate / 1e9:,.1f} GB/s of 28 B per parameter; a copy {copy_rate(device) / 1e9:,.1f} GB/s"
        )


def _nodes(system: System, device: torch.device) -> int | None:
    """Count a step's kernels, copies and fills on the device with the profiler."""
    if device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    system.wait()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        system.step(system.batches[0])
        system.wait()
    return int(sum(event.device_type.name == "CUDA" for event in profiler.events() or ()))
