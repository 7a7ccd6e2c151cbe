"""Ranks that meet outside of graphs: before a capture, all have to be about to capture the same thing.

A rank that is missing, or that is called with another layout, would hang all others inside of a collective. They meet
at the key-value store that the launcher's rendezvous has left, where waiting has an end.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from ..errors import RankError

__all__ = ["Ranks"]

_GOODBYE_SECONDS = 5.0
_ROLL_CALL_SECONDS = 2.0  # ranks that have lost each other do so at nearly one time


@dataclass(eq=False, slots=True)
class Ranks:
    """The ranks of a run.

    Attributes:
      store: Keys and values that all ranks see.
      rank: This one's number.
      size: Number of ranks.
      timeout: Seconds to wait for the others.
      meetings: Number of meetings so far; ranks that go the same way count alike.
      attempts: Number of times that this meeting has been given up.
      last: What of the meeting before is still in the store.
      lost: Whether a connection to another rank is known to be broken.
    """

    store: Any
    rank: int
    size: int
    timeout: float
    meetings: int = 0
    attempts: int = 0
    last: tuple[str, ...] = ()
    lost: bool = False

    @classmethod
    def of_this_run(cls, timeout: float) -> Ranks:
        store = dist.distributed_c10d._get_default_store()  # private; test_sharding notices a change
        return cls.over(store, dist.get_rank(), dist.get_world_size(), timeout)

    @classmethod
    def over(cls, store: Any, rank: int, size: int, timeout: float) -> Ranks:
        """The ranks that share a store. What those of an earlier mesh said there is not heard again."""
        number = store.add(f"functional_cg/meshes of rank {rank}", 1)  # alike on ranks that go the same way
        return cls(PrefixStore(f"functional_cg/{number}", store), rank, size, timeout)

    def agree(self, function: str, what: str) -> None:
        """Wait for all ranks, and raise on all of them unless they are about to do the same.

        Args:
          function: Name of the user's function.
          what: What this rank is about to do, in words that are equal on all ranks.
        Raises:
          RankError: Naming the ranks that are missing, or that do something else.
        """
        said = self.shared(function, what)
        others = [rank for rank in range(self.size) if said[rank] != said[0]]
        if others:
            differ = f"{_ranks(others)} differ{'s' * (len(others) == 1)}"
            raise RankError.of(
                function,
                f"ranks are about to do different things: {differ} from rank 0.",
                rows=_differences(said[0], said[others[0]], others[0]),
                why="Each rank captures one graph, and the collectives in them wait for each other.",
                fix="call the same steps in one order on all ranks, with inputs of one layout: the last batch too.",
            )

    def shared(self, function: str, what: str) -> list[str]:
        """What each rank says; all of them ask.

        Args:
          function: Name of the user's function.
          what: What this rank says; the first line says what it is about to do.
        Raises:
          RankError: Naming the ranks that are missing.
        """
        self.refuse_if_lost(function)
        end = time.monotonic() + self.timeout
        try:
            said, absent = self._met(what, end)
        except RuntimeError as error:
            raise RankError.of(
                function,
                f"rank {self.rank} of {self.size} cannot reach the store where ranks meet.",
                rows=[str(error).partition("\n")[0]],
                why="The launcher holds it, or rank 0 does: one of them has ended.",
                fix="see what rank 0 and the launcher said; then start all ranks again, from the last checkpoint.",
            ) from error
        if absent:
            raise RankError.of(
                function,
                f"waited {self.timeout:g} s for {_ranks(absent)}, on rank {self.rank} of {self.size}.",
                rows=[f"rank {self.rank} is about to {what.splitlines()[0]}"],
                why="A function over a sharded state is collective: all ranks call it, in the same order.",
                fix="call it on all ranks and use its result on one, `out = sample(state)`, `if rank == 0: show(out)`.",
            )
        return said

    def _met(self, what: str, end: float) -> tuple[list[str], list[int]]:
        """What each rank says, or which ranks are absent at the end of the time.

        Whether ranks have met is decided once for all of them, by the first one that knows: else one might give up in
        the moment in which the last one comes, who would go on alone. Who comes after an attempt was given up makes
        the next one, and those that call again make it too. Absent are those that have come to none.
        """
        never = set(range(self.size))
        while True:
            place = f"{self.meetings}/{self.attempts}"
            keys = [f"{place}/{rank}" for rank in range(self.size)]
            self.store.set(keys[self.rank], what)
            try:
                absent = self._absent(keys, place, end)
            except KeyboardInterrupt:
                self.store.compare_set(place, "", "given up")  # this rank has come, and goes
                raise
            verdict = "given up" if absent else "met"
            if self.store.compare_set(place, "", verdict).decode() == "met":
                said = [self.store.get(key).decode() for key in keys]
                self._forget_the_last()
                self.meetings, self.attempts, self.last = self.meetings + 1, 0, (place, keys[self.rank])
                return said, []
            self.attempts += 1
            never &= set(absent)
            if absent and time.monotonic() >= end:
                return [], sorted(never) or absent

    def _absent(self, keys: list[str], place: str, end: float) -> list[int]:
        """The ranks that have not come to an attempt by the end of the time, or by its own end."""
        left = timedelta(seconds=max(end - time.monotonic(), 0.01))  # 0 is for ever
        if not self.store.check([place]):
            with contextlib.suppress(RuntimeError):  # c10d's DistStoreError, and what older stores raise
                self.store.wait(keys, left)
        return [rank for rank, key in enumerate(keys) if not self.store.check([key])]

    def _forget_the_last(self) -> None:
        """Delete what this rank has said at the meeting before: whoever is here has left it."""
        for key in self.last:
            self.store.delete_key(key)

    def refuse_if_lost(self, function: str) -> None:
        """Raise if a collective has failed before: what ranks send since might meet what others sent for it.

        Raises:
          RankError: At once.
        """
        if self.lost:
            raise RankError.of(
                function,
                f"rank {self.rank} of {self.size} has lost another rank before; the state is that of the last step.",
                why="After a collective that failed, ranks do not go together any more.",
                fix="start all ranks again, from the last checkpoint.",
            )

    def absent(self) -> list[int]:
        """The ranks that do not answer now: they have ended, or do not know yet that a connection is lost."""
        self.lost = True
        keys = [f"lost/{rank}" for rank in range(self.size)]
        try:
            self.store.set(keys[self.rank], "")
            with contextlib.suppress(RuntimeError):
                self.store.wait(keys, timedelta(seconds=min(_ROLL_CALL_SECONDS, self.timeout)))
            return [rank for rank, key in enumerate(keys) if not self.store.check([key])]
        except RuntimeError:
            return []  # the store is gone, and with it everyone's answer

    def part(self) -> None:
        """Let all ranks get here before connections are cut; one that has died is not waited for long."""
        if self.lost:
            return
        keys = [f"end/{rank}" for rank in range(self.size)]
        try:
            self.store.set(keys[self.rank], "")
            self.store.wait(keys, timedelta(seconds=_GOODBYE_SECONDS))
        except RuntimeError:
            return  # a rank, or the store itself, is gone already


def _ranks(numbers: list[int]) -> str:
    return f"rank{'s' * (len(numbers) != 1)} {', '.join(map(str, numbers))}"


def _differences(first: str, other: str, rank: int) -> list[str]:
    """The first lines that differ, of what rank 0 and another one said."""
    a, b = first.splitlines(), other.splitlines()
    pairs = [
        *zip(a, b, strict=False),
        *((line, "nothing") for line in a[len(b) :]),
        *(("nothing", line) for line in b[len(a) :]),
    ]
    return [f"rank 0  {x}   rank {rank}  {y}" for x, y in pairs if x != y]
