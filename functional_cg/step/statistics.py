"""Statistics by module, as a step has tapped them: a table of the last call, and the calls before it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
      values: f64[records, ..., modules, 6], oldest first; for a sweep, the members come second. Columns are ``rms``
        and ``largest``, the root mean square and the largest magnitude of what a module returns; ``dead``, if it has
        neither parameters nor submodules, the share of its units that are zero for the whole batch; and the norms
        ``gradient``, ``weight`` and ``update`` of its own parameters. Where there is no number, -1.
      calls: The number of each record's call, from 0 on. A loop in a step makes several records of a call.
    """

    modules: tuple[str, ...]
    values: Tensor
    calls: tuple[int, ...]

    @classmethod
    def of(cls, tables: Mapping[str, tuple[Sequence[str], Sequence[int], Tensor]]) -> Statistics:
        """Put together what was tapped: rows, the numbers of calls, and values [n, ..., rows, 3] of each.

        Raises:
          ValueError: If models are vmapped over batches of several sizes.
        """
        models = [name for name in tables if name.startswith(OUTPUTS)]
        # A table has several values of a call in a loop; the last of each are those that belong together.
        times = {name: [*_from_the_end(numbers)] for name, (_, numbers, _) in tables.items()}
        every = sorted({time for own in times.values() for time in own}, key=lambda time: (time[0], -time[1]))
        records = {time: number for number, time in enumerate(every)}
        leads = {values.shape[1:-2] for _, _, values in tables.values()}
        lead = max(leads, key=len, default=torch.Size())
        if any(one != lead[: len(one)] for one in leads):
            raise ValueError(
                f"step.statistics: models are vmapped over batches of several sizes, {sorted(leads)}"
            )
        groups: dict[str, dict[str, list[int]]] = {}
        named: dict[str, str] = {}  # by path, the optimizer that has it
        for name, (rows, _, _) in tables.items():
            model = name.removeprefix(OUTPUTS)
            for number, row in enumerate(rows):
                if name in models:
                    path = row if row == model or len(models) == 1 else f"{model}.{row}"
                else:
                    path = row.rpartition(".")[0] or row
                    if named.setdefault(path, name) != name:
                        path = f"{path}, {name}"
                groups.setdefault(path, {}).setdefault(name, []).append(number)
        whole = torch.full(
            (len(every), *lead, len(groups), len(_COLUMNS)), ABSENT, dtype=torch.float64, device="cpu"
        )
        for place, parts in enumerate(groups.values()):
            for name, numbers in parts.items():
                own, column = tables[name][2][..., numbers, :].double(), 0 if name in models else 3
                there = own.ne(ABSENT)
                norms = torch.where(there, own, 0).norm(dim=-2).where(there.any(-2), ABSENT)
                norms = norms.view(*norms.shape[:-1], *[1] * (whole.dim() - 1 - norms.dim()), 3)
                whole[..., place, column : column + 3][[records[time] for time in times[name]]] = norms
        return cls(tuple(groups), whole, tuple(call for call, _ in every))

    def __call__(self, column: str) -> Tensor:
        """Return a column, f64[records, ..., modules], or ``ratio``, that of update to weight; NaN where nothing is.

        Raises:
          KeyError: If there is no such column.
        """
        values, there = self.column(column)
        return values.where(there, torch.nan)

    def column(self, column: str) -> tuple[Tensor, Tensor]:
        """Return the numbers of a column, and where there are any, both [records, ..., modules]."""
        if column == "ratio":
            (update, there), (weight, _) = self.column("update"), self.column("weight")
            return update / weight, there & weight.ne(0)
        if column not in _COLUMNS:
            raise KeyError(f"{column!r} is no column; there are {', '.join(_COLUMNS)} and ratio")
        values = self.values[..., _COLUMNS.index(column)]
        return values, values.ne(ABSENT)

    def member(self, number: int) -> Statistics:
        """Return the statistics of one member of a sweep.

        Raises:
          IndexError: If there is no such member.
        """
        members = self.values.shape[1] if self.values.dim() > 3 else 0
        if not -members <= number < members:
            raise IndexError(f"there is no member {number}: the step has {members} members")
        return Statistics(self.modules, self.values[:, number], self.calls)

    def report(self) -> Sequence[Part]:
        if not len(self.values):
            return ["no statistics yet: `fcg.graph_step(fcg.statistics(train_step))`, and a call"]
        if self.values.dim() > 3:
            return [
                f"call {self.calls[-1]:,}: {self.values.shape[1]:,} members, `.member(i)` are those of one"
            ]
        columns = []
        for name in (*_COLUMNS, "ratio"):
            form = "{:.0%}" if name == "dead" else "{:.3g}"
            values, there = (of[-1].tolist() for of in self.column(name))
            columns.append(
                [form.format(value) if one else "" for value, one in zip(values, there, strict=True)]
            )
        titles = ["  module", *_COLUMNS, "update/weight"]
        rows = [list(row) for row in zip((f"  {one}" for one in self.modules), *columns, strict=True)]
        return [f"call {self.calls[-1]:,}: {len(self.modules):,} modules", [titles, *rows]]


def _from_the_end(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield for each value the number of its call, and how many values of that call follow."""
    for place, number in enumerate(numbers):
        yield number, numbers[place + 1 :].count(number)
