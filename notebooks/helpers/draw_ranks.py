"""Plots of what each rank holds and of a step's collectives (extra ``notebooks``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from .collectives import Launch

__all__ = ["draw_bytes", "draw_launches", "draw_shards", "draw_timeline"]

_SHADES = tuple(f"C{i}" for i in range(10))
_HATCHES = ("", "//", "..", "xx")
_KIB = 1024
# For each kind of collective: colour, hatch, lane of the timeline.
_LOOKS: Mapping[str, tuple[str, str, int]] = MappingProxyType(
    {
        "gather, forward": ("C0", "", 3),
        "gather, backward": ("C1", "//", 2),
        "reduce, backward": ("C2", "..", 1),
        "all-reduce": ("C3", "xx", 0),
    }
)

Held = Sequence[Sequence[int]]


def draw_shards(maps: Mapping[str, Mapping[str, tuple[int, Held]]]) -> None:
    """Draw each element of each leaf as a cell with the number of the rank that holds it.

    Args:
      maps: For each panel and leaf, its size and the element indices of each rank; indices past its end are padding.
    """
    leaves = max(len(rows) for rows in maps.values())
    _, axes = plt.subplots(
        len(maps),
        1,
        figsize=(8, 0.42 * leaves * len(maps) + 0.9),
        layout="constrained",
        squeeze=False,
        sharex=True,
    )
    for ax, (title, rows) in zip(axes.flat, maps.items(), strict=True):
        for y, (size, held) in enumerate(rows.values()):
            for rank, elements in enumerate(held):
                for element in elements:
                    padding = element >= size
                    ax.barh(
                        y, 1, left=element, height=0.8, alpha=0.6, edgecolor="black", linewidth=0.6,
                        color="white" if padding else _SHADES[rank % len(_SHADES)], hatch="////" if padding else "",
                    )  # fmt: skip
                    if not padding:
                        ax.text(element + 0.5, y, str(rank), ha="center", va="center", fontsize="small")
        ax.set(title=title, yticks=range(len(rows)), yticklabels=list(rows))
        ax.invert_yaxis()
    axes[-1, 0].set_xlabel("element of the flattened leaf; hatched: padding")


def draw_bytes(
    planned: Mapping[int, Sequence[Mapping[str, int]]], measured: Mapping[int, tuple[int, int]]
) -> None:
    """Draw the bytes on one rank against the number of ranks, one panel per stage.

    Args:
      planned: For each stage the bytes by role, on one rank, on two, and so on.
      measured: For each stage a number of ranks, and the bytes measured on one of them.
    """
    _, axes = plt.subplots(
        1, len(planned), figsize=(9, 2.9), layout="constrained", sharey=True, squeeze=False
    )
    for ax, (stage, by_ranks) in zip(axes.flat, planned.items(), strict=True):
        ranks, below = range(1, len(by_ranks) + 1), [0.0] * len(by_ranks)
        for role, shade, hatch in zip(by_ranks[0], _SHADES, _HATCHES, strict=False):
            heights = [roles[role] / _KIB for roles in by_ranks]
            ax.bar(
                ranks, heights, bottom=below, label=role, color=shade, hatch=hatch, edgecolor="black", linewidth=0.6,
                alpha=0.7,
            )  # fmt: skip
            below = [a + b for a, b in zip(below, heights, strict=True)]
        size, nbytes = measured[stage]
        ax.plot([size], [nbytes / _KIB], "kD", markersize=7, markerfacecolor="white", label="measured")
        ax.set(title=f"stage {stage}", xlabel="ranks", xticks=list(ranks))
    axes[0, 0].set_ylabel("KiB on each rank")
    axes[0, -1].legend(frameon=False, fontsize="small")


def draw_launches(programs: Mapping[str, Sequence[Launch]]) -> None:
    """Draw the bytes of each collective in program order, one panel per program."""
    _, axes = plt.subplots(
        len(programs), 1, figsize=(8, 2.2 * len(programs) + 0.6), layout="constrained", sharex=True, sharey=True,
        squeeze=False,
    )  # fmt: skip
    for ax, (title, found) in zip(axes.flat, programs.items(), strict=True):
        for number, launch in enumerate(found):
            shade, hatch, _ = _LOOKS[_look(launch)]
            style = {"color": shade, "hatch": hatch, "edgecolor": "black", "linewidth": 0.3, "alpha": 0.7}
            ax.bar(number, launch.nbytes, width=1, **style)
        ax.set(title=f"{title}: {len(found)} launches", ylabel="bytes", yscale="log")
    axes[-1, 0].set_xlabel("launch, in program order")
    _name_looks(axes[0, 0], [launch for found in programs.values() for launch in found])


def draw_timeline(programs: Mapping[str, tuple[Sequence[Launch], Sequence[int]]], parameters: int) -> None:
    """Draw collectives from launch to first use, above the bytes of whole leaves in memory.

    Args:
      programs: For each panel the collectives, and the bytes of gathered leaves at each call.
      parameters: Bytes of all parameters, for comparison.
    """
    _, axes = plt.subplots(
        2, len(programs), figsize=(5 * len(programs), 4.8), layout="constrained", sharex="col", sharey="row",
        squeeze=False, height_ratios=(1.2, 1),
    )  # fmt: skip
    for (above, below), (title, (found, alive)) in zip(axes.T, programs.items(), strict=True):
        lanes: dict[int, str] = {}
        seen = Counter[int]()
        for launch in found:
            look = _look(launch)
            shade, _, lane = _LOOKS[look]
            lanes[lane] = look
            seen[lane] += 1
            height = lane + 0.2 - 0.4 * (seen[lane] % 2)  # alternating: one may begin before another ends
            above.barh(
                height, max(launch.use - launch.place, 1), left=launch.place, height=0.36, color=shade,
                edgecolor=shade, linewidth=1.2, alpha=0.8,
            )  # fmt: skip
        above.set(title=title, yticks=list(lanes), yticklabels=list(lanes.values()))
        below.fill_between(range(len(alive)), [n / _KIB for n in alive], step="post", alpha=0.5)
        below.axhline(parameters / _KIB, color="black", linewidth=0.8, linestyle="--")
        below.set(xlabel="call of the program", ylim=(0, 1.15 * parameters / _KIB))
    axes[1, 0].set_ylabel("whole leaves, KiB")
    axes[1, 0].annotate(
        "all parameters",
        (0.99, parameters / _KIB),
        xycoords=("axes fraction", "data"),
        ha="right",
        va="bottom",
    )


def _look(launch: Launch) -> str:
    if launch.kind == "all-reduce":
        return launch.kind
    return f"{launch.kind}, {'backward' if launch.backward else 'forward'}"


def _name_looks(ax: Axes, found: Sequence[Launch]) -> None:
    used = {_look(launch) for launch in found}
    patches = [
        Patch(facecolor=shade, hatch=hatch, edgecolor="black", linewidth=0.6, alpha=0.7, label=name)
        for name, (shade, hatch, _) in _LOOKS.items()
        if name in used
    ]
    ax.legend(handles=patches, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
