"""Statistics by module, as a step has tapped them: a table of the last call, and the calls before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .report import Part, Report

__all__ = ["ABSENT", "OUTPUTS", "UPDATES", "Statistics"]

# What taps are called, before the name of a model, or the number of an optimizer's call.
OUTPUTS, UPDATES = "outputs of ", "update "
ABSENT = -1.0  # in place of a number, none of which is negative
_COLUMNS = ("rms", "largest", "dead", "gradient", "weight", "update")


@dataclass(frozen=True, eq=False, repr=False)
class Statistics(Report):
    """What modules returned, and what an optimizer did, in the last calls of a step; see :func:`statistics`.

    Prints as a table of the last call; ``statistics("rms")`` returns the numbers of a column.

    Attributes:
      modules: Names of modules: paths as in ``named_modules``, the model's class for the model itself; with several
        models, their classes come first. Other parameters are named by where they lie in ``params``.
      values: f32[calls, ..., modules, 6], oldest call first; for a sweep, the members come second. Columns are ``rms``
        and ``largest``, the root mean square and the largest magnitude of what a module returns; ``dead``, if it has
        neither parameters nor submodules, the share of its units that are zero for the whole batch; and the norms
        ``gradient``, ``weight`` and ``update`` of its own parameters. Where there is no number, -1.
    """

    modules: tuple[str, ...]
    values: Tensor

    @classmethod
    def of(cls, tables: Mapping[str, tuple[Sequence[str], Tensor]]) -> Statistics:
        """Put together what was tapped: rows, and values [calls, ..., rows, 3]."""
        models = [name for name in tables if name.startswith(OUTPUTS)]
        parts: list[tuple[dict[str, list[int]], Tensor, int]] = []
        for name, (rows, values) in tables.items():
            model = name.removeprefix(OUTPUTS)
            groups: dict[str, list[int]] = {}
            for number, row in enumerate(rows):
                if name in models:
                    path = row if row == model or len(models) == 1 else f"{model}.{row}"
                else:
                    path = row.rpartition(".")[0] or row
                groups.setdefault(path, []).append(number)
            parts.append((groups, values, 0 if name in models else 3))
        modules = tuple(dict.fromkeys(path for groups, _, _ in parts for path in groups))
        calls = max((values.shape[0] for _, values, _ in parts), default=0)
        members = max((values.shape[1:-2] for _, values, _ in parts), key=len, default=torch.Size())
        whole = torch.full((calls, *members, len(modules), len(_COLUMNS)), ABSENT)
        for groups, values, column in parts:
            for path, numbers in groups.items():
                own = values[..., numbers, :]
                there = own.ne(ABSENT)
                norms = torch.where(there, own, 0).norm(dim=-2).where(there.any(-2), ABSENT)
                into = whole[calls - len(values) :, ..., modules.index(path), column : column + 3]
                into.copy_(norms if norms.dim() == into.dim() else norms.unsqueeze(1))
        return cls(modules, whole)

    def __call__(self, column: str) -> Tensor:
        """Return a column, f32[calls, ..., modules], or ``ratio``, that of update to weight; NaN where nothing is.

        Raises:
          KeyError: If there is no such column.
        """
        values, there = self.column(column)
        return values.where(there, torch.nan)

    def column(self, column: str) -> tuple[Tensor, Tensor]:
        """Return the numbers of a column, and where there are any, both [calls, ..., modules]."""
        if column == "ratio":
            (update, there), (weight, _) = self.column("update"), self.column("weight")
            return update / weight, there
        if column not in _COLUMNS:
            raise KeyError(f"{column!r} is no column; there are {', '.join(_COLUMNS)} and ratio")
        values = self.values[..., _COLUMNS.index(column)]
        return values, values.ne(ABSENT)

    def member(self, number: int) -> Statistics:
        """Return the statistics of one member of a sweep.

        Raises:
          IndexError: If there is no such member.
        """
        if self.values.dim() == 3:
            raise IndexError(f"there is no member {number}: the step is no sweep")
        return Statistics(self.modules, self.values[:, number])

    def report(self) -> Sequence[Part]:
        if not len(self.values):
            return ["no statistics yet: `fcg.graph_step(fcg.statistics(train_step))`, and a call"]
        if self.values.dim() > 3:
            return [f"statistics of {self.values.shape[1]:,} members: `.member(i)` are those of one"]
        columns = []
        for name in (*_COLUMNS, "ratio"):
            form = "{:.0%}" if name == "dead" else "{:.3g}"
            values, there = (of[-1].tolist() for of in self.column(name))
            columns.append(
                [form.format(value) if one else "" for value, one in zip(values, there, strict=True)]
            )
        titles = ["  module", *_COLUMNS, "update/weight"]
        rows = [list(row) for row in zip((f"  {one}" for one in self.modules), *columns, strict=True)]
        return [f"statistics of {len(self.modules):,} modules", [titles, *rows]]
