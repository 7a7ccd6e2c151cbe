"""How systems are timed: losses first, then in turns against ours, on one clock.

A sample is the wall-clock time of a block of steps between two waits for the device, divided by the steps: the one
clock that torch and jax share. Ours and an opponent take turns, and who goes first alternates, so that clocks and
temperature are the same for both. Host time is the time until a single call returns while the device is idle.
"""

from __future__ import annotations

import gc
import json
import math
import platform
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from .opponents import OURS, System, Unavailable, build
from .workloads import Batch, Workload

__all__ = ["BATCHES", "WARM_UPS", "Row", "Samples", "bench", "environment", "in_turns", "table"]

BATCHES = 4
_LOSSES = 5
WARM_UPS = 3
_ROUNDS = 10
_HOST_CALLS = 50
_GIB = 2**30


@dataclass(frozen=True)
class Samples:
    """Times of one system in one comparison, in ms per step.

    Attributes:
      median: Of the blocks.
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
        """Summary of blocks, each in ms per step."""
        return cls(statistics.median(blocks), min(blocks), max(blocks), steps)


@dataclass
class Row:
    """What is known about one system on one workload.

    Attributes:
      workload: Its name.
      system: Its name.
      status: ``ok``, ``skipped`` or ``failed``.
      reason: Why it was skipped, or the last line of the failure.
      ms: Its times.
      ours_ms: Times of ours in the same rounds.
      ratio: Its median over that of ours: above 1, ours is faster.
      host_us: Median time until a call returns while the device is idle, in µs.
      peak_bytes: Peak of allocated memory from the start of the build to the last compared loss.
      reserved_bytes: Growth of what the allocator holds in use, pools of graphs included.
      start_bytes: The most that it held from the start of the build through the first step.
      first_step_s: Seconds from the start of the build until the first loss is there, compilation included.
      losses: The first losses.
      loss_distance: Largest relative distance of these to those of the reference system.
      losses_agree: Whether that is within the workload's tolerance.
      counts: Captures and replays, where the system counts them.
      notes: What a reader should know.
    """

    workload: str
    system: str
    status: str = "ok"
    reason: str = ""
    ms: Samples | None = None
    ours_ms: Samples | None = None
    ratio: float | None = None
    host_us: float | None = None
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    start_bytes: int | None = None
    first_step_s: float | None = None
    losses: list[float] = field(default_factory=list)
    loss_distance: float | None = None
    losses_agree: bool | None = None
    counts: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def as_json(self, environment: dict[str, Any]) -> str:
        """One line of JSON; NaN and infinity become null."""
        return json.dumps(_finite({**asdict(self), **environment}))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def environment(device: torch.device) -> dict[str, Any]:
    """Device and versions."""
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


def _start(name: str, work: Workload, device: torch.device, batches: Sequence[Batch], row: Row) -> System:
    """Build a system and take its first steps: time to the first loss, losses and memory go into the row."""
    _clean(device)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    start = time.perf_counter()
    system = build(name, work, device, batches)
    for i in range(_LOSSES):
        row.losses.append(float(system.step(system.batches[i % BATCHES])))
        if i == 0:
            system.wait()
            row.first_step_s = time.perf_counter() - start
            if on_gpu:
                row.start_bytes = torch.cuda.max_memory_reserved(device) - reserved
    row.peak_bytes = system.peak_bytes()
    if on_gpu and row.peak_bytes is None:
        row.peak_bytes = torch.cuda.max_memory_allocated(device) - allocated
        torch.cuda.empty_cache()
        row.reserved_bytes = torch.cuda.memory_reserved(device) - reserved
    for i in range(WARM_UPS):
        system.step(system.batches[i % BATCHES])
    system.wait()
    return system


def _compare(row: Row, reference: Sequence[float], tolerance: float) -> None:
    """Compare the first losses with those of the reference system."""
    distances = [abs(a - b) / max(abs(b), 1e-12) for a, b in zip(row.losses, reference, strict=True)]
    row.loss_distance = math.inf if any(map(math.isnan, distances)) else max(distances)
    row.losses_agree = row.loss_distance <= tolerance


def _block(system: System, steps: int) -> float:
    """Time of one block, in ms per step."""
    step, batches, count = system.step, system.batches, len(system.batches)
    system.wait()
    start = time.perf_counter()
    for i in range(steps):
        step(batches[i % count])
    system.wait()
    return (time.perf_counter() - start) * 1e3 / steps


def in_turns(systems: Sequence[System], steps: int) -> list[Samples]:
    """Time systems in turns; the order is reversed at each round."""
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


def _host_us(system: System, calls: int) -> float:
    """Median time until a call returns while the device is idle."""
    times = []
    for i in range(calls):
        batch = system.batches[i % len(system.batches)]
        system.wait()
        start = time.perf_counter()
        system.step(batch)
        times.append(time.perf_counter() - start)
    system.wait()
    return statistics.median(times) * 1e6


def bench(
    work: Workload,
    against: Sequence[str],
    device: torch.device,
    emit: Callable[[Row], None],
    *,
    anchor: str = OURS[0],
    steps: int | None = None,
    deadline: float = math.inf,
) -> list[Row]:
    """Time ours and the opponents on one workload. A system that fails is a row; the others go on.

    Args:
      work: The workload.
      against: Names of the systems beside ours, in order.
      device: Where.
      emit: Called with each row as soon as it is complete.
      anchor: Which of ours the others are compared with; it stays alive all the time.
      steps: Timed steps for each system.
      deadline: On the clock of ``time.monotonic``: no system is started later.
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
            system = _start(name, work, device, batches, row)
            reference = reference or row.losses
            _compare(row, reference, work.tolerance)
            _fill(row, system, ours, steps)
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
        _shut(ours, rows[0])
    return rows


