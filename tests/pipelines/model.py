"""A model of how a table runs: when each action begins, how many micro-batches are in flight, or what is stuck.

It knows by itself what needs what, and so judges what is placed and proven. Ranks compute in the order of their rows.
Both ends of a transfer stand in the queue of a communicator, from when the computations in front of them have ended,
and it takes place when it is first in line on both ranks. Ranks compute on meanwhile, until they need what is to
arrive, or they wait for each transfer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from functional_cg.pipelines.actions import COSTS, Action, Table

__all__ = ["Run", "run"]


@dataclass(frozen=True, slots=True)
class Run:
    """How a table runs.

    Attributes:
      begins: When each computation begins, in forwards of a stage, by rank.
      ends: When the last one ends.
      in_flight: The most micro-batches whose activations a rank holds at one time, summed over its stages.
      stuck: The actions that never take place; none if the table ends.
    """

    begins: tuple[tuple[tuple[Action, float], ...], ...]
    ends: float
    in_flight: tuple[int, ...]
    stuck: tuple[Action, ...]

    def efficiency(self, table: Table, costs: Mapping[str, float] = COSTS) -> float:
        """Return the part of the time in which ranks compute."""
        busy = sum(costs[action.kind] for row in table.rows for action in row if action.computes)
        return busy / (len(table.rows) * self.ends)


def run(
    table: Table,
    costs: Mapping[str, float] = COSTS,
    queue_of: Mapping[tuple[int, int], object] | None = None,
    *,
    at_once: bool = False,
    transfer: float = 0.0,
) -> Run:
    """Run a table in the model.

    Args:
      table: A table with transfers; it need not be proven.
      costs: How long each kind of computation takes.
      queue_of: The communicator of each pair of ranks (from, to); None for one each.
      at_once: Whether a rank waits for each transfer before it goes on.
      transfer: How long a transfer takes.
    """
    place = [0] * len(table.rows)  # of the next action in each row
    clock = [0.0] * len(table.rows)
    queues: list[dict[object, list[Action]]] = [{} for _ in table.rows]
    ended: dict[Action, float] = {}  # computations, and the receiving ends of transfers
    queued: dict[Action, float] = {}
    begins: list[list[tuple[Action, float]]] = [[] for _ in table.rows]
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(table.rows):
            while place[rank] < len(row) and not (at_once and any(queues[rank].values())):
                action = row[place[rank]]
                if action.computes:
                    since = _ready(table, action, ended)
                    if since is None:
                        break
                    start = max(clock[rank], since)
                    begins[rank].append((action, start))
                    ended[action] = clock[rank] = start + costs[action.kind]
                else:
                    if action.sends and _first(ended, _made(action)) is None:
                        break  # there is nothing to send yet
                    edge = table.edge(action)
                    queue = edge if queue_of is None else queue_of[edge]
                    queues[rank].setdefault(queue, []).append(action)
                    queued[action] = clock[rank]
                place[rank] += 1
                moved = True
        moved |= _transferred(queues, queued, ended, transfer)
    stuck = [action for rank, row in enumerate(table.rows) for action in row[place[rank] :]]
    stuck += [action for of_rank in queues for queue in of_rank.values() for action in queue]
    held = tuple(max(_held(table, row), default=0) for row in table.rows)
    return Run(tuple(map(tuple, begins)), max(clock, default=0.0), held, tuple(stuck))


def _ready(table: Table, action: Action, ended: Mapping[Action, float]) -> float | None:
    """Return since when a computation has what it needs; None if it lacks something."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind == "F":
        if not stage:
            return 0.0
        received, made = Action(stage, "RECV_F", microbatch), [Action(stage - 1, "F", microbatch)]
        return _first(ended, [received] if table.crosses(stage - 1) else made)
    before = ended.get(Action(stage, "I" if action.kind == "W" else "F", microbatch))
    if before is None or action.kind == "W" or stage == table.stages - 1:
        return before
    received = Action(stage, "RECV_B", microbatch)
    made = [Action(stage + 1, "B", microbatch), Action(stage + 1, "I", microbatch)]
    behind = _first(ended, [received] if table.crosses(stage) else made)
    return None if behind is None else max(before, behind)


def _made(send: Action) -> list[Action]:
    """Return the computations one of which makes what is sent."""
    kinds = ("F",) if send.kind == "SEND_F" else ("B", "I")
    return [Action(send.stage, kind, send.microbatch) for kind in kinds]  # type: ignore[arg-type]


def _first(ended: Mapping[Action, float], actions: list[Action]) -> float | None:
    return next((ended[action] for action in actions if action in ended), None)


def _transferred(
    queues: list[dict[object, list[Action]]],
    queued: Mapping[Action, float],
    ended: dict[Action, float],
    takes: float,
) -> bool:
    """Let one transfer take place, if there is one that is first in line at both ends; whether there was."""
    first = {queue[0]: queue for of_rank in queues for queue in of_rank.values() if queue}
    for action, queue in first.items():
        if action.sends and action.other_end in first:
            queue.pop(0)
            first[action.other_end].pop(0)
            ended[action.other_end] = max(queued[action], queued[action.other_end]) + takes
            return True
    return False


def _held(table: Table, row: tuple[Action, ...]) -> list[int]:
    """Return how many forwards wait for their backward, after each action; without any backward, none waits."""
    count, out = 0, list[int]()
    if table.forward_only:
        return out
    for action in row:
        count += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
        out.append(count)
    return out
