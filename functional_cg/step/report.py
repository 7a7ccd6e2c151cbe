"""Print a report as text, and in a notebook as HTML, from one list of parts."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from ..messages.html import Html, card, fold, line, table
from ..state.outline import columns

__all__ = ["Part", "Report", "as_text", "grouped", "shortened"]

# A line; markup for a notebook alone; or a table, whose first row has its title in front.
Part = str | Html | Sequence[Sequence[str]]

_Item = TypeVar("_Item")
_Key = TypeVar("_Key", bound=Hashable)


class Report:
    """What prints as text and as HTML: a title, and lines and tables below it."""

    __slots__ = ()

    def report(self) -> Sequence[Part]:
        """Return the title and what is below it."""
        raise NotImplementedError

    def __str__(self) -> str:
        return as_text(self.report())

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> Html:
        title, *parts = self.report()
        first = next((part for part in parts if not isinstance(part, str)), None)
        return card(str(title), *(_as_html(part, folded=part is not first) for part in parts if part))


def as_text(parts: Iterable[Part]) -> str:
    """Return parts as text; what is markup is left out."""
    lines: list[str] = []
    for part in parts:
        if not isinstance(part, str):
            lines += columns([[cell for cell in row if not isinstance(cell, Html)] for row in part])
        elif not isinstance(part, Html):
            lines.append(part)
    return "\n".join(lines)


def _as_html(part: Part, *, folded: bool) -> Html:
    """Return a part as HTML; all tables but the first are folded."""
    if isinstance(part, str):
        return part if isinstance(part, Html) else line(part.strip())
    return fold(part[0][0], table(part)) if folded else table(part)


def grouped(items: Iterable[_Item], key: Callable[[_Item], _Key]) -> dict[_Key, list[_Item]]:
    """Return the items by their key, in order of appearance."""
    groups: dict[_Key, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def shortened(rows: Sequence[Any], most: int, name: str = "name") -> list[Any]:
    """Return the first rows, and one with the sums of the numbers of the others.

    Args:
      rows: Rows, as dataclasses.
      most: How many to return.
      name: Field that says how many are summed up.
    """
    rest = rows[most:]
    if len(rest) < 2:
        return list(rows)
    columns = {field.name: [getattr(row, field.name) for row in rest] for field in fields(rest[0])}
    sums = {
        of: sum(some) if type(some[0]) in (int, float) else type(some[0])() for of, some in columns.items()
    }
    return [*rows[:most], replace(rest[0], **{**sums, name: f"… and {len(rest):,} more"})]
