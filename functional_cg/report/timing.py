"""Times a step call by call, and plots the distribution with its median and spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter

from ..graph_step import GraphFn, GraphStep
from ..messages.html import colors
from ..state.handle import Handle
from ..state.lifecycle import fork

__all__ = ["seconds_per_call", "step_times"]

_WARM_UP = 5
_LONG_TAIL = 10


def seconds_per_call(
    step: GraphStep[Any, Any] | GraphFn[Any, Any], state: Any, *inputs: Any, n: int = 100
) -> list[float]:
    """Time ``n`` calls of a step, each until its work on the device is done.

    The calls run on a fork of the state, so ``state`` is neither donated nor changed. The fork has its own capture,
    which is freed with it. On a GPU each call is waited for; a loop that does not wait is faster.

    Args:
      step: The step or read-only function to time.
      state: Its first argument.
      inputs: The other arguments; the same at each call.
      n: Number of timed calls; five untimed ones run first.
    Returns:
      Seconds of each call.
    Raises:
      ValueError: If ``n`` is not positive.

    Example:
      >>> import torch, functional_cg as fcg
      >>> from functional_cg import report
      >>> step = fcg.graph_step(lambda state: ({"w": state["w"] * 2}, {}))
      >>> state = fcg.place({"w": torch.ones(2)})
      >>> seconds = report.seconds_per_call(step, state, n=10)
      >>> len(seconds), state.generation
      (10, 0)
    """
    if n < 1:
        raise ValueError(f"report.seconds_per_call: n must be at least 1, got {n}")
    device = state._lease.arena.device if isinstance(state, Handle) else torch.device("cpu")
    if isinstance(step, GraphStep):
        state = fork(state)
    seconds = []
    for _ in range(_WARM_UP + n):
        start = time.perf_counter()
        result: Any = step(state, *inputs)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
        if isinstance(step, GraphStep):
            state = result[0]
    return seconds[_WARM_UP:]


def step_times(
    times: GraphStep[Any, Any] | GraphFn[Any, Any] | Sequence[float] | Mapping[str, Sequence[float]],
    *arguments: Any,
    n: int = 100,
    ax: Axes | None = None,
) -> Axes:
    """Draw the distribution of step times: each call, the median, and the middle half.

    Args:
      times: A step, which :func:`seconds_per_call` times; or seconds per call; or a dict of such lists by name.
      arguments: State and inputs, if ``times`` is a step.
      n: Number of calls, if ``times`` is a step.
      ax: Where to draw; a new figure by default.
    Returns:
      The axes, in milliseconds; the labels give the median and the spread (10th to 90th percentile).
    Raises:
      ValueError: If there are no seconds.

    Example:
      >>> from functional_cg import report
      >>> ax = report.step_times([0.001, 0.002, 0.003])
      >>> ax.get_yticklabels()[0].get_text()
      'step: 2 ms (1.2 to 2.8)'
    """
    if isinstance(times, (GraphStep, GraphFn)):
        times = {times._name: seconds_per_call(times, *arguments, n=n)}
    named = dict(times) if isinstance(times, Mapping) else {"step": times}
    if not named or not all(map(len, named.values())):
        raise ValueError("report.step_times: there are no seconds to draw. To fix: time some calls first.")
    ax = ax or plt.subplots(figsize=(7, 0.9 * len(named) + 1.2), layout="constrained")[1]
    labels = []
    for row, (seconds, shade) in enumerate(zip(named.values(), colors(named).values(), strict=True)):
        values = [1e3 * second for second in seconds]
        _draw(ax, row, values, shade)
        low, high = _percentile(values, 10), _percentile(values, 90)
        labels.append(f"{list(named)[row]}: {statistics.median(values):.3g} ms ({low:.3g} to {high:.3g})")
    ax.set_yticks(range(len(labels)), labels)
    ax.set_ylim(len(labels) - 0.5, -0.5)
    ax.set(xlabel="ms per call", ylabel="step", title="step times: median (10th to 90th percentile)")
    if any(max(seconds) > _LONG_TAIL * statistics.median(seconds) for seconds in named.values()):
        _make_logarithmic(ax)
    ax.grid(axis="x", alpha=0.3)
    return ax


def _draw(ax: Axes, row: int, values: Sequence[float], shade: str) -> None:
    ax.plot(values, _spread_out(len(values), row), ".", color=shade, alpha=0.5, markersize=4)
    ax.boxplot(
        values, positions=[row], widths=0.5, orientation="horizontal", showfliers=False, whis=(10, 90),
        manage_ticks=False, medianprops={"color": "black", "linewidth": 2},
    )  # fmt: skip


def _make_logarithmic(ax: Axes) -> None:
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_xlabel("ms per call, logarithmic")


def _spread_out(count: int, row: int) -> list[float]:
    """Return heights that keep points of equal time apart."""
    return [row + 0.3 * (((i * 0.618034) % 1.0) - 0.5) for i in range(count)]


def _percentile(values: Sequence[float], percent: int) -> float:
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
