"""Schedules by name, or of the user, as proven tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain

from .actions import COSTS, TRANSFER, Action, Table, read_rows
from .order import ends_of, prove, with_transfers
from .torch_tables import TORCH_NAMES, torch_rows

__all__ = ["NAMES", "edges_of", "fewest_stages", "forward_of", "table_of", "text_of"]

NAMES = ("gpipe", "1f1b", *TORCH_NAMES)


def text_of(schedule: str | Iterable[str | Sequence[str]]) -> str:
    """Return the name of a schedule, or its rows as text, a line of actions for each rank."""
    if isinstance(schedule, str):
        return schedule
    return "\n".join(row if isinstance(row, str) else ",".join(row) for row in schedule)


@lru_cache(maxsize=64)
def table_of(schedule: str, ranks: int, microbatches: int, stages: int) -> Table:
    """Return the proven table of a schedule, transfers included.

    Args:
      schedule: A name, or rows as text.
      ranks: Number of ranks.
      microbatches: Number of micro-batches.
      stages: Number of stages.
    Raises:
      LayoutError: If the rows are not complete, or would wait for ever.
      ValueError: If there is no such schedule, or none for these numbers.
    """
    rows = _rows(schedule, ranks, microbatches, stages)
    table = Table(schedule if schedule in NAMES else "of the user", tuple(map(tuple, rows)), microbatches)
    prove(table)
    table = with_transfers(table)
    if ranks == 1 and len(table.rows) > 1:
        ends = ends_of(table)
        table = replace(table, rows=(tuple(sorted(ends, key=ends.__getitem__)),))
    if len(table.rows) != ranks or table.stages != stages:
        raise ValueError(
            f"sharding.pipeline: the schedule is for {table.stages} stages on {len(table.rows)} ranks; the mesh has "
            f"{ranks} along its stage axis, and the loss {stages} stages, one more than its cuts."
        )
    return table


def _rows(schedule: str, ranks: int, microbatches: int, stages: int) -> Sequence[Sequence[Action]]:
    """Return what each rank computes, by the name of a schedule; the rows of the user as they are."""
    if schedule not in NAMES:
        return _rows_of_the_user(schedule)
    if ranks == 1:
        return [_on_one_rank(schedule, stages, microbatches)]
    if schedule in TORCH_NAMES:
        return torch_rows(schedule, ranks, microbatches, stages)
    if stages != ranks:
        raise ValueError(
            f"sharding.pipeline: {schedule!r} has one stage on each rank, and the loss has {stages} stages for {ranks} "
            f"ranks, one more than its cuts.\nTo fix: {ranks - 1} cut{'s' * (ranks != 2)}; or a schedule of several "
            "stages a rank, `interleaved`."
        )
    # GPipe does all forwards first; 1F1B as many as there are ranks behind, then a backward and a forward in turn.
    ahead = [microbatches if schedule == "gpipe" else ranks - rank for rank in range(ranks)]
    return [_in_turn(rank, min(ahead[rank], microbatches), microbatches) for rank in range(ranks)]


def _in_turn(stage: int, ahead: int, microbatches: int) -> list[Action]:
    """Some forwards ahead, then a backward and a forward in turn, then the backwards left."""
    row = [Action(stage, "F", microbatch) for microbatch in range(ahead)]
    for microbatch in range(microbatches):
        row.append(Action(stage, "B", microbatch))
        if ahead + microbatch < microbatches:
            row.append(Action(stage, "F", ahead + microbatch))
    return row


@lru_cache(maxsize=64)
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
    return with_transfers(replace(table, rows=tuple(map(tuple, rows))))


def edges_of(schedule: str, ranks: int) -> tuple[tuple[int, int], ...]:
    """Return the pairs of ranks (from, to) between which a schedule sends, whatever the number of stages.

    Raises:
      LayoutError: If a table is not complete, or would wait for ever.
      ValueError: If there is no such schedule.
    """
    if ranks == 1:
        return ()
    stages, microbatches = fewest_stages(schedule, ranks), 2 * ranks
    if schedule not in NAMES:
        actions = [*chain(*_rows_of_the_user(schedule))]
        stages = 1 + max((action.stage for action in actions), default=0)
        microbatches = 1 + max((action.microbatch for action in actions), default=0)
    return table_of(schedule, ranks, microbatches, stages).edges


def fewest_stages(schedule: str, ranks: int) -> int:
    """Return how many stages a schedule has at least."""
    return ranks if schedule in ("gpipe", "1f1b") else 2 * ranks


def _rows_of_the_user(schedule: str) -> Sequence[Sequence[Action]]:
    if not any(end in schedule for end in ",\n"):
        known = ", ".join(f"`{name}`" for name in NAMES)
        raise ValueError(
            f"sharding.pipeline: there is no schedule {schedule!r}.\nTo fix: {known}; or a table, a line of actions "
            "for each rank, `0F0,0F1,0B0,0B1`."
        )
    return read_rows(schedule)


def _on_one_rank(name: str, stages: int, microbatches: int) -> list[Action]:
    """All stages of one micro-batch after the other: several ranks add up gradients in the same order.

    Only ``looped_bfs`` adds them from the last micro-batch on, after all forwards.
    """
    every = range(microbatches)
    forward = [[Action(stage, "F", one) for stage in range(stages)] for one in every]
    backward = [[Action(stage, "B", one) for stage in reversed(range(stages))] for one in every]
    if name == "looped_bfs":
        return [*chain(*forward, *reversed(backward))]
    return [*chain(*chain(*zip(forward, backward, strict=True)))]
