"""Plots of a state's memory and a run's losses. Each returns its Axes and is readable without colour."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase
from matplotlib.gridspec import SubplotSpec
from matplotlib.legend import Legend
from matplotlib.transforms import Bbox

from ..messages.html import colors
from ..state.arena import Plan, dtype_name
from ..state.handle import Handle
from ..state.outline import count, segments

__all__ = ["arena", "bytes_by_role", "loss_curves", "members"]

_HATCHES = ("", "//", "..", "xx", "\\\\", "oo", "--", "++")
_PADDING = "padding"
_GAP = 8  # points between the axes and their legend
_SPAN = 100  # of the greatest loss to the least, from which on an axis is logarithmic
_DASHES = ("-", "--", ":", "-.")
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def bytes_by_role(state: Any, *, ax: Axes | None = None) -> Axes:
    """Draw how many bytes each role of a state takes, by dtype.

    Args:
      state: Handle of a state.
      ax: Where to draw; a new figure by default.
    Returns:
      The axes: one horizontal bar per role, stacked by dtype, padding last. The numbers count the leaves only.
    Raises:
      TypeError: If ``state`` is no handle.

    Example:
      >>> import torch, functional_cg as fcg
      >>> from functional_cg import report
      >>> state = fcg.place({"w": torch.ones(256)})
      >>> report.bytes_by_role(state).get_xlabel()
      'KiB'
    """
    plan = _handle(state, "bytes_by_role")._lease.arena.plan
    used = _bytes_of(plan)
    roles = list(dict.fromkeys(role for role, _ in used))
    kinds = sorted({kind for _, kind in used}, key=lambda kind: (kind == _PADDING, kind))
    ends = dict.fromkeys(roles, 0.0)
    ax = ax or _axes(0.5 * len(roles) + 1.2)
    scale, unit = _unit(max((sum(used[role, kind] for kind in kinds) for role in roles), default=0))
    shades = colors(kinds) | {_PADDING: "white"}
    for kind, hatch in zip(kinds, _cycled(_HATCHES, len(kinds)), strict=True):
        widths = [used[role, kind] / scale for role in roles]
        ax.barh(
            roles, widths, left=list(ends.values()), label=kind,
            color=shades[kind], hatch=hatch, edgecolor="black", linewidth=0.6,
        )  # fmt: skip
        ends = {role: ends[role] + width for role, width in zip(roles, widths, strict=True)}
    sizes = {role: sum(used[role, kind] for kind in kinds if kind != _PADDING) for role in roles}
    for row, size in enumerate(
        sizes.values()
    ):  # in a column at the right end of the frame, whatever their length
        ax.annotate(
            _size(size), (1, row), xycoords=ax.get_yaxis_transform(), xytext=(-4, 0), textcoords="offset points",
            ha="right", va="center", bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )  # fmt: skip
    ax.set_xlim(0, 1.35 * max(ends.values(), default=0.0) or 1.0)  # room for that column
    ax.invert_yaxis()
    ax.set(xlabel=unit, ylabel="role", title=f"state: {_size(sum(sizes.values()))} by role")
    _legend(ax)
    return ax


def _bytes_of(plan: Plan) -> Counter[tuple[str, str]]:
    """Count bytes by role and dtype, and the padding of each role."""
    used = Counter[tuple[str, str]]()
    for slab in plan.slabs:
        used[slab.role, _PADDING] += slab.nbytes
    for slot in plan.slots:
        role = plan.slabs[slot.slab].role
        used[role, dtype_name(slot.spec.dtype)] += slot.spec.nbytes
        used[role, _PADDING] -= slot.spec.nbytes
    return used


def arena(state: Any, *, ax: Axes | None = None) -> Axes:
    """Draw the arena of a state, its memory, as a strip: leaves in order, one colour and hatch per role, padding white.

    Args:
      state: Handle of a state.
      ax: Where to draw; a new figure by default.
    Returns:
      The axes; the horizontal axis counts bytes from the start of the arena.
    Raises:
      TypeError: If ``state`` is no handle.

    Example:
      >>> import torch, functional_cg as fcg
      >>> from functional_cg import report
      >>> len(report.arena(fcg.place([torch.ones(4), torch.ones(8)])).patches)
      2
    """
    lease = _handle(state, "arena")._lease
    plan = lease.arena.plan
    ax = ax or _axes(1.9)
    scale, unit = _unit(plan.nbytes)
    shades = colors(slab.role for slab in plan.slabs)
    hatches = dict(zip(shades, _cycled(_HATCHES, len(shades)), strict=True))
    labelled: set[str] = set()
    for segment in segments(plan, lease.paths):
        name = segment.role or _PADDING
        ax.barh(
            0, segment.size / scale, left=segment.start / scale, height=1,
            color=shades.get(segment.role, "white"), hatch=hatches.get(segment.role, ""),
            label="_" if name in labelled else name, edgecolor="black", linewidth=0.6,
        )  # fmt: skip
        labelled.add(name)
    ax.set(xlabel=f"offset in {unit}", yticks=[], ylim=(-0.5, 0.5), xlim=(0, max(plan.nbytes, 1) / scale))
    ax.set_title(f"arena, the memory of the state: {count(len(plan.slots), 'leaf')}, {_size(plan.nbytes)}")
    _legend(ax)
    return ax


def loss_curves(curves: Mapping[str, Sequence[Any]], *, ax: Axes | None = None) -> Axes:
    """Draw losses over calls, one line per run, or per member of a sweep.

    Args:
      curves: Losses of each run by name: floats, or tensors as a step returns them, f[] or f[n] for n members. The
        line of the member that ends lowest is thick, and the legend counts those that end at NaN or infinity.
      ax: Where to draw; a new figure by default.
    Returns:
      The axes; runs differ in dash and colour.
    Raises:
      ValueError: If there is no curve, or one is empty.

    Example:
      >>> import torch
      >>> from functional_cg import report
      >>> report.loss_curves({"adamw": [2.0, 1.0, 0.5]}).lines[0].get_ydata().tolist()
      [2.0, 1.0, 0.5]
      >>> len(report.loss_curves({"rates": [torch.ones(16), torch.rand(16)]}).lines)
      16
    """
    empty = [name for name, losses in curves.items() if not len(losses)]
    if empty or not curves:
        raise ValueError(
            f"report.loss_curves: {', '.join(map(repr, empty)) or 'the mapping'} has no losses. "
            'To fix: collect them in the loop, `losses.append(metrics["loss"])`.'
        )
    ax = ax or _axes(3.2)
    shades = colors(curves)
    for (name, losses), dash in zip(curves.items(), _cycled(_DASHES, len(curves)), strict=True):
        shade = shades[name]
        values = torch.stack(list(map(_numbers, losses)))
        best, times = _least(values[-1]), range(1, len(values) + 1)
        lost = int((~values[-1].isfinite()).sum())
        name += f", {lost} of {values.shape[1]} not finite" if lost and values.shape[1] > 1 else ""
        for number, of_one in enumerate(values.unbind(1)):
            label, width = (name, 1.5) if number == best else ("_", 0.5)
            ax.plot(times, of_one, dash, color=shade, label=label, linewidth=width)
        if values.shape[1] > 1:
            _spread_out(ax, values)
    ax.set(xlabel="call of the step", ylabel="loss", title="loss by call")
    ax.grid(alpha=0.3)
    ax.legend(frameon=False)
    return ax


def members(losses: Any, over: Any, *, name: str = "learning rate", ax: Axes | None = None) -> Axes:
    """Draw the losses of the members of a sweep over what differs between them, such as their rates.

    Args:
      losses: f[n], as the last call of the step returned them.
      over: f[n], the number of each member. The axis is logarithmic if all are positive.
      name: What the numbers are.
      ax: Where to draw; a new figure by default.
    Returns:
      The axes: a dot for each member, a cross at the top for one whose loss is not finite.
    Raises:
      ValueError: If there are not as many losses as numbers, or no finite loss.

    Example:
      >>> import torch
      >>> from functional_cg import report
      >>> report.members(torch.tensor([0.3, 0.1, torch.nan]), [1e-3, 1e-2, 1e-1]).get_title()
      'loss of 3 members: the least 0.1 at 0.01, 1 not finite'
    """
    values, numbers = _numbers(losses), _numbers(over)
    finite = values.isfinite()
    if len(values) != len(numbers) or not finite.any():
        raise ValueError(
            f"report.members: expected a loss and a number for each member, and a finite loss, got {len(values)} "
            f"losses, {int(finite.sum())} of them finite, and {len(numbers)} numbers. To fix: `metrics['loss']` of a "
            "swept step, and the tensor that `set_hyperparams` got."
        )
    ax = ax or _axes(3.2)
    best = _least(values)
    ax.plot(numbers[finite], values[finite], "o", color="black", markersize=4)
    top = [values[finite].max()] * int((~finite).sum())
    ax.plot(numbers[~finite], top, "x", color="black", markersize=6)
    if bool((numbers > 0).all()):
        ax.set_xscale("log")
    _spread_out(ax, values)
    lost = f", {len(top)} not finite" if top else ""
    least = f"the least {values[best]:.3g} at {numbers[best]:.3g}"
    ax.set(xlabel=name, ylabel="loss", title=f"loss of {len(values)} members: {least}{lost}")
    ax.grid(alpha=0.3)
    return ax


def _numbers(values: Any) -> torch.Tensor:
    """Return values as f64[n] on the host."""
    return torch.as_tensor(values).detach().double().flatten().cpu()


def _least(losses: torch.Tensor) -> int:
    """Return which finite loss is the least."""
    return int(losses.where(losses.isfinite(), torch.inf).argmin())


def _spread_out(ax: Axes, losses: torch.Tensor) -> None:
    """Make the axis of losses logarithmic if they span decades: one member that diverges would hide the others."""
    finite = losses[losses.isfinite()]
    if len(finite) and finite.max() > _SPAN * finite.min() > 0:
        ax.set_yscale("log")


def _handle(state: Any, function: str) -> Handle:
    if isinstance(state, Handle):
        return state
    raise TypeError(
        f"report.{function}: expected a state handle, got {type(state).__name__}. "
        "To fix: `fcg.place(tree)` makes one, and a step returns one."
    )


def _legend(ax: Axes) -> None:
    if ax.get_legend_handles_labels()[0]:  # a state without leaves has no labels
        legend = ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
        ax.set_axes_locator(_Beside(ax, legend))


@dataclass(frozen=True)
class _Beside:
    """Locator that fits axes plus the legend beside them into the place of the axes, in any figure layout."""

    axes: Axes
    legend: Legend

    def get_subplotspec(self) -> SubplotSpec | None:
        return self.axes.get_subplotspec()

    def __call__(self, _: object, renderer: RendererBase) -> Bbox:
        figure, place = self.axes.figure, self.axes.get_position(original=True)
        taken = float(self.legend.get_window_extent(renderer).width) + _GAP * figure.dpi / 72
        kept = max(float(place.width) - taken / float(figure.bbox.width), float(place.width) / 2)
        return Bbox.from_bounds(float(place.x0), float(place.y0), kept, float(place.height))


def _axes(height: float) -> Axes:
    return plt.subplots(figsize=(7, height), layout="constrained")[1]


def _unit(nbytes: int) -> tuple[int, str]:
    return next(((scale, unit) for scale, unit in _UNITS if nbytes >= scale), (1, "bytes"))


def _size(nbytes: int) -> str:
    scale, unit = _unit(nbytes)
    return f"{nbytes / scale:,.4g} {unit}"


def _cycled(items: Sequence[str], length: int) -> list[str]:
    return [items[i % len(items)] for i in range(length)]