def _fill(row: Row, system: System, ours: System | None, steps: int) -> None:
    if ours is None:
        (row.ms,) = in_turns([system], steps)
    else:
        row.ours_ms, row.ms = in_turns([ours, system], steps)
        row.ratio = row.ms.median / row.ours_ms.median
    row.host_us = _host_us(system, min(_HOST_CALLS, max(5, steps)))
    row.counts = system.counts()
    row.notes = system.notes


def _shut(system: System, row: Row) -> None:
    try:
        system.close()
    except Exception as error:
        print(f"{row.workload}: closing {row.system} failed: {_last_line(error)}", flush=True)
        traceback.print_exc()


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def table(work: Workload, rows: Sequence[Row]) -> str:
    """The rows of one workload, as text."""
    head: tuple[str, ...] = (
        "system",
        "ms/step",
        "min",
        "max",
        "x ours",
        "host µs",
        "peak GiB",
        "reserved GiB",
        "start GiB",
    )
    head += ("first step s", "captures", "replays", "loss distance")
    lines = [head, *(_cells(row, work.tolerance) for row in rows if row.status == "ok")]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = [f"{work.name}: {work.describe()}"]
    for line in lines:
        first, *others = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        text.append("  ".join([line[0].ljust(len(first)), *others]))
    text += _remarks(rows)
    return "\n".join(text)


def _cells(row: Row, tolerance: float) -> tuple[str, ...]:
    assert row.ms is not None
    places = 2 if row.ms.median >= 10 else 4
    agree = "" if row.losses_agree else f" DIFFERS (> {tolerance:g})"
    return (
        row.system,
        *(f"{value:.{places}f}" for value in (row.ms.median, row.ms.least, row.ms.most)),
        "" if row.ratio is None else f"{row.ratio:.2f}",
        "" if row.host_us is None else f"{row.host_us:,.1f}",
        "" if row.peak_bytes is None else f"{row.peak_bytes / _GIB:.3f}",
        "" if row.reserved_bytes is None else f"{row.reserved_bytes / _GIB:.3f}",
        "" if row.start_bytes is None else f"{row.start_bytes / _GIB:.3f}",
        "" if row.first_step_s is None else f"{row.first_step_s:.2f}",
        *(str(row.counts.get(key, "")) for key in ("captures", "replays")),
        "" if row.loss_distance is None else f"{row.loss_distance:.1e}{agree}",
    )


def _remarks(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        if row.status != "ok":
            yield f"{row.status}: {row.system}: {row.reason}"
        for note in row.notes:
            yield f"note: {row.system}: {note}"
    first = next((row for row in rows if row.losses), None)
    if first is not None:
        yield f"first losses of {first.system}: {', '.join(f'{loss:.6f}' for loss in first.losses)}"
    steps = sorted({row.ms.steps for row in rows if row.ms is not None})
    yield f"{' or '.join(map(str, steps)) or 'no'} timed steps each; x ours: ratio of medians, interleaved blocks"
