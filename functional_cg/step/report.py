"""Print a report as text, and in a notebook as HTML, from one list of parts."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ..messages.html import Html, card, fold, line, table
from ..state.outline import columns

__all__ = ["Part", "Report", "Table", "as_text", "grouped", "shortened"]

_Item = TypeVar("_Item")
_Key = TypeVar("_Key", bound=Hashable)
_Row = TypeVar("_Row")


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells; in a text, cells of HTML are left out.

    Attributes:
      rows: The rows; the first may be titles.
      title: In a notebook, the summary of a fold around the rows; in a text, a line above them unless it is a cell.
    """

    rows: Sequence[Sequence[str]]
    title: str = ""

    def text(self) -> list[str]:
        """Return aligned lines."""
        rows = [[cell for cell in row if not isinstance(cell, Html)] for row in self.rows]
        above = [f"{self.title}:"] if self.title and self.title != rows[0][0] else []
        return [*above, *columns(rows, "    " if above else "  ")]

    def html(self) -> Html:
        """Return a table, in a fold if there is a title."""
        return fold(self.title, table(self.rows)) if self.title else table(self.rows)


Part = str | Table


class Report:
    """What prints as text and HTML: a title, and lines and tables below it."""

    __slots__ = ()

    def report(self) -> Sequence[Part]:
        """Return the title and what is below it; parts of HTML are for notebooks alone."""
        raise NotImplementedError

    def __str__(self) -> str:
        return as_text(self.report())

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> Html:
        title, *body = self.report()
        return card(str(title), *(_as_html(part) for part in body if part))


def _as_html(part: Part) -> Html:
    if isinstance(part, Table):
        return part.html()
    return part if isinstance(part, Html) else line(part.strip())


def as_text(parts: Iterable[Part]) -> str:
    """Return parts as text."""
    lines: list[str] = []
    for part in parts:
        if isinstance(part, Table):
            lines += part.text()
        elif not isinstance(part, Html):
            lines.append(part)
    return "\n".join(lines)


def grouped(items: Iterable[_Item], key: Callable[[_Item], _Key]) -> dict[_Key, list[_Item]]:
    """Return the items by their key, in order of appearance."""
    groups: dict[_Key, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def shortened(rows: Sequence[_Row], most: int, name: str = "name") -> list[_Row]:
    """Return the first rows, and one with the sums of the numbers of the others.

    Args:
      rows: Rows, as dataclasses.
      most: How many to return.
      name: Field that says how many are summed up.
    """
    first, rest = list(rows[:most]), list(rows[most:])
    if len(rest) < 2:
        return list(rows)
    fields: dict[str, Any] = {}
    for field in rest[0].__dataclass_fields__:  # type: ignore[attr-defined]
        values = [getattr(row, field) for row in rest]
        fields[field] = sum(values) if type(values[0]) in (int, float) else type(values[0])()
    return [*first, replace(rest[0], **{**fields, name: f"… and {len(rest):,} more"})]  # type: ignore[type-var]
