"""Place the transfers of a table, and prove that it ends: nothing is missing, and nothing waits in a circle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from itertools import accumulate, islice, pairwise, product, zip_longest

from ..errors import LayoutError
from .actions import COSTS, TRANSFER, Action, Table

__all__ = ["arrivals", "described", "efficiency", "ends_of", "prove", "with_transfers"]


def with_transfers(table: Table) -> Table:
    """Return a proven table of computations with its transfers, all placed in one global order.

    As soon as one rank has computed what another one needs, the send enters its row, and the receive enters the other's
    in front of what that computes until then: it is launched before, so that what is sent arrives meanwhile. Of a
    backward whose gradient is sent, the part that it needs comes first, and the gradients of weights after the send.
    """
    table = _divided(table)
    rows: list[list[Action]] = [[] for _ in table.rows]
    ends = ends_of(table)
    for action in sorted(ends, key=ends.__getitem__):
        rows[table.owners[action.stage]].append(action)
        if send := table.send(action):
            rows[table.owners[send.stage]].append(send)
            rows[table.owners[send.other_end.stage]].append(send.other_end)
    return replace(table, rows=tuple(map(tuple, rows)))


def _divided(table: Table) -> Table:
    """Return a table with both halves of each backward whose gradient is sent to another rank."""

    def halves(action: Action) -> list[Action]:
        if action.kind != "B" or not table.crosses(action.stage - 1):
            return [action]
        return [replace(action, kind="I"), replace(action, kind="W")]

    return replace(
        table, rows=tuple(tuple(half for one in row for half in halves(one)) for row in table.rows)
    )


def ends_of(table: Table, transfer: float = TRANSFER) -> dict[Action, float]:
    """Return when each computation of a proven table ends, at best, in forwards of a stage.

    Args:
      table: The table.
      transfer: How long a transfer takes, beside which ranks compute.
    """
    ends: dict[Action, float] = {}
    waits = _waits(table)
    for action in TopologicalSorter(waits).static_order():
        away = {one: table.owners[one.stage] != table.owners[action.stage] for one in waits[action]}
        since = max((ends[one] + transfer * crosses for one, crosses in away.items()), default=0.0)
        ends[action] = since + COSTS[action.kind]
    return ends


def efficiency(table: Table) -> float:
    """Return the part of the time in which ranks compute, at best: sending takes no time."""
    ends = ends_of(table, transfer=0.0)
    return sum(COSTS[action.kind] for action in ends) / (len(table.rows) * max(ends.values()))


@lru_cache(maxsize=64)
def described(table: Table) -> str:
    """Describe a table in text: how busy ranks are if a backward takes twice as long as a forward, and its rows."""
    held = max(_in_flight(row) for row in table.rows) * (not table.forward_only)
    head = f"{table.stages} stages, at best {efficiency(table):.0%} busy, at most {held} in flight"
    rows = (" ".join(map(str, row)) for row in table.computations)
    return "\n".join([head, *(f"  rank {rank}  {row}" for rank, row in enumerate(rows))])


def _in_flight(row: tuple[Action, ...]) -> int:
    """Return how many forwards wait for their backward, at most."""
    steps = {"F": 1, "B": -1, "W": -1}
    return max(accumulate(steps.get(action.kind, 0) for action in row), default=0)


def prove(table: Table) -> None:
    """Raise unless a table computes all there is, and there is one global order in which ranks can do so.

    Raises:
      LayoutError: With what is missing or double, or with the circle of actions that wait for each other.
    """
    if rows := list(_incomplete(table)):
        raise LayoutError.of(
            "",
            f"sharding.pipeline: the schedule {table.name!r} is not complete.",
            rows=rows,
            why="Each micro-batch passes each stage once forward and once backward.",
            fix="each stage on one rank, with `F` and either `B` or both `I` and `W` of each micro-batch.",
        )
    try:
        TopologicalSorter(_waits(table)).prepare()
    except CycleError as error:
        places = [f"rank {table.owners[one.stage]}  {one}" for one in reversed(error.args[1])]
        raise LayoutError.of(
            "",
            f"sharding.pipeline: the schedule {table.name!r} would wait for ever.",
            rows=[f"{one}  waits for  {other}" for one, other in pairwise(places)],
            why="Each rank works in the order of its row.",
            fix="compute first what is needed first.",
        ) from None


def _incomplete(table: Table) -> Iterator[str]:
    """Yield a line for each action that is missing, double, on a second rank, or strange to the table."""
    if table.stages < len(table.rows):
        yield f"{len(table.rows)} ranks  expected a stage for each   got {table.stages} stages"
    if -1 in table.owners:
        missing = (stage for stage, owner in enumerate(table.owners) if owner < 0)
        yield from (f"stage {stage}  expected a forward   got none" for stage in missing)
        return
    counts = Counter(action for row in table.computations for action in row)
    expected: Counter[Action] = Counter()
    for stage, microbatch in product(range(table.stages), range(table.microbatches)):
        whole, *halves = (Action(stage, kind, microbatch) for kind in ("B", "I", "W"))
        behind = [] if table.forward_only else halves if table.actions.intersection(halves) else [whole]
        expected.update([Action(stage, "F", microbatch), *behind])
    for action in sorted({*counts, *expected}, key=str):
        if counts[action] != expected[action]:
            yield f"{action}  expected {_times(expected[action])}   got {_times(counts[action])}"
    for rank, row in enumerate(table.computations):
        for action in row:
            if action.stage < table.stages and table.owners[action.stage] != rank:
                yield f"{action} on rank {rank}  expected on rank {table.owners[action.stage]}"


def _times(count: int) -> str:
    return {0: "none", 1: "one"}.get(count, str(count))


def _waits(table: Table) -> dict[Action, list[Action]]:
    """Return what each computation waits for: the one before it on its rank, and those that make what it needs.

    Each rank computes one after the other. Transfers are placed in one global order, of which each rank's order is a
    part; so they end whenever they are launched earlier and waited for later, in whichever queues.
    """
    waits: dict[Action, list[Action]] = {}
    for row in table.computations:
        for number, action in enumerate(row):
            waits.setdefault(action, []).extend([*row[max(number - 1, 0) : number], *table.needs(action)])
    return waits


def arrivals(table: Table, rank: int) -> dict[Action, list[Action]]:
    """Return before which computation of a rank some of its sends have to have arrived.

    That is the first one that needs what the receiver made later: it computes in the order of its row, so once
    something has come from it that it made after it had read what was sent, the memory of what was sent is free. Where
    nothing is computed backward, nothing need come back: then it is at the latest the one that makes what is sent next
    but one. That ends, too: each transfer could even be waited for at once.
    """
    row = table.rows[rank]
    place = {action: number for of_rank in table.rows for number, action in enumerate(of_rank)}
    sends = [action for action in row if action.sends]
    found: dict[Action, list[Action]] = {}
    for send, later in zip_longest(sends, sends[2:]):
        reader = table.computation(send.other_end.stage, send)
        answered = (
            action
            for action in row[place[send] :]
            if action.computes
            and any(
                table.owners[need.stage] == table.owners[reader.stage] and place[need] > place[reader]
                for need in table.needs(action)
            )
        )
        made = [table.computation(later.stage, later)] if table.forward_only and later else []
        first = min([*islice(answered, 1), *made], key=place.__getitem__, default=None)
        if first is not None:
            found.setdefault(first, []).append(send)
    return found
