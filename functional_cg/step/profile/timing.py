"""Time a plan on buffers of its own: as a whole, and part by part."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ...errors import CaptureError
from ...stages.evaluate import quiet
from ...stages.plan import Buffers, Plan
from ...stages.run.capture import backend_for
from ...stages.run.memory import scratch

__all__ = ["Act", "Clock", "DeviceClock", "device_seconds", "replaying", "timed"]

Act = Callable[[], None]
_RUNS = 7
_RANGE = "functional_cg "


class Clock:
    """Notes when each part of a run begins.

    Attributes:
      parts: What has begun, in order; None where nothing that is timed runs.
      starts: When, in seconds.
    """

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self.starts: list[float] = []

    def __call__(self, part: Any) -> None:
        """Begin a part; the one before ends."""
        self.parts.append(part)
        self.starts.append(time.perf_counter())


class DeviceClock(Clock):
    """Opens a range of torch's profiler for each part, whose name is its position.

    Events on the stream would count the time in which the device waits for the host, too.
    """

    _open: Any = None

    def __call__(self, part: Any) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
        self._open = None if part is None else record_function(f"{_RANGE}{len(self.parts)}")
        if self._open is not None:
            self._open.__enter__()
        self.parts.append(part)


@contextmanager
def replaying(
    plan: Plan, buffers: Buffers, unchecked: Sequence[bool], copy_in: Act, device: torch.device
) -> Iterator[Act]:
    """Capture a plan on buffers, which each run writes; yield what copies the inputs in and replays it."""
    backend, spare = backend_for(device), partial(scratch, buffers, unchecked)
    with quiet(), closing(backend.capture(plan, buffers, spare)) as replay:

        def call() -> None:
            copy_in()
            replay(())

        yield call


def timed(
    run_on: Callable[[Clock], Act], call: Act, device: torch.device, function: str
) -> tuple[float, list[tuple[Any, float]]]:
    """Return the seconds of a call, and the parts of a run with theirs, in order.

    They are medians of several runs; on a GPU, a part takes the mean time in which the device is busy with it.

    Args:
      run_on: Returns a run that tells a clock of its parts.
      call: The call.
      device: Where both run.
      function: Name of the user's function.
    Raises:
      CaptureError: If torch's profiler sees no kernel on a GPU.
    """
    on_gpu = device.type == "cuda"
    clock = DeviceClock() if on_gpu else Clock()
    run = run_on(clock)

    def once() -> None:
        clock.parts.clear()
        clock.starts.clear()
        run()
        clock(None)
        if on_gpu:
            torch.cuda.synchronize(device)

    if on_gpu:
        seconds = _busy(once, function)
        calls = [_on_device(call, device) for _ in range(1 + _RUNS)]
        return statistics.median(calls[1:]), [
            (part, seconds[n] / _RUNS) for n, part in enumerate(clock.parts)
        ]
    calls, runs = [], []
    for _ in range(1 + _RUNS):  # in turns, so that a busy moment of the machine slows both down
        once()
        runs.append([end - start for start, end in pairwise(clock.starts)])
        start = time.perf_counter()
        call()
        calls.append(time.perf_counter() - start)
    parts = map(statistics.median, zip(*runs[1:], strict=True))
    return statistics.median(calls[1:]), list(zip(clock.parts, parts, strict=False))


def _on_device(call: Act, device: torch.device) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stream = torch.cuda.current_stream(device)
    start.record(stream)
    call()
    end.record(stream)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _busy(once: Act, function: str) -> dict[int, float]:
    """Return the seconds in which the device is busy with each part of some runs, by its position."""
    once()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(_RUNS):
            once()
    found = device_seconds(profiler.events() or ())
    if not any(found.values()):
        raise CaptureError.of(
            function,
            "torch's profiler has recorded no kernel; the state is unchanged.",
            why="The times of kernels are those that it records.",
            fix="end other profilers of this process, such as `nsys` or `ncu`, which take its place; "
            "`functional_cg.report.step_times(step, state, batch)` times whole calls without it.",
        )
    return found


def device_seconds(events: Sequence[Any]) -> dict[int, float]:
    """Return the seconds that a device is busy in each range, by number, from the events of torch's profiler."""
    found: dict[int, float] = defaultdict(float)
    for event in events:
        # The device has ranges of that name, too.
        if event.name.startswith(_RANGE) and event.device_type.name == "CPU":
            found[int(event.name.removeprefix(_RANGE))] += event.device_time_total / 1e6
    return found
