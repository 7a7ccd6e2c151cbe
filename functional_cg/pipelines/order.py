"""Place the transfers of a table, and prove that it ends: nothing is missing, and nothing waits in a circle."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice

from ..errors import LayoutError
from .actions import COSTS, TRANSFER, Action, Table

__all__ = ["arrivals", "in_one_row", "prove", "waits_of", "with_transfers"]


def with_transfers(table: Table) -> Table:
    """Return a proven table of computations with its transfers, all placed in one global order.

    As soon as one rank has computed what another one needs, the send enters its row, and the receive enters the other's
    in front of what that computes until then: it is launched before, so that what is sent arrives meanwhile. Of a
    backward whose gradient is sent, the part that it needs comes first, and the gradients of weights after the send.
    """
    table = _divided(table)
    rows: list[list[Action]] = [[] for _ in table.rows]
    for action in in_one_row(table):
        rows[table.owners[action.stage]].append(action)
        for send in _sends(table, action):
            rows[table.owners[send.stage]].append(send)
            rows[table.owners[send.other_end.stage]].append(send.other_end)
    return Table(table.name, tuple(map(tuple, rows)), table.microbatches)


def _divided(table: Table) -> Table:
    """Return a table with both halves of each backward whose gradient is sent to another rank."""

    def halves(action: Action) -> list[Action]:
        if action.kind != "B" or not table.crosses(action.stage - 1):
            return [action]
        return [replace(action, kind="I"), replace(action, kind="W")]

    rows = tuple(tuple(half for action in row for half in halves(action)) for row in table.rows)
    return Table(table.name, rows, table.microbatches)


def in_one_row(table: Table) -> tuple[Action, ...]:
    """Return the computations of a proven table in the order in which they end, at best."""
    left = [deque(action for action in row if action.computes) for row in table.rows]
    ends: dict[Action, float] = {}
    clocks = [0.0] * len(left)
    while any(left):
        for rank, row in enumerate(left):
            while row and all(need in ends for need in _needs(table, row[0])):
                action = row.popleft()
                needs = _needs(table, action)
                since = max([clocks[rank], *(ends[need] + _takes(table, need, action) for need in needs)])
                ends[action] = clocks[rank] = since + COSTS[action.kind]
    return tuple(sorted(ends, key=ends.__getitem__))


def _takes(table: Table, need: Action, action: Action) -> float:
    return TRANSFER if table.owners[need.stage] != table.owners[action.stage] else 0.0


def _needs(table: Table, action: Action) -> Iterator[Action]:
    """Yield the computations whose results a computation needs, on any rank."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind == "F":
        if stage:
            yield Action(stage - 1, "F", microbatch)
        return
    if action.kind == "W":
        yield Action(stage, "I", microbatch)
        return
    yield Action(stage, "F", microbatch)
    if stage < table.stages - 1:
        yield _backward_of(table, stage + 1, microbatch)


def _backward_of(table: Table, stage: int, microbatch: int) -> Action:
    whole = Action(stage, "B", microbatch)
    return whole if whole in table.actions else Action(stage, "I", microbatch)


def _sends(table: Table, action: Action) -> Iterator[Action]:
    if action.kind == "F" and table.crosses(action.stage):
        yield Action(action.stage, "SEND_F", action.microbatch)
    if action.kind in ("B", "I") and table.crosses(action.stage - 1):
        yield Action(action.stage, "SEND_B", action.microbatch)


def prove(table: Table, *, transfers: bool = True) -> None:
    """Raise unless a table is complete, and there is one global order in which all its actions can be done.

    Args:
      table: The table.
      transfers: Whether it has its transfers.
    Raises:
      LayoutError: With what is missing or double, or with the circle of actions that wait for each other.
    """
    _refuse_incomplete(table, transfers=transfers)
    if circle := _circle(waits_of(table, transfers=transfers)):
        raise LayoutError.of(
            "",
            f"sharding.pipeline: the schedule {table.name!r} would wait for ever.",
            rows=[
                f"{_place(table, one)}  waits for  {_place(table, other)}"
                for one, other in zip(circle, [*circle[1:], circle[0]], strict=True)
            ],
            why="Each rank works in the order of its row, and a transfer waits for both ranks.",
            fix="compute first what is needed first; leave the transfers out of the table, and they are placed for it.",
        )


def _refuse_incomplete(table: Table, *, transfers: bool) -> None:
    """Raise if an action is missing, double, or on another rank than its stage."""
    if rows := list(_incomplete(table, transfers=transfers)):
        raise LayoutError.of(
            "",
            f"sharding.pipeline: the schedule {table.name!r} is not complete.",
            rows=rows,
            why="Each micro-batch passes each stage once forward and once backward, and meets its transfers once.",
            fix="each stage on one rank, with `F` and either `B` or both `I` and `W` of each micro-batch.",
        )


