"""Time a plan on buffers of its own: as a whole, and call by call."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ...errors import CaptureError
from ...stages.evaluate import quiet
from ...stages.lower.in_place import InPlacePlan
from ...stages.plan import Buffers, Plan
from ...stages.run.capture import backend_for
from ...stages.run.memory import scratch
from .kernels import Launches, Line

__all__ = ["device_seconds", "times_of", "times_of_lines"]

Act = Callable[[], None]
Where = tuple[torch.device, str]

_RUNS = 7
_RANGE = "functional_cg "


class _HostClock:
    """Reads the clock at each tick."""

    def __init__(self) -> None:
        self.read: list[float] = []

    def __call__(self) -> None:
        self.read.append(time.perf_counter())

    pause = __call__


class _DeviceClock:
    """Opens a range of torch's profiler at each tick.

    Events on the stream would count the time in which the device waits for the host, too.
    """

    def __init__(self) -> None:
        self.number = 0
        self._open: Any = None

    def __call__(self) -> None:
        self.end()
        self._open = record_function(f"{_RANGE}{self.number}")
        self._open.__enter__()
        self.number += 1

    def pause(self) -> None:
        """Open no range until the next tick."""
        self.end()
        self.number += 1

    def end(self) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
        self._open = None


class _Clock(Protocol):
    def __call__(self) -> None: ...

    def pause(self) -> None:
        """Tick, and let the time until the next tick belong to nothing."""
        ...


def times_of(
    plan: Plan,
    timed: Plan,
    buffers: Buffers,
    unchecked: Sequence[bool],
    copy_in: Act,
    where: Where,
) -> tuple[float, list[float]]:
    """Return the seconds of a replay, and those of its parts when they run one by one.

    Both begin with the copies of the inputs. The buffers are written: each run is a step further.

    Args:
      plan: What the step runs; it is captured on the buffers.
      timed: Its calls, a timed plan.
      buffers: Slots, inputs and constants.
      unchecked: Which slots may hold any value.
      copy_in: Copies the inputs in.
      where: The device, and the name of the user's function.
    Returns:
      (call, parts): the parts are the copies of the inputs, and those of the timed plan, in the order of its ticks.
      Medians of several runs; on a GPU, a part is the mean time in which the device is busy with it.
    Raises:
      CaptureError: If torch's profiler sees no kernel on a GPU.
    """
    with _replaying(plan, buffers, unchecked, copy_in, where) as call:
        return _timed(partial(_timed_run, timed, buffers, copy_in), call, where)


def times_of_lines(
    plan: InPlacePlan, buffers: Buffers, unchecked: Sequence[bool], copy_in: Act, where: Where
) -> tuple[float, float, list[Line | None], list[float]]:
    """Return the seconds of a replay of a compiled step, and those of the lines that launch its kernels.

    The arguments, and what is raised, are those of :func:`times_of`.

    Returns:
      (call, inputs, lines, parts): seconds of a replay, of the copies of its inputs, and of each line; a line is None
      for what runs elsewhere and has no name, which has no time on a GPU.
    """
    lines: list[Line | None] = []
    with _replaying(plan, buffers, unchecked, copy_in, where) as call:

        def on_clock(clock: _Clock) -> Act:
            launches = Launches(clock, clock.pause)
            run = plan.bind_named(buffers, launches.call)

            def once() -> None:
                clock()
                copy_in()
                clock.pause()  # the profiler's ranges may not overlap those that torch opens around the lines
                with launches:
                    run(())
                lines[:] = [None, *launches.lines][:-1]

            return once

        seconds, (inputs, *parts) = _timed(on_clock, call, where)
        return seconds, inputs, lines, parts


@contextmanager
def _replaying(
    plan: Plan, buffers: Buffers, unchecked: Sequence[bool], copy_in: Act, where: Where
) -> Iterator[Act]:
    """Capture a plan on buffers; yield what copies the inputs in and replays it."""
    with quiet():
        replay = backend_for(where[0]).capture(plan, buffers, partial(scratch, buffers, unchecked))

        def call() -> None:
            copy_in()
            replay(())

        try:
            yield call
        finally:
            replay.close()


def _timed(on_clock: Callable[[_Clock], Act], call: Act, where: Where) -> tuple[float, list[float]]:
    """Return the seconds of a call, and those between the ticks of what runs on a clock."""
    device, _ = where
    if device.type != "cuda":
        return _on_host(on_clock, call)
    parts = _parts_on_device(on_clock, where)
    return statistics.median([_on_device(call, device) for _ in range(1 + _RUNS)][1:]), parts


def _timed_run(timed: Plan, buffers: Buffers, copy_in: Act, clock: _Clock) -> Act:
    """Return a run of a timed plan on a clock."""
    run = timed.bind(buffers, tick=clock)

    def once() -> None:
        clock()
        copy_in()
        clock()
        run(())

    return once


def _on_host(on_clock: Callable[[_Clock], Act], call: Act) -> tuple[float, list[float]]:
    """Time calls and parts in turns, so that a busy moment of the machine slows both down."""
    clock = _HostClock()
    run = on_clock(clock)
    calls, parts = [], []
    for _ in range(1 + _RUNS):
        clock.read = []
        run()
        parts.append([end - start for start, end in pairwise(clock.read)])
        start = time.perf_counter()
        call()
        calls.append(time.perf_counter() - start)
    return statistics.median(calls[1:]), list(map(statistics.median, zip(*parts[1:], strict=True)))


def _on_device(call: Act, device: torch.device) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stream = torch.cuda.current_stream(device)
    start.record(stream)
    call()
    end.record(stream)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _parts_on_device(on_clock: Callable[[_Clock], Act], where: Where) -> list[float]:
    """Return the mean seconds in which the device is busy with what runs between two ticks of a clock."""
    device, function = where
    clock = _DeviceClock()
    run = on_clock(clock)

    def once() -> None:
        clock.number = 0
        run()
        clock.end()
        torch.cuda.synchronize(device)

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
    return [found[number] / _RUNS for number in range(clock.number - 1)]


def device_seconds(events: Sequence[Any]) -> dict[int, float]:
    """Return the seconds that a device is busy in each range, by number, from the events of torch's profiler."""
    found: dict[int, float] = defaultdict(float)
    for event in events:
        # The device has ranges of that name, too.
        if event.name.startswith(_RANGE) and event.device_type.name == "CPU":
            found[int(event.name.removeprefix(_RANGE))] += event.device_time_total / 1e6
    return found
