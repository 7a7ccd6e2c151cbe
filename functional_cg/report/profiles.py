"""Plots of where the time and the memory of a step go, readable without colour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from ..messages.html import colors
from ..step.profile.result import PHASES, Profile, ProfileRow, title
from ..step.report import shortened

__all__ = ["profile"]

_HATCHES = ("", "///", "...")
_KINDS = ("results of calls", "state, inputs, constants")
_Parts = Mapping[str, Sequence[float]]
_MIB = 2**20
_SOURCE = 32  # characters of a line of code


def profile(
    profile: Profile,
    *,
    what: Literal["time", "memory"] = "time",
    by: Literal["module", "line"] = "module",
    depth: int | None = None,
    rows: int = 12,
    ax: Axes | None = None,
) -> Axes:
    """Draw where the time of a step goes, or the memory at its peak: one bar per module or line.

    Args:
      profile: What ``step.profile(state, batch)`` returned.
      what: ``"time"``, with forward, backward and update stacked, in ms; or ``"memory"``, in MiB.
      by: ``"module"`` or ``"line"``.
      depth: How many names of a module's path to keep, as for ``Profile.by_module``.
      rows: How many bars to draw; the rest is one more.
      ax: Where to draw; a new figure by default.
    Returns:
      The axes, the largest bar on top.
    Raises:
      TypeError: If ``profile`` is not a profile.
      ValueError: If another argument is none of the above.

    Example:
      >>> import torch, functional_cg as fcg
      >>> from functional_cg import report
      >>> step = fcg.graph_step(lambda state, x: ({"w": state["w"] + x}, {}))
      >>> ax = report.profile(step.profile({"w": torch.ones(4)}, torch.ones(4)))
      >>> ax.get_xlabel()
      'ms'
    """
    _refuse(profile, what, by, rows)
    every = profile.by_line() if by == "line" else profile.by_module(depth)
    if what == "memory":
        return _memory(profile, every, by, rows, ax)
    found = shortened(every, rows)
    parts: _Parts = {phase: [1e3 * getattr(row, f"{phase}_s") for row in found] for phase in PHASES}
    said = f"{profile.function} on {profile.device}: {1e3 * profile.call_s:,.3g} ms a call"
    if profile.compiled and not profile.kernels:
        said += f", {1e3 * profile.seconds:,.3g} ms not compiled"
    return _draw([title(row, _SOURCE) for row in found], parts, "ms", f"{said}, by {by}", ax)


def _memory(profile: Profile, rows: Sequence[ProfileRow], by: str, most: int, ax: Axes | None) -> Axes:
    bars = [(title(row, _SOURCE), (row.nbytes, 0)) for row in rows if row.nbytes]
    bars += [(name, (0, nbytes)) for name, nbytes in profile.resident.items()]
    bars.sort(key=lambda bar: sum(bar[1]), reverse=True)
    if len(bars) > most + 1:
        results, fixed = (sum(sizes[place] for _, sizes in bars[most:]) for place in (0, 1))
        bars[most:] = [(f"… and {len(bars) - most:,} more", (results, fixed))]
    parts: _Parts = {kind: [sizes[place] / _MIB for _, sizes in bars] for place, kind in enumerate(_KINDS)}
    said = f"{profile.function}: {profile.nbytes / _MIB:,.4g} MiB at the peak, by {by}"
    return _draw([name for name, _ in bars], parts, "MiB", said, ax)


def _draw(names: Sequence[str], parts: _Parts, unit: str, title: str, ax: Axes | None) -> Axes:
    ax = ax or plt.subplots(figsize=(8, 0.3 * len(names) + 1.2), layout="constrained")[1]
    places, ends = range(len(names)), [0.0] * len(names)
    for (part, shade), hatch in zip(colors(parts).items(), _HATCHES, strict=False):
        ax.barh(
            places, parts[part], left=ends, label=part, color=shade, hatch=hatch, edgecolor="black", linewidth=0.5
        )  # fmt: skip
        ends = [end + width for end, width in zip(ends, parts[part], strict=True)]
    for place, end in zip(places, ends, strict=True):
        ax.annotate(
            f"{end:,.3g}", (end, place), xytext=(3, 0), textcoords="offset points", va="center", fontsize=8
        )
    ax.set_yticks(places, names, fontsize=8)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.set_xlim(0, 1.1 * (max(ends, default=0.0) or 1.0))
    ax.set_xlabel(unit, loc="left")  # the legend stands beside it
    ax.set_title(title, fontsize=10)
    ax.legend(
        loc="upper right",
        bbox_to_anchor=(1, 0),
        borderaxespad=2.4,
        ncols=len(parts),
        frameon=False,
        fontsize=8,
    )
    return ax


def _refuse(profile: object, what: object, by: object, rows: object) -> None:
    if not isinstance(profile, Profile):
        raise TypeError(
            f"report.profile: expected a profile, got {type(profile).__name__}. "
            "To fix: `report.profile(step.profile(state, batch))`."
        )
    for name, value, allowed in (("what", what, ("time", "memory")), ("by", by, ("module", "line"))):
        if value not in allowed:
            raise ValueError(
                f"report.profile: {name} must be {' or '.join(map(repr, allowed))}, got {value!r}"
            )
    if type(rows) is not int or rows < 1:
        raise ValueError(f"report.profile: rows must be a positive int, got {rows!r}")
