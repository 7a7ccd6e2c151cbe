"""The usual chart of a pipeline's schedule: ranks by time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import MappingProxyType

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from ..messages.html import colors
from ..pipelines.actions import COSTS, Table
from ..pipelines.order import efficiency, ends_of
from ..pipelines.schedules import fewest_stages, table_of, text_of

__all__ = ["schedule"]

_NAMES = MappingProxyType({"F": "forward", "B": "backward", "I": "for the input", "W": "for the weights"})
_HATCHES = MappingProxyType({"F": "", "B": "//", "I": "..", "W": "xx"})
_LABELLED = 400  # more numbers than that nobody can read


def schedule(
    rows: str | Iterable[str | Sequence[str]],
    *,
    ranks: int,
    microbatches: int,
    stages: int | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw when each rank computes what, if a backward takes twice as long as a forward, and sending takes no time.

    Args:
      rows: Name of a schedule, or a table, as for :func:`functional_cg.sharding.pipeline`.
      ranks: Number of ranks.
      microbatches: Number of micro-batches.
      stages: Number of stages; by default one per rank for ``gpipe`` and ``1f1b``, two for the others.
      ax: Where to draw; a new figure by default.
    Returns:
      The axes: one row per rank, one bar per action with the number of its micro-batch, and a line from each send to
      its receive. Stages after the first of a rank are darker.
    Raises:
      LayoutError, ValueError: As for :func:`functional_cg.sharding.pipeline`.

    Example:
      >>> from functional_cg import report
      >>> report.schedule("1f1b", ranks=2, microbatches=4).get_title()
      '1f1b: 2 stages on 2 ranks, at best 86% busy'
    """
    text = text_of(rows)
    stages = stages or fewest_stages(text, ranks)
    table = table_of(text, ranks, microbatches, stages)
    ax = ax or plt.subplots(figsize=(10, 0.5 * ranks + 1.4), layout="constrained")[1]
    _draw(ax, table)
    ax.set(
        xlabel="time, in forwards of a stage", ylabel="rank", yticks=range(ranks),
        title=f"{table.name}: {stages} stages on {ranks} ranks, at best {efficiency(table):.0%} busy",
    )  # fmt: skip
    ax.invert_yaxis()
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.3), ncols=4, frameon=False)
    return ax


def _draw(ax: Axes, table: Table) -> None:
    shades, shown = colors(_NAMES), set[str]()
    ends = ends_of(table, transfer=0.0)
    starts = {action: end - COSTS[action.kind] for action, end in ends.items()}
    for action, start in starts.items():
        rank = table.owners[action.stage]
        later = table.owners[: action.stage].count(rank)
        label = None if action.kind in shown else _NAMES[action.kind]
        shown.add(action.kind)
        ax.barh(
            rank, COSTS[action.kind], left=start, height=0.8, color=shades[action.kind], label=label,
            alpha=min(1.0, 0.45 + 0.35 * later), hatch=_HATCHES[action.kind], edgecolor="black", linewidth=0.5,
        )  # fmt: skip
        if len(starts) <= _LABELLED:
            ax.annotate(
                str(action.microbatch), (start + COSTS[action.kind] / 2, rank), ha="center", va="center",
                fontsize=7, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
            )  # fmt: skip
    for send in table.actions:
        if send.sends:
            times = (
                ends[table.computation(send.stage, send)],
                starts[table.computation(send.other_end.stage, send)],
            )
            ax.plot(times, table.edge(send), color="black", linewidth=0.4, alpha=0.6)
