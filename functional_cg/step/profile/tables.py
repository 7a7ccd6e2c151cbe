"""Rows of a profile as text, and as HTML for a notebook."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...messages.html import Html, stack, table
from ...state.outline import columns
from .phases import PHASES
from .rows import KernelRow, ProfileRow

__all__ = ["clipped", "html", "kernel_rows", "of_kernels", "short", "shortened", "shown", "size", "text"]

_WIDEST = 40  # characters of a name or of a line's source
_MIB = 2**20


def shown(seconds: float) -> str:
    """Return seconds as milliseconds."""
    return f"{1e3 * seconds:,.3f}"


def size(nbytes: int) -> str:
    """Return bytes as MiB."""
    return f"{nbytes / _MIB:,.2f}"


def text(title: str, rows: Sequence[ProfileRow], most: int) -> list[str]:
    """Return rows as an aligned table; those after the first ``most`` are summed up."""
    total = math.fsum(row.seconds for row in rows)
    head = (title, "calls", *PHASES, "ms", "%", "peak MiB")
    body = [
        (
            _name(row),
            f"{row.calls:,}",
            *map(_or_blank, _parts(row)),
            shown(row.seconds),
            _percent(row, total),
            _mib(row),
        )
        for row in shortened(rows, most)
    ]
    return columns([head, *body])


def html(rows: Sequence[ProfileRow], most: int) -> Html:
    """Return rows as a table with a bar for the time of each."""
    total = math.fsum(row.seconds for row in rows)
    longest = max((row.seconds for row in rows), default=0.0) or 1.0
    head = ("", "", "ms", "%", "peak MiB", "")
    body = [
        (short(row.name), stack([part / longest for part in _parts(row)]), shown(row.seconds), _percent(row, total),
         _mib(row), clipped(row.source))
        for row in shortened(rows, most)
    ]  # fmt: skip
    return table([head, *body])


def of_kernels(rows: Sequence[KernelRow], most: int) -> list[str]:
    """Return kernels as an aligned table."""
    return columns(kernel_rows(rows, most))


def kernel_rows(rows: Sequence[KernelRow], most: int) -> list[tuple[str, ...]]:
    """Return kernels as cells, after a title for each column; those after the first ``most`` are summed up."""
    total = math.fsum(row.seconds for row in rows)
    head = ("by kernel", "kernels", "phase", "ms", "%", "modules", "lines")
    body = [
        (clipped(row.name), f"{row.kernels:,}", ", ".join(row.phases), *_time(row.seconds, total),
         _several(list(map(short, row.modules))), _several(row.lines))
        for row in rows[:most]
    ]  # fmt: skip
    if rest := rows[most:]:
        seconds = math.fsum(row.seconds for row in rest)
        count = sum(row.kernels for row in rest)
        body.append((f"… and {len(rest):,} more", f"{count:,}", "", *_time(seconds, total), "", ""))
    return [head, *body]


def _time(seconds: float, total: float) -> tuple[str, str]:
    return shown(seconds), f"{100 * seconds / total:.1f}" if total else ""


def _several(names: Sequence[str], most: int = 3) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def shortened(rows: Sequence[ProfileRow], most: int) -> list[ProfileRow]:
    """Return the first rows, and one for the others."""
    first, rest = list(rows[:most]), rows[most:]
    if len(rest) < 2:
        return list(rows)
    sums = [math.fsum(part) for part in zip(*map(_parts, rest), strict=True)]
    name = f"… and {len(rest):,} more"
    calls, nbytes = (sum(getattr(one, of) for one in rest) for of in ("calls", "nbytes"))
    return [*first, ProfileRow(name, "", calls, sums[0], sums[1], sums[2], nbytes)]


def _parts(row: ProfileRow) -> tuple[float, float, float]:
    return row.forward_s, row.backward_s, row.update_s


def _name(row: ProfileRow) -> str:
    return f"{short(row.name)}  {clipped(row.source)}".rstrip()


def short(name: str, most: int = _WIDEST) -> str:
    """Return the end of a name, from the first part of its path on that fits."""
    path, cut = name, name
    while len(cut) > most and path.partition(".")[2]:
        path = path.partition(".")[2]
        cut = f"…{path}"
    return cut


def clipped(text: str, most: int = _WIDEST) -> str:
    """Return the start of a text."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _or_blank(seconds: float) -> str:
    return shown(seconds) if seconds else ""


def _percent(row: ProfileRow, total: float) -> str:
    return f"{100 * row.seconds / total:.1f}" if total else ""


def _mib(row: ProfileRow) -> str:
    return size(row.nbytes) if row.nbytes else ""
