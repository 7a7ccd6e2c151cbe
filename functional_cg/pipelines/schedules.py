"""Schedules by name, or of the user, as proven tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from .actions import COSTS, TRANSFER, Action, Table, read_rows
from .order import in_one_row, prove, with_transfers
from .torch_tables import TORCH_NAMES, torch_rows

__all__ = ["NAMES", "edges_of", "forward_of", "table_of"]

NAMES = ("gpipe", "1f1b", *TORCH_NAMES)


def table_of(
    schedule: str | Iterable[str | Sequence[str]], ranks: int, microbatches: int, stages: int
) -> Table:
    """Return the proven table of a schedule, transfers included.

    Args:
      schedule: A name, or rows: text with a line of actions for each rank, or lists of them. Rows without transfers get
        theirs; the transfers of rows that have some are taken as they are.
      ranks: Number of ranks.
      microbatches: Number of micro-batches.
      stages: Number of stages.
    Raises:
      LayoutError: If the rows are not complete, or would wait for ever.
      ValueError: If there is no such schedule, or none for these numbers.
    """
    name = schedule if isinstance(schedule, str) else "of the user"
    if ranks == 1 and name in NAMES:
        rows = [_on_one_rank(name, stages, microbatches)]
    elif name in TORCH_NAMES:
        rows = torch_rows(name, ranks, microbatches, stages)
    elif name in ("gpipe", "1f1b"):
        _refuse_several(name, ranks, stages)
        make = _gpipe if name == "gpipe" else _one_f_one_b
        rows = [make(rank, ranks, microbatches) for rank in range(ranks)]
    else:
        rows, name = _rows_of_the_user(schedule), "of the user"
    table = Table(name, tuple(map(tuple, rows)), microbatches)
    if all(action.computes for row in table.rows for action in row):
        prove(table, transfers=False)
        table = with_transfers(table)
    prove(table)
    if ranks == 1 and len(rows) > 1:
        table = Table(name, (in_one_row(table),), microbatches)
    if len(table.rows) != ranks or table.stages != stages:
        raise ValueError(
            f"sharding.pipeline: the schedule is for {table.stages} stages on {len(table.rows)} ranks; the mesh has "
            f"{ranks} along its stage axis, and the loss {stages} stages, one more than its cuts."
        )
    return table


def forward_of(table: Table) -> Table:
    """Return a proven table of forwards alone, of the same stages on the same ranks.

    Whenever a rank is free, it takes the latest stage for which something has arrived, so that little is on its way.
    """
    rows: list[list[Action]] = [[] for _ in table.rows]
    free, done = [0.0] * len(rows), [0] * table.stages
    ends = [[0.0] * table.microbatches for _ in done]

    def start(stage: int) -> float:
        arrives = ends[stage - 1][done[stage]] + TRANSFER * table.crosses(stage - 1) if stage else 0.0
        return max(free[table.owners[stage]], arrives)

    while done[-1] < table.microbatches:
        given = [table.microbatches, *done]
        first = min((start(n), -n) for n, count in enumerate(done) if count < given[n])
        stage = -first[1]
        rows[table.owners[stage]].append(Action(stage, "F", done[stage]))
        free[table.owners[stage]] = ends[stage][done[stage]] = first[0] + COSTS["F"]
        done[stage] += 1
    found = with_transfers(Table(table.name, tuple(map(tuple, rows)), table.microbatches))
    prove(found)
    return found


def edges_of(schedule: str, ranks: int) -> list[tuple[int, int]]:
    """Return the pairs of ranks (from, to) between which a schedule sends, whatever the number of stages.

    Raises:
      LayoutError: If a table is not complete, or would wait for ever.
      ValueError: If there is no such schedule.
    """
    if ranks == 1:
        return []
    if schedule not in NAMES:
        rows = _rows_of_the_user(schedule)
        stages = 1 + max((action.stage for row in rows for action in row), default=0)
        count = 1 + max((action.microbatch for row in rows for action in row), default=0)
        return list(table_of(schedule, ranks, count, stages).edges)
    nearby = {(rank, rank + 1) for rank in range(ranks - 1)}
    if schedule in ("interleaved", "zero_bubble", "looped_bfs"):
        nearby.add((ranks - 1, 0))
    return sorted(nearby | {(target, source) for source, target in nearby})


def _rows_of_the_user(schedule: str | Iterable[str | Sequence[str]]) -> list[list[Action]]:
    if isinstance(schedule, str) and not any(end in schedule for end in ",\n"):
        known = ", ".join(f"`{name}`" for name in NAMES)
        raise ValueError(
            f"sharding.pipeline: there is no schedule {schedule!r}.\nTo fix: {known}; or a table, a line of actions "
            "for each rank, `0F0,0F1,0B0,0B1`."
        )
    return list(map(list, read_rows(schedule)))


def _refuse_several(name: str, ranks: int, stages: int) -> None:
    if stages != ranks:
        raise ValueError(
            f"sharding.pipeline: {name!r} has one stage on each rank, and the loss has {stages} stages for {ranks} "
            f"ranks, one more than its cuts.\nTo fix: {ranks - 1} cut{'s' * (ranks != 2)}; or a schedule of several "
            "stages a rank, `interleaved`."
        )


def _on_one_rank(name: str, stages: int, microbatches: int) -> list[Action]:
    """All stages of one micro-batch after the other: several ranks add up gradients in the same order.

    Only ``looped_bfs`` adds them from the last micro-batch on, after all forwards.
    """
    forward = [
        [Action(stage, "F", microbatch) for stage in range(stages)] for microbatch in range(microbatches)
    ]
    backward = [
        [Action(stage, "B", microbatch) for stage in reversed(range(stages))]
        for microbatch in range(microbatches)
    ]
    parts = (
        [*forward, *reversed(backward)]
        if name == "looped_bfs"
        else [*chain(*zip(forward, backward, strict=True))]
    )
    return [*chain(*parts)]


def _gpipe(rank: int, ranks: int, microbatches: int) -> list[Action]:
    forward = [Action(rank, "F", microbatch) for microbatch in range(microbatches)]
    return forward + [Action(rank, "B", microbatch) for microbatch in range(microbatches)]


def _one_f_one_b(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """As many forwards as there are ranks behind, then a forward and a backward in turn, then the backwards left."""
    ahead = min(ranks - 1 - rank, microbatches)
    row = [Action(rank, "F", microbatch) for microbatch in range(ahead)]
    for microbatch in range(microbatches - ahead):
        row += [Action(rank, "F", ahead + microbatch), Action(rank, "B", microbatch)]
    return row + [Action(rank, "B", microbatch) for microbatch in range(microbatches - ahead, microbatches)]
