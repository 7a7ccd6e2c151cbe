"""A schedule as a value: which rank computes and sends what, in which order."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from types import MappingProxyType
from typing import Literal, cast

__all__ = ["COSTS", "TRANSFER", "Action", "Table", "read_rows"]

_Kind = Literal["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]

# How long computations and a transfer take, roughly, in forwards of a stage.
COSTS = MappingProxyType({"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0})
TRANSFER = 0.25

_FORWARD = ("F", "SEND_F", "RECV_F")
_COMPUTATION = re.compile(r"(\d+)(F|B|I|W)(\d+)")
# What tables of torch have beside computations: transfers and reductions, which are placed here for all alike.
_BESIDE = re.compile(r"\d+((SEND|RECV)_[FB]\d+|UNSHARD|RESHARD|REDUCE_GRAD)")


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
    kind: _Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def read(cls, text: str) -> Action:
        """Return the computation that a text such as ``2F0`` stands for.

        Raises:
          ValueError: If it stands for none.
        """
        found = _COMPUTATION.fullmatch(text)
        if found is None:
            raise ValueError(
                f"sharding.pipeline: {text!r} is no action of a schedule.\n"
                "To fix: the stage, what it computes (F, B, I or W) and the micro-batch, `2F0`."
            )
        return cls(int(found[1]), cast("_Kind", found[2]), int(found[3]))

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
        return Action(self.stage + step, cast("_Kind", ends[self.kind]), self.microbatch)


@dataclass(frozen=True)
class Table:
    """A schedule: one row of actions for each rank. All other modules ask it which action depends on which.

    Attributes:
      name: Name of the schedule.
      rows: The actions of each rank, in order.
      microbatches: Number of micro-batches.
    """

    name: str
    rows: tuple[tuple[Action, ...], ...]
    microbatches: int

    def __str__(self) -> str:
        """Return the rows as text, one line per rank; :func:`read_rows` reads it."""
        return "\n".join(",".join(map(str, row)) for row in self.rows)

    @cached_property
    def actions(self) -> frozenset[Action]:
        """All actions of all ranks."""
        return frozenset(chain(*self.rows))

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """The rank of each stage; -1 for a stage without a forward."""
        found = {one.stage: rank for rank, row in enumerate(self.rows) for one in row if one.kind == "F"}
        return tuple(found.get(stage, -1) for stage in range(1 + max(found, default=-1)))

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.owners)

    @cached_property
    def forward_only(self) -> bool:
        """Whether nothing is computed backward."""
        return all(action.kind in _FORWARD for action in self.actions)

    @cached_property
    def computations(self) -> tuple[tuple[Action, ...], ...]:
        """The rows without transfers."""
        return tuple(tuple(action for action in row if action.computes) for row in self.rows)

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
        return tuple(sorted({self.edge(action) for action in self.actions if action.sends}))

    def needs(self, action: Action) -> list[Action]:
        """Return the computations whose results a computation needs, on any rank."""
        stage, microbatch = action.stage, action.microbatch
        if action.kind == "F":
            return [Action(stage - 1, "F", microbatch)] if stage else []
        if action.kind == "W":
            return [Action(stage, "I", microbatch)]
        behind = [self._backward(stage + 1, microbatch)] if stage < self.stages - 1 else []
        return [Action(stage, "F", microbatch), *behind]

    def send(self, action: Action) -> Action | None:
        """Return what sends the result of a computation to another rank; None if no other rank needs it."""
        if action.kind == "F" and self.crosses(action.stage):
            return Action(action.stage, "SEND_F", action.microbatch)
        if action.kind in ("B", "I") and self.crosses(action.stage - 1):
            return Action(action.stage, "SEND_B", action.microbatch)
        return None

    def computation(self, stage: int, transfer: Action) -> Action:
        """Return the computation of a stage that makes, or needs, what is transferred."""
        if transfer.kind in _FORWARD:
            return Action(stage, "F", transfer.microbatch)
        return self._backward(stage, transfer.microbatch)

    def _backward(self, stage: int, microbatch: int) -> Action:
        whole = Action(stage, "B", microbatch)
        return whole if whole in self.actions else Action(stage, "I", microbatch)


def read_rows(text: str) -> tuple[tuple[Action, ...], ...]:
    """Return what each rank computes from text, one line per rank; entries may be empty.

    Transfers are left out, and what torch's tables have beside, such as ``0REDUCE_GRAD``.
    """
    lines = [[entry.strip() for entry in line.split(",")] for line in text.strip().splitlines()]
    return tuple(
        tuple(Action.read(entry) for entry in line if entry and not _BESIDE.fullmatch(entry))
        for line in lines
    )
