"""Helpers of the notebooks: data, expected errors and plots (extra ``notebooks``)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from torch import Tensor

from functional_cg import report
from functional_cg.messages.html import colors

__all__ = [
    "batches",
    "broken",
    "draw_counts",
    "draw_last_batches",
    "draw_losses",
    "draw_over_first",
    "draw_owners",
    "draw_record",
    "draw_regions",
    "draw_sizes",
    "mark",
    "refused",
    "running_mean",
    "seconds_of",
    "spiral",
]

Batch = dict[str, Tensor]

_SHADES = ("tab:blue", "tab:orange", "tab:green")
_MARKERS = ("o", "^", "s")
_GRID = 120


@contextmanager
def refused(error: type[BaseException]) -> Iterator[None]:
    """Print the error that the block must raise.

    Raises:
      AssertionError: If the block ends without it.

    Example:
      >>> from notebooks.helpers.notebook import refused
      >>> with refused(ValueError):
      ...     int("x")
      ValueError: invalid literal for int() with base 10: 'x'
    """
    try:
        yield
    except error as caught:
        print(f"{type(caught).__name__}: {caught}")
    else:
        raise AssertionError(f"nothing raised {error.__name__}")


def broken(test: Callable[[], object]) -> str:
    """Return what hypothesis reports for a failing test: the error and the smallest example.

    Raises:
      AssertionError: If the test passes.
    """
    try:
        test()
    except Exception as error:  # the step under test may raise anything
        notes = "\n".join(getattr(error, "__notes__", []))
        return f"{error}\n\n{notes.partition('Explanation:')[0].rstrip()}"
    raise AssertionError("the law holds")


def draw_sizes(tries: Sequence[tuple[int, bool]]) -> Axes:
    """Draw the size of each example that hypothesis tried, and whether the law held."""
    _, ax = plt.subplots(figsize=(7, 2.5))
    for broke, marker, label in ((False, "o", "holds"), (True, "x", "breaks the law")):
        points = [(number, size) for number, (size, failed) in enumerate(tries, 1) if failed is broke]
        ax.plot(*zip(*points, strict=True), marker, color=_SHADES[broke], markersize=4, label=label)
    ax.set(xlabel="example", ylabel="numbers that are not zero")
    ax.legend(frameon=False)
    return ax


def draw_counts(counts: Mapping[str, int], *, of: int) -> Axes:
    """Draw each count as a fraction of ``of``."""
    _, ax = plt.subplots(figsize=(5, 2.5))
    names = sorted(counts, key=lambda name: counts[name])
    ax.barh(names, [counts[name] / of for name in names], color=_SHADES[0])
    ax.set(xlim=(0, 1), xlabel=f"part of {of} programs")
    return ax


def spiral(count: int, *, arms: int = 3, noise: float = 0.35, seed: int = 0) -> Batch:
    """Make points of a spiral galaxy, labelled by arm: ``{"x": f32[count, 2], "y": i64[count]}``.

    Example:
      >>> from notebooks.helpers.notebook import spiral
      >>> spiral(5)["x"].shape
      torch.Size([5, 2])
    """
    generator = torch.Generator().manual_seed(seed)
    arm = torch.randint(arms, (count,), generator=generator)
    radius = torch.rand(count, generator=generator)
    angle = 2 * torch.pi * arm / arms + 5 * radius + noise * torch.randn(count, generator=generator)
    return {"x": torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), "y": arm}


def batches(data: Batch, batch_size: int, seed: int = 0) -> Iterator[Batch]:
    """Draw batches of rows with replacement, endlessly.

    Example:
      >>> import torch
      >>> from notebooks.helpers.notebook import batches
      >>> next(batches({"x": torch.ones(9)}, 2))
      {'x': tensor([1., 1.])}
    """
    generator = torch.Generator().manual_seed(seed)
    length = len(next(iter(data.values())))
    while True:
        rows = torch.randint(length, (batch_size,), generator=generator)
        yield {name: values[rows] for name, values in data.items()}


def running_mean(losses: Sequence[Tensor | float], window: int = 20) -> list[float]:
    """Average each loss with up to ``window - 1`` losses before it.

    Example:
      >>> from notebooks.helpers.notebook import running_mean
      >>> running_mean([4.0, 2.0, 0.0], window=2)
      [4.0, 3.0, 1.0]
    """
    sums = torch.tensor([0.0, *map(float, losses)], dtype=torch.float64).cumsum(0)
    ends = torch.arange(1, len(sums))
    starts = (ends - window).clamp(min=0)
    means: list[float] = ((sums[ends] - sums[starts]) / (ends - starts)).tolist()
    return means


def seconds_of(call: Callable[..., Any], *args: Any, n: int) -> list[float]:
    """Time ``n`` calls on a CPU in seconds, after five untimed ones."""
    seconds = []
    for _ in range(n + 5):
        start = time.perf_counter()
        call(*args)
        seconds.append(time.perf_counter() - start)
    return seconds[5:]


def mark(ax: Axes, call: float, before: str, after: str) -> None:
    """Draw a line between two calls, with a label on either side."""
    ax.axvline(call, color="black", linewidth=0.8)
    ax.annotate(f"{before} ", (call, 1), xycoords=("data", "axes fraction"), ha="right", va="bottom")
    ax.annotate(f" {after}", (call, 1), xycoords=("data", "axes fraction"), va="bottom")


def draw_over_first(curves: Mapping[str, Sequence[Any]], **labels: str) -> Axes:
    """Draw curves over a broad first one, so that equal curves remain visible.

    Args:
      curves: As for ``report.loss_curves``.
      labels: Keyword arguments of ``Axes.set``.
    """
    ax = report.loss_curves(curves)
    ax.lines[0].set(linewidth=6, alpha=0.3)
    ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    ax.set(title="", **labels)
    return ax


def draw_record(record: Mapping[str, Any]) -> None:
    """Draw what ``notebooks/record.py`` has recorded: a panel for each of the second notebook's comparisons."""
    figure, axes = plt.subplots(2, 2, figsize=(8, 5), layout="constrained")
    panels: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("kept_losses", "losses that you keep", {"xlabel": "call", "ylabel": "loss"}),
        (
            "accumulated",
            "gradients that add up",
            {"xlabel": "update", "ylabel": "mean loss", "ylim": (0, 1.2)},
        ),
        (
            "moves",
            "rate lowered after 50 calls",
            {"xlabel": "call", "ylabel": "norm of the change", "yscale": "log"},
        ),
    )
    for ax, (part, title, labels) in zip(axes.flat, panels, strict=False):
        report.loss_curves(record[part], ax=ax)
        ax.lines[0].set(linewidth=6, alpha=0.3)
        ax.set(title=title, **labels)
        ax.legend(frameon=False, fontsize="small")
    last = axes.flat[-1]
    runs = _by_run(record["last_batch"])
    for place, (name, shade) in enumerate(colors(runs).items()):
        bars = last.bar(
            [i + 0.27 * (place - 1) for i in range(len(runs[name]))],
            runs[name],
            0.25,
            label=name,
            color=shade,
        )
        last.bar_label(bars, fmt="%.3g", fontsize="small")
    last.set_xticks(range(len(record["last_batch"])), list(record["last_batch"]))
    last.set(title="the last batch", ylabel="summed loss", yscale="log")
    last.margins(y=0.2)
    last.legend(frameon=False, fontsize="small")
    figure.suptitle(f"{record['machine']}, {record['date']}: {record['command']}", fontsize=10)


