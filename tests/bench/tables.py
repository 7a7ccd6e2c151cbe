"""Formats rows as a text table and as a plot."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .measure import Row
from .workloads import Workload

__all__ = ["plot", "refuse_unfit_path", "table"]

_GIB = 2**30
_HEAD = (
    "system", "ms/step", "min", "max", "spread", "per s", "ours ms", "x ours", "x floor", "tokens/s", "MFU", "host µs",
    "ours host µs", "x ours host", "nodes", "peak GiB", "reserved GiB", "start GiB", "first step s", "captures",
    "replays", "loss distance",
)  # fmt: skip


def table(work: Workload, rows: Sequence[Row]) -> str:
    """Format the rows of one workload as text.

    Args:
      work: The workload.
      rows: The first one is the reference for the others.
    """
    lines = [_HEAD, *(_cells(row, work.tolerance) for row in rows if row.status == "ok")]
    keep = [i for i in range(len(_HEAD)) if i == 0 or any(line[i] for line in lines[1:])]
    widths = {i: max(len(line[i]) for line in lines) for i in keep}
    text = [f"{work.name}: {work.describe()}"]
    for line in lines:
        first, *others = (line[i].rjust(widths[i]) for i in keep)
        text.append("  ".join([line[0].ljust(len(first)), *others]))
    text += _remarks(rows)
    return "\n".join(text)


def _cells(row: Row, tolerance: float) -> tuple[str, ...]:
    times: tuple[str, ...] = ("",) * 6
    if row.ms is not None:
        times = (
            *(_milliseconds(value) for value in (row.ms.median, row.ms.least, row.ms.most)),
            f"{(row.ms.most - row.ms.least) / row.ms.median:.1%}",
            f"{1e3 / row.ms.median:,.0f}",
            "" if row.ours_ms is None else _milliseconds(row.ours_ms.median),
        )
    agree = "" if row.losses_agree is not False else f" DIFFERS (> {tolerance:g})"

    def shown(value: float | None, form: str, unit: float = 1) -> str:
        return "" if value is None else format(value / unit, form)

    return (
        row.system,
        *times,
        shown(row.ratio, ".2f"),
        shown(row.over_floor, ".2f" if (row.over_floor or 0) < 100 else ",.0f"),
        shown(row.tokens_per_s, ",.0f"),
        shown(row.utilization, ".1%"),
        shown(row.host_us, ",.1f"),
        shown(row.ours_host_us, ",.1f"),
        shown(row.host_ratio, ".2f"),
        shown(row.nodes, ",.0f"),
        *(shown(value, ".3f", _GIB) for value in (row.peak_bytes, row.reserved_bytes, row.start_bytes)),
        shown(row.first_step_s, ".2f"),
        *(str(row.counts.get(key, "")) for key in ("captures", "replays")),
        "" if row.loss_distance is None else f"{row.loss_distance:.1e}{agree}",
    )


def _milliseconds(value: float) -> str:
    return f"{value:.{2 if value >= 10 else 4}f}"


def _remarks(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        if row.status != "ok":
            yield f"{row.status}: {row.system}: {row.reason}"
        for note in row.notes:
            yield f"note: {row.system}: {note}"
    first = next((row for row in rows if row.losses), None)
    if first is not None:
        yield f"first losses of {first.system}: {', '.join(f'{loss:.6f}' for loss in first.losses)}"
    floor = next((row.floor_ms for row in rows if row.floor_ms is not None), None)
    if floor is not None:
        yield f"floor: {floor:.3g} ms, the products at peak rate or the least bytes at full bandwidth"
    if steps := sorted({row.ms.steps for row in rows if row.ms is not None}):
        yield f"{' or '.join(map(str, steps))} timed steps each: ours alone, then in turns with each of the others"
        yield "ours ms, ours host µs: ours in the same rounds; x ours: ratio of the medians of these rounds"
    elif not any(row.status == "ok" for row in rows):
        yield "no timed steps"


def refuse_unfit_path(path: Path) -> None:
    """Raise if a plot cannot be saved, before anything is run.

    Args:
      path: The file to write.
    Raises:
      ImportError: If matplotlib is not installed.
      ValueError: If the suffix is not a known format.
      OSError: If the folder does not exist, or nothing can be written there.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise ValueError(f"the ending has to be one of {', '.join(sorted(known))}")
    if not path.parent.is_dir():
        raise FileNotFoundError("there is no such folder")
    if path.is_dir():
        raise IsADirectoryError("is a folder")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PermissionError("cannot be written")


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Plot the medians with their spread, one panel per workload, and save the figure.

    Args:
      rows: Rows as in the lines of JSON; those without times are left out.
      path: The file to write; its suffix sets the format.
    Raises:
      ValueError: If no row has times.
    """
    import matplotlib.pyplot as plt

    timed = [row for row in rows if row["ms"] is not None]
    if not timed:
        raise ValueError("no system has times to draw")
    chosen = list(dict.fromkeys(row["workload"] for row in timed))
    figure, panels = plt.subplots(
        len(chosen),
        figsize=(8, 0.8 + 0.6 * len(chosen) + 0.3 * len(timed)),
        layout="constrained",
        squeeze=False,
    )
    for name, panel in zip(chosen, panels[:, 0], strict=True):
        mine = [row for row in timed if row["workload"] == name]
        medians = [row["ms"]["median"] for row in mine]
        ends = [
            [row["ms"]["median"] - row["ms"]["least"] for row in mine],
            [row["ms"]["most"] - row["ms"]["median"] for row in mine],
        ]
        shades = ["#2c6fbb" if row["system"].startswith("ours") else "#a0a0a0" for row in mine]
        bars = panel.barh([row["system"] for row in mine], medians, xerr=ends, color=shades)
        panel.bar_label(bars, [f" {value:.3g}" for value in medians])
        panel.invert_yaxis()
        panel.margins(x=0.15)
        panel.set(title=name, xlabel="ms per step: median, from least to most")
    figure.savefig(path)
    plt.close(figure)
