"""Build HTML for notebooks: plain rows in, self-contained markup out.

There are no scripts, style sheets or external resources. All colours except those of the roles follow the page, light
or dark. Text that is not :class:`Html` is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

__all__ = [
    "PALETTE",
    "Html",
    "Segment",
    "bar",
    "card",
    "colors",
    "element",
    "fold",
    "grid",
    "is_number",
    "key",
    "line",
    "right_aligned",
    "stack",
    "strip",
    "table",
]

# Okabe & Ito 2008, "Color Universal Design": distinguishable for colour-blind readers, legible on black and white.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")

_CARD = "font-family:monospace;font-size:12px;line-height:1.5;overflow-x:auto"
_GRID = "display:inline-grid;column-gap:2ch;white-space:pre;grid-template-columns:{}"
_TRACK = "width:8ch;height:.6em;align-self:center;display:inline-block;border:1px solid #888"
# The mark that opens a section hangs in the margin, so its summary begins where lines without a mark do.
_MARGIN = "margin-left:2ch"
_WIDEST = "110ch"

_NUMBER = re.compile(r"-?\d[\d,.e+-]*( B| MiB)?")


class Html(str):
    """Text that already is markup."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Segment:
    """A range of bytes in a strip; a segment without a role is padding."""

    label: str
    role: str
    start: int
    size: int


def element(tag: str, *children: str, **attributes: object) -> Html:
    """Build an element; its attributes and plain text among its children are escaped.

    Example:
      >>> from functional_cg.messages.html import element
      >>> element("b", "a < b", title="x")
      '<b title="x">a &lt; b</b>'
    """
    named = "".join(f' {name.replace("_", "-")}="{escape(str(value))}"' for name, value in attributes.items())
    inner = "".join(child if isinstance(child, Html) else escape(child) for child in children)
    return Html(f"<{tag}{named}>{inner}</{tag}>")


def card(title: str, *body: str) -> Html:
    """Build the outermost element: a title and the body under it."""
    return element("div", element("div", title, style="font-weight:bold"), *body, style=_CARD)


def line(text: str) -> Html:
    """Build a line of text; line breaks in it are kept."""
    return element("div", text, style=f"white-space:pre-wrap;max-width:{_WIDEST};{_MARGIN}")


def fold(summary: str, *body: str, opened: bool = False) -> Html:
    """Build a collapsible section that opens when its summary is clicked."""
    inner = element("div", *body, style=_MARGIN)
    head = element("summary", summary, style=f"cursor:pointer;list-style-position:outside;{_MARGIN}")
    return element("details", head, inner, open="open") if opened else element("details", head, inner)


def table(rows: Sequence[Sequence[str]], widths: Sequence[str] = ()) -> Html:
    """Build a table from rows of equal length; columns of numbers are right-aligned, their titles, too.

    Args:
      rows: Cells of plain text or :class:`Html`.
      widths: Width of each column, so that several tables share them; by default that of the longest cell.
    """
    return element("div", grid(rows, widths), style=_MARGIN)


def grid(rows: Sequence[Sequence[str]], widths: Sequence[str] = ()) -> Html:
    """Build the cells of a table without its margin; arguments as for :func:`table`."""
    to_the_right = right_aligned(rows)
    cells = [_cell(cell, right=right) for row in rows for cell, right in zip(row, to_the_right, strict=True)]
    columns = " ".join(widths) or f"repeat({len(rows[0]) if rows else 1},max-content)"
    return element("div", *cells, style=_GRID.format(columns))


def right_aligned(rows: Sequence[Sequence[str]]) -> list[bool]:
    """Whether each column is one of numbers, under a title or none."""
    return [
        any(map(is_number, column)) and all(is_number(cell) or not cell for cell in column[1:])
        for column in zip(*rows, strict=True)
    ]


def _cell(text: str, *, right: bool) -> Html:
    if isinstance(text, Html):
        return text
    return (
        element("span", text, style="text-align:right") if right or is_number(text) else element("span", text)
    )


def is_number(text: str) -> bool:
    """Whether the text of a cell is a number or a number of bytes."""
    return _NUMBER.fullmatch(text) is not None


def bar(fraction: float) -> Html:
    """Build a bar filled to a fraction from 0 to 1."""
    filled = f"background:linear-gradient(90deg,{PALETTE[0]} {100 * fraction:.1f}%,transparent 0) no-repeat padding-box"
    return element("span", style=f"{_TRACK};{filled}")


def stack(fractions: Sequence[float]) -> Html:
    """Build a bar of adjacent parts, each a fraction of its length, in the colours of :func:`key`."""
    ends = [100 * sum(fractions[: i + 1]) for i in range(len(fractions))]
    stops = [f"{PALETTE[i]} {start:.1f}% {end:.1f}%" for i, (start, end) in enumerate(pairwise((0.0, *ends)))]
    filled = f"background:linear-gradient(90deg,{','.join(stops)},transparent 0) no-repeat padding-box"
    return element("span", style=f"{_TRACK};width:20ch;{filled}")


def key(names: Sequence[str]) -> Html:
    """Build the legend of a bar with parts."""
    marks = [
        element("span", element("span", "■", style=f"color:{shade}"), f" {name} ")
        for name, shade in colors(names).items()
    ]
    return element("div", *marks, style=_MARGIN)


def colors(roles: Iterable[str]) -> dict[str, str]:
    """Assign a colour to each role, in order of appearance."""
    return {role: PALETTE[i % len(PALETTE)] for i, role in enumerate(dict.fromkeys(roles))}


def strip(segments: Sequence[Segment], total: int, shades: Mapping[str, str]) -> Html:
    """Draw ranges of bytes side by side, with width proportional to size and labels on hover."""
    drawn = [_rectangle(segment, shades.get(segment.role, ""), total) for segment in segments]
    edges = element("g", *drawn, stroke="currentColor", stroke_opacity=0.5, stroke_width=0.5)
    frame = f"display:block;border:1px solid #888;width:{_WIDEST};max-width:calc(100% - 4ch);{_MARGIN}"
    return element("svg", edges, viewBox="0 0 1000 24", preserveAspectRatio="none", height=24, style=frame)


def _rectangle(segment: Segment, shade: str, total: int) -> Html:
    x, width = (f"{1000 * size / total:.2f}" for size in (segment.start, segment.size))
    fill = {"fill": shade} if shade else {"fill": "currentColor", "fill_opacity": "0.2"}
    return element("rect", element("title", segment.label), x=x, width=width, height=24, **fill)