def _by_run(groups: Mapping[str, Mapping[str, float]]) -> dict[str, list[float]]:
    names = dict.fromkeys(name for losses in groups.values() for name in losses)
    return {name: [losses[name] for losses in groups.values()] for name in names}


def draw_regions(classify: Callable[[Tensor], Tensor], data: Batch, title: str, ax: Axes) -> Axes:
    """Draw the predicted class at each point of the plane, with the data on top.

    Args:
      classify: f32[n, 2] to i64[n]; called once, always with the same n.
      data: ``x``, ``y`` as from :func:`spiral`.
      title: Title of the axes.
      ax: Where to draw.
    """
    line = torch.linspace(-1.1, 1.1, _GRID)
    plane = torch.cartesian_prod(line, line)
    classes = classify(plane).reshape(_GRID, _GRID).T
    levels = [-0.5, 0.5, 1.5, 2.5]
    ax.contourf(line.numpy(), line.numpy(), classes.numpy(), levels=levels, colors=_SHADES, alpha=0.3)
    for arm, (shade, marker) in enumerate(zip(_SHADES, _MARKERS, strict=True)):
        x = data["x"][data["y"] == arm]
        ax.plot(x[:, 0].numpy(), x[:, 1].numpy(), marker, color=shade, markersize=2, label=f"arm {arm}")
    ax.set(title=title, xlabel="x[0]", ylabel="x[1]", aspect="equal")
    return ax


def draw_owners(owners: Mapping[str, Sequence[int]]) -> None:
    """Draw which names refer to which memory.

    Args:
      owners: For each panel, the number of the buffer that each name refers to.
    """
    _, axes = plt.subplots(
        1, len(owners), figsize=(4 * len(owners), 2.4), layout="constrained", squeeze=False
    )
    for ax, (title, buffers) in zip(axes.flat, owners.items(), strict=True):
        for i, buffer in enumerate(buffers):
            ax.annotate("", (0.68, -buffer), (0.3, -i), arrowprops={"arrowstyle": "->"})
            ax.text(0.28, -i, f"kept[{i}]", ha="right", va="center", family="monospace")
        for buffer in sorted(set(buffers)):
            box = {"boxstyle": "square", "facecolor": "tab:orange", "alpha": 0.5}
            ax.text(0.72, -buffer, f"buffer {buffer}", va="center", bbox=box)
        ax.set(title=title, xlim=(0, 1), ylim=(-len(buffers) + 0.4, 0.6))
        ax.axis("off")


def draw_last_batches(before: tuple[Tensor, Tensor], last: tuple[Tensor, Tensor]) -> None:
    """Draw a static buffer after four points were copied into it, and after one was broadcast into it."""
    _, axes = plt.subplots(1, 2, figsize=(8, 2.8), layout="constrained", sharey=True)
    axes[0].plot(before[0][4:], before[1][4:], "x", color="tab:orange", label="28 of the batch before")
    axes[0].plot(last[0][:4], last[1][:4], "o", color="tab:blue", label="4 new points")
    axes[1].plot(last[0][:1], last[1][:1], "o", color="tab:blue", label="1 new point, 32 times")
    for ax in axes:
        ax.set(xlabel="x", ylabel="y", xlim=(-2.1, 2.1), ylim=(-1.4, 2.2))
        ax.legend(frameon=False, fontsize="small", loc="upper left")


def draw_losses(losses: Mapping[str, Mapping[str, float]]) -> None:
    """Draw the summed loss of each run as bars, one panel per title."""
    _, axes = plt.subplots(
        1, len(losses), figsize=(4 * len(losses), 2.8), layout="constrained", squeeze=False
    )
    for ax, (title, values) in zip(axes.flat, losses.items(), strict=True):
        ax.bar_label(ax.bar(list(values), list(values.values())), fmt="%.3g")
        ax.set(title=title, ylabel="loss, summed over the batch")
        ax.margins(y=0.15)
