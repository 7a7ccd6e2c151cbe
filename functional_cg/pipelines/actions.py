"""A schedule as a value: which rank computes and sends what, in which order."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, cast

__all__ = ["COSTS", "TRANSFER", "Action", "Kind", "Table", "read_rows"]

Kind = Literal["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]

# How long computations and a transfer take, roughly, in forwards of a stage.
COSTS = MappingProxyType({"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0})
TRANSFER = 0.25

_FORWARD = ("F", "SEND_F", "RECV_F")
_ACTION = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)(\d+)")


@dataclass(frozen=True, slots=True)
class Action:
    """One entry of a table; written as ``2F0``: stage 2, the forward of micro-batch 0.

    Attributes:
      stage: The stage that computes, sends or receives.
      kind: ``F`` forward; ``B`` backward, or its two parts, ``I`` for the gradient of the stage's input and ``W`` for
        those of its weights; ``SEND_F`` and ``RECV_F`` of activations, ``SEND_B`` and ``RECV_B`` of their gradients.
      microbatch: Number of the micro-batch.
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def read(cls, text: str) -> Action:
        """Return the action that a text such as ``2F0`` or ``1SEND_F3`` stands for.

        Raises:
          ValueError: If it stands for none.
        """
        found = _ACTION.fullmatch(text.strip())
        if found is None:
            raise ValueError(
                f"sharding.pipeline: {text.strip()!r} is no action of a schedule.\n"
                "To fix: the stage, what it does (F, B, I, W, SEND_F, RECV_F, SEND_B or RECV_B) and the micro-batch, "
                "`2F0`."
            )
        return cls(int(found[1]), cast("Kind", found[2]), int(found[3]))

    @property
    def sends(self) -> bool:
        return self.kind in ("SEND_F", "SEND_B")

    @property
    def receives(self) -> bool:
        return self.kind in ("RECV_F", "RECV_B")

    @property
    def computes(self) -> bool:
        return not (self.sends or self.receives)

    @property
    def other_end(self) -> Action:
        """The action of the other rank that a transfer meets."""
        step = 1 if self.kind in ("SEND_F", "RECV_B") else -1
        ends = {"SEND_F": "RECV_F", "RECV_F": "SEND_F", "SEND_B": "RECV_B", "RECV_B": "SEND_B"}
        return Action(self.stage + step, cast("Kind", ends[self.kind]), self.microbatch)


@dataclass(frozen=True, slots=True)
class Table:
    """A schedule: one row of actions for each rank.

    Attributes:
      name: Name of the schedule.
      rows: The actions of each rank, in order.
      microbatches: Number of micro-batches.
      stages: Number of stages.
      owners: The rank of each stage.
      actions: All actions of all ranks.
      forward_only: Whether nothing is computed backward.
    """

    name: str
    rows: tuple[tuple[Action, ...], ...]
    microbatches: int
    stages: int = field(init=False)
    owners: tuple[int, ...] = field(init=False)
    actions: frozenset[Action] = field(init=False, repr=False, compare=False)
    forward_only: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        found = {
            action.stage: rank for rank, row in enumerate(self.rows) for action in row if action.kind == "F"
        }
        object.__setattr__(self, "actions", frozenset(action for row in self.rows for action in row))
        forward_only = all(action.kind in _FORWARD for action in self.actions)
        object.__setattr__(self, "forward_only", forward_only)
        object.__setattr__(self, "stages", 1 + max(found, default=-1))
        object.__setattr__(self, "owners", tuple(found.get(stage, -1) for stage in range(self.stages)))

    def __str__(self) -> str:
        """Return the rows as text, one line per rank; :func:`read_rows` reads it."""
        return "\n".join(",".join(map(str, row)) for row in self.rows)

    def crosses(self, stage: int) -> bool:
        """Whether what a stage hands to the next one goes to another rank."""
        return 0 <= stage < self.stages - 1 and self.owners[stage] != self.owners[stage + 1]

    def edge(self, transfer: Action) -> tuple[int, int]:
        """Return the ranks that a transfer goes from and to."""
        ends = self.owners[transfer.stage], self.owners[transfer.other_end.stage]
        return ends if transfer.sends else (ends[1], ends[0])

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """All pairs of ranks (from, to) between which something is sent, sorted."""
        return tuple(sorted({self.edge(action) for row in self.rows for action in row if action.sends}))


def read_rows(text: str | Iterable[str | Sequence[str]]) -> Iterator[tuple[Action, ...]]:
    """Yield the row of each rank from text, one line per rank, or from lists of texts; entries may be empty.

    What torch's tables have beside compute and transfers, such as ``0REDUCE_GRAD``, is left out.
    """
    lines = text.strip().splitlines() if isinstance(text, str) else text
    for line in lines:
        entries = line.split(",") if isinstance(line, str) else line
        yield tuple(
            Action.read(entry)
            for entry in map(str.strip, entries)
            if entry and not entry.endswith(("UNSHARD", "RESHARD", "REDUCE_GRAD"))
        )
