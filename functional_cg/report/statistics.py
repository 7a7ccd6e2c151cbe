"""Plots statistics by module over the calls of a step, see :func:`functional_cg.statistics`."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from torch import Tensor

from ..step.statistics import Statistics

__all__ = ["statistics"]

_TITLES = MappingProxyType(
    {
        "rms": "outputs: root mean square",
        "dead": "outputs: dead units",
        "gradient": "norm of the gradient",
        "ratio": "norm of update / weight",
    }
)
_LABELS = 40  # rows that are named, at most


def statistics(
    values: Statistics, columns: Sequence[str] = ("rms", "dead", "gradient", "ratio")
) -> list[Axes]:
    """Draw how statistics change over the kept calls: a row for each module, a column for each call.

    A layer that explodes, vanishes or dies is a row whose color changes; a healthy ratio of update to weight is about
    1e-3. Red is what is not finite, black what is zero, and white where there is nothing: modules without parameters
    have no gradient.

    Args:
      values: A step or its ``step.statistics``, of a step that keeps some, ``fcg.statistics(train_step, keep=200)``.
      columns: What to draw, see :class:`functional_cg.step.statistics.Statistics`.
    Returns:
      The axes, one for each column.
    Raises:
      ValueError: If there is nothing to draw.
      KeyError: If there is no such column.

    Example:
      >>> import torch, functional_cg as fcg
      >>> from functional_cg import report
      >>> apply, params, _ = fcg.from_module(torch.nn.Linear(4, 1))
      >>> def train_step(state, x):
      ...     grads = fcg.grad(lambda params: apply(params, {}, x)[0].square().mean())(state.params)
      ...     return state.apply_gradients(grads), {}
      >>> step = fcg.graph_step(fcg.statistics(train_step, keep=20))
      >>> state = fcg.TrainState.create(params=params, optimizer=fcg.optim.sgd(0.1))
      >>> for _ in range(20):
      ...     state, _ = step(state, torch.ones(2, 4))
      >>> [ax.get_title() for ax in report.statistics(step.statistics, ["rms", "gradient"])]
      ['outputs: root mean square', 'norm of the gradient']
    """
    values = getattr(values, "statistics", values)  # of a step
    columns = [columns] if isinstance(columns, str) else columns
    drawn = {column: values.column(column) for column in columns}
    if values.values.dim() != 3 or not values.values.numel() or not drawn:
        raise ValueError(
            f"report.statistics: there is nothing to draw in values of shape {list(values.values.shape)}.\n"
            "To fix: call the step first; of a sweep, draw `step.statistics.member(0)`."
        )
    rows = len(values.modules)
    height = min(10.0, 1.6 + 0.16 * rows)
    _, axes = plt.subplots(
        1,
        len(drawn),
        figsize=(2.2 + 2.6 * len(drawn), height),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    every = -(-rows // _LABELS)
    for ax, (column, (numbers, present)) in zip(axes[0], drawn.items(), strict=True):
        _draw(ax, numbers.T.double(), present.T, share=column == "dead")
        ax.set(title=_TITLES.get(column, column), xlabel="call")
        ax.set_xticks(*_calls(values.calls))
    axes[0][0].set_yticks(range(0, rows, every), values.modules[::every], fontsize=7)
    return list(axes[0])


def _draw(ax: Axes, numbers: Tensor, present: Tensor, *, share: bool) -> None:
    counted = numbers[numbers.isfinite() & present & (numbers > 0)]
    low, high = (float(counted.min()), float(counted.max())) if counted.numel() else (0.5, 1.0)
    norm = Normalize(0.0, 1.0) if share else LogNorm(low, max(high, 1.01 * low))
    colors = plt.get_cmap("viridis").with_extremes(bad="white", over="red", under="black")
    shown = numbers if share else numbers.clamp_min(low / 10)  # zeros are below the scale
    shown = shown.where(numbers.isfinite(), 10 * max(high, 1.01)).where(
        present, torch.nan
    )  # beyond the scale: red
    image = ax.imshow(shown.numpy(), aspect="auto", interpolation="nearest", cmap=colors, norm=norm)
    ax.figure.colorbar(image, ax=ax, shrink=0.6)


def _calls(numbers: Sequence[int]) -> tuple[list[int], list[str]]:
    """Return the places of a few records, and the numbers of their calls."""
    places = sorted({round(one * (len(numbers) - 1) / 4) for one in range(5)})
    return places, [f"{numbers[place]:,}" for place in places]
