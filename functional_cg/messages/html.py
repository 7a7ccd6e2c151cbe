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
    "is_number",
    "key",
    "line",
    "stack",
    "strip",
    "table",
]

# Okabe & Ito 2008, "Color Universal Design": distinguishable for colour-blind readers, legible on black and white.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")

_CARD = "font-family:monospace;font-size:12px;line-height:1.5;overflow-x:auto;max-width:64em"
_GRID = "display:grid;column-gap:1em;justify-content:start;grid-template-columns:repeat({},max-content)"
_TRACK = "width:6em;height:.6em;align-self:center;display:inline-block;border:1px solid #888"


_NUMBER = re.compile(r"-?\d[\d,.e+-]*( B)?")


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
    return element("div", text, style="white-space:pre-wrap")


def fold(summary: str, *body: str, opened: bool = False) -> Html:
    """Build a collapsible section that opens when its summary is clicked."""
    inner = element("div", *body, style="padding-left:1.5em")
    head = element("summary", summary, style="cursor:pointer")
    return element("details", head, inner, open="open") if opened else element("details", head, inner)


def table(rows: Sequence[Sequence[str]]) -> Html:
    """Build a table from rows of equal length; numbers are right-aligned."""
    cells = [_cell(cell) for row in rows for cell in row]
    return element("div", *cells, style=_GRID.format(len(rows[0]) if rows else 1))


def _cell(text: str) -> Html:
    if isinstance(text, Html):
        return text
    return element("span", text, style="text-align:right") if is_number(text) else element("span", text)


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
    return element("span", style=f"{_TRACK};width:12em;{filled}")


def key(names: Sequence[str]) -> Html:
    """Build the legend of a bar with parts."""
    marks = [
        element("span", element("span", "■", style=f"color:{shade}"), f" {name} ")
        for name, shade in colors(names).items()
    ]
    return element("div", *marks)


def colors(roles: Iterable[str]) -> dict[str, str]:
    """Assign a colour to each role, in order of appearance."""
    return {role: PALETTE[i % len(PALETTE)] for i, role in enumerate(dict.fromkeys(roles))}


def strip(segments: Sequence[Segment], total: int, shades: Mapping[str, str]) -> Html:
    """Draw ranges of bytes side by side, with width proportional to size and labels on hover."""
    drawn = [_rectangle(segment, shades.get(segment.role, ""), total) for segment in segments]
    edges = element("g", *drawn, stroke="currentColor", stroke_opacity=0.5, stroke_width=0.5)
    frame = "display:block;border:1px solid #888"
    return element(
        "svg", edges, viewBox="0 0 1000 24", preserveAspectRatio="none", width="100%", height=24, style=frame
    )


def _rectangle(segment: Segment, shade: str, total: int) -> Html:
    x, width = (f"{1000 * size / total:.2f}" for size in (segment.start, segment.size))
    fill = {"fill": shade} if shade else {"fill": "currentColor", "fill_opacity": "0.2"}
    return element("rect", element("title", segment.label), x=x, width=width, height=24, **fill)