def _incomplete(table: Table, *, transfers: bool) -> Iterator[str]:
    """Yield a line for each action that is missing, double, on a second rank, or strange to the table."""
    if table.stages < len(table.rows):
        yield f"{len(table.rows)} ranks  expected a stage for each   got {table.stages} stages"
    for stage, owner in enumerate(table.owners):
        if owner < 0:
            yield f"stage {stage}  expected a forward   got none"
    if -1 in table.owners:
        return
    counts = Counter(action for row in table.rows for action in row)
    expected: Counter[Action] = Counter()
    for stage in range(table.stages):
        for microbatch in range(table.microbatches):
            halves = counts[Action(stage, "I", microbatch)] or counts[Action(stage, "W", microbatch)]
            behind = () if table.forward_only else ("I", "W") if halves else ("B",)
            kinds: list[str] = ["F", *behind]
            computed = [Action(stage, kind, microbatch) for kind in kinds]  # type: ignore[arg-type]
            sends = [send for action in computed for send in _sends(table, action)]
            expected.update(computed)
            if transfers:
                expected.update([*sends, *(send.other_end for send in sends)])
    for action in sorted({*counts, *expected}, key=str):
        if counts[action] != expected[action]:
            yield f"{action}  expected {_times(expected[action])}   got {_times(counts[action])}"
    for rank, row in enumerate(table.rows):
        for action in row:
            if action.stage < table.stages and table.owners[action.stage] != rank:
                yield f"{action} on rank {rank}  expected on rank {table.owners[action.stage]}"


def _times(count: int) -> str:
    return {0: "none", 1: "one"}.get(count, str(count))


def waits_of(table: Table, *, transfers: bool = True) -> dict[Action, set[Action]]:
    """Return what each action waits for before it can end; both ends of a transfer are one action, its send.

    Each rank does one action after the other, and a transfer keeps both ranks until it is done. A table that ends so
    has one global order of transfers, of which each rank's order is a part; it ends whenever they are launched earlier
    and waited for later, in whichever queues.

    Args:
      table: A complete table.
      transfers: Whether it has its transfers; else a computation waits for those that make what it needs.
    """
    waits: dict[Action, set[Action]] = {}
    for row in table.rows:
        before: Action | None = None
        for action in row:
            event = action.other_end if action.receives else action
            found = waits.setdefault(event, set())
            if before is not None:
                found.add(before)
            if action.computes:
                found.update(_inputs(table, action) if transfers else _needs(table, action))
            elif action.sends:
                found.add(_made(table, action))
            before = event
    return waits


def _inputs(table: Table, action: Action) -> Iterator[Action]:
    """Yield the actions that bring a computation what it needs: one on this rank, or a transfer."""
    for need in _needs(table, action):
        if table.owners[need.stage] == table.owners[action.stage]:
            yield need
        else:
            yield Action(need.stage, "SEND_F" if need.kind == "F" else "SEND_B", need.microbatch)


def _made(table: Table, send: Action) -> Action:
    """Return the computation whose result is sent."""
    if send.kind == "SEND_F":
        return Action(send.stage, "F", send.microbatch)
    return _backward_of(table, send.stage, send.microbatch)


def arrivals(table: Table, rank: int) -> dict[Action, list[Action]]:
    """Return before which computation of a rank some of its sends have to have arrived.

    That is the first one that needs what the receiver made later: it computes in the order of its row, so once
    something has come from it that it made after it had read what was sent, the memory of what was sent is free. Where
    nothing is computed backward, nothing need come back: then it is at the latest the one that makes what is sent next
    but one. That ends, too: each transfer could even be waited for at once.
    """
    row = table.rows[rank]
    sends = deque(action for action in row if action.sends)
    place = {action: number for of_rank in table.rows for number, action in enumerate(of_rank)}
    found: dict[Action, list[Action]] = {}
    for number, send in enumerate(row):
        if not send.sends:
            continue
        to = send.other_end.stage
        forward = Action(to, "F", send.microbatch)
        reader = forward if send.kind == "SEND_F" else _backward_of(table, to, send.microbatch)
        answered = (
            action
            for action in row[number:]
            if action.computes
            and any(
                table.owners[need.stage] == table.owners[to] and place[need] > place[reader]
                for need in _needs(table, action)
            )
        )
        sends.popleft()
        later = [_made(table, sends[1])] if table.forward_only and len(sends) > 1 else []
        first = min([*islice(answered, 1), *later], key=place.__getitem__, default=None)
        if first is not None:
            found.setdefault(first, []).append(send)
    return found


def _circle(waits: Mapping[Action, Iterable[Action]]) -> list[Action]:
    """Return actions each of which waits for the next, the last for the first; none if there is no circle."""
    left = {action: set(needs) - {action} for action, needs in waits.items()}
    ready = [action for action, needs in left.items() if not needs]
    waiting: dict[Action, list[Action]] = {}
    for action, needs in left.items():
        for need in needs:
            waiting.setdefault(need, []).append(action)
    while ready:
        ended = ready.pop()
        del left[ended]
        for action in waiting.get(ended, ()):
            left[action].discard(ended)
            if not left[action]:
                ready.append(action)
    if not left:
        return []
    trail, place = [next(iter(left))], {}
    while trail[-1] not in place:
        place[trail[-1]] = len(trail) - 1
        trail.append(min((need for need in left[trail[-1]] if need in left), key=str))
    return trail[place[trail[-1]] : -1]


def _place(table: Table, action: Action) -> str:
    return f"rank {table.owners[action.stage]}  {action}"
