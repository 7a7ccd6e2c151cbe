"""Make ranks agree outside graphs: before a capture, all must be about to capture the same thing.

A rank that is missing, or that is called with another layout, would hang all others inside a collective. So ranks meet
first at the key-value store of the launcher's rendezvous, where waiting has a timeout.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import zip_longest
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from ..errors import RankError

__all__ = ["Ranks"]

_GOODBYE_SECONDS = 5.0
_ROLL_CALL_SECONDS = 2.0  # ranks that lose each other notice at nearly the same time


@dataclass(eq=False, slots=True)
class Ranks:
    """The ranks of a run, which meet at a shared store.

    Attributes:
      store: Key-value store that all ranks share.
      rank: Number of this rank.
      size: Number of ranks.
      timeout: Seconds to wait for the others.
      meetings: Number of meetings so far; equal on ranks that make the same calls.
      attempts: Number of times that this meeting was given up.
      last: Keys of the previous meeting that are still in the store.
      lost: Whether a connection to another rank is known to be broken.
      groups: For each rank, the number of the group that does the same as it.
    """

    store: Any
    rank: int
    size: int
    timeout: float
    meetings: int = 0
    attempts: int = 0
    last: tuple[str, ...] = ()
    lost: bool = False
    groups: tuple[int, ...] = ()

    @classmethod
    def of_this_run(cls, timeout: float) -> Ranks:
        store = dist.distributed_c10d._get_default_store()  # private; test_sharding notices a change
        return cls.over(store, dist.get_rank(), dist.get_world_size(), timeout)

    @classmethod
    def over(cls, store: Any, rank: int, size: int, timeout: float) -> Ranks:
        """Make the ranks that share a store; keys of earlier meshes in the store are not read again."""
        number = store.add(
            f"functional_cg/meshes of rank {rank}", 1
        )  # equal on ranks that make the same calls
        return cls(PrefixStore(f"functional_cg/{number}", store), rank, size, timeout, groups=(0,) * size)

    def own_store(self) -> Any:
        """Return the store by a connection for another thread: one is busy for as long as somebody waits on it."""
        return self.store.clone()

    def in_groups(self, groups: Sequence[int]) -> Ranks:
        """Return the same ranks, of which only those of a group do the same."""
        own = Ranks.over(self.store, self.rank, self.size, self.timeout)
        return replace(own, groups=tuple(groups))

    def beside(self, said: Sequence[str]) -> list[str]:
        """Return what the ranks of this rank's group have said."""
        own = self.groups[self.rank]
        return [text for text, group in zip(said, self.groups, strict=True) if group == own]

    def agree(self, function: str, what: str) -> None:
        """Wait for all ranks, and raise on all of them unless those of a group are about to do the same.

        Args:
          function: Name of the user's function.
          what: What this rank is about to do, as text that must be equal on all ranks.
        Raises:
          RankError: Naming the ranks that are missing or differ.
        """
        said = self.shared(function, what)
        first = [self.groups.index(group) for group in self.groups]
        others = [rank for rank in range(self.size) if said[rank] != said[first[rank]]]
        if others:
            differ, one = f"{_ranks(others)} differ{'s' * (len(others) == 1)}", first[others[0]]
            raise RankError.of(
                function,
                f"ranks are about to do different things: {differ} from rank {one}.",
                rows=_differences(said[one], said[others[0]], others[0], one),
                why="Each rank captures one graph, and the collectives in them wait for each other.",
                fix="call the same steps in one order on all ranks, with inputs of one layout: the last batch too.",
            )

    def shared(self, function: str, what: str) -> list[str]:
        """Exchange a text between all ranks; return the text of each rank.

        Args:
          function: Name of the user's function.
          what: The text of this rank; its first line says what the rank is about to do.
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
        """Return the text of each rank, or the ranks that are absent at the deadline.

        Whether ranks have met is decided once for all of them, by the first one that knows. Otherwise one rank might
        give up at the moment when the last one arrives, which would go on alone. A rank that arrives after an attempt
        was given up starts the next one; ranks that call again join it. Absent are the ranks that came to no attempt.
        """
        never = set(range(self.size))
        while True:
            place = f"{self.meetings}/{self.attempts}"
            keys = [f"{place}/{rank}" for rank in range(self.size)]
            self.store.set(keys[self.rank], what)
            try:
                absent = self._absent(keys, place, end)
            except KeyboardInterrupt:
                self.store.compare_set(place, "", "given up")  # this rank arrived, and leaves
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
        """Return the ranks that have not come to an attempt by the deadline, or when the attempt ended."""
        left = timedelta(seconds=max(end - time.monotonic(), 0.01))  # 0 means forever
        if not self.store.check([place]):
            with contextlib.suppress(RuntimeError):  # c10d's DistStoreError, and the errors of older stores
                self.store.wait(keys, left)
        return [rank for rank, key in enumerate(keys) if not self.store.check([key])]

    def _forget_the_last(self) -> None:
        """Delete this rank's keys of the previous meeting: every rank that is here has read them."""
        for key in self.last:
            self.store.delete_key(key)

    def refuse_if_lost(self, function: str) -> None:
        """Raise if a collective has failed before: later messages might be matched with messages of the failed one.

        Raises:
          RankError: Immediately, without waiting for other ranks.
        """
        if self.lost:
            raise RankError.of(
                function,
                f"rank {self.rank} of {self.size} has lost another rank before; the state is that of the last step.",
                why="After a collective that failed, ranks do not go together any more.",
                fix="start all ranks again, from the last checkpoint.",
            )

    def absent(self) -> list[int]:
        """Return the ranks that do not answer: they have ended, or have not noticed the lost connection yet."""
        self.lost = True
        keys = [f"lost/{rank}" for rank in range(self.size)]
        try:
            self.store.set(keys[self.rank], "")
            with contextlib.suppress(RuntimeError):
                self.store.wait(keys, timedelta(seconds=min(_ROLL_CALL_SECONDS, self.timeout)))
            missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
            self.store.set(f"told/{self.rank}", "")
            return missing
        except RuntimeError:
            return []  # the store is gone, and all answers with it

    def part(self) -> None:
        """Wait for all ranks before connections are closed; the wait for a dead rank is short.

        If one was lost, only rank 0 waits, which may hold the store where the others still ask who is missing.
        """
        if self.lost and self.rank:
            return
        name, seconds = ("told", 2 * _ROLL_CALL_SECONDS) if self.lost else ("end", _GOODBYE_SECONDS)
        keys = [f"{name}/{rank}" for rank in range(self.size)]
        try:
            self.store.set(keys[self.rank], "")
            self.store.wait(keys, timedelta(seconds=seconds))
        except RuntimeError:
            return  # a rank, or the store itself, is gone already


def _ranks(numbers: list[int]) -> str:
    return f"rank{'s' * (len(numbers) != 1)} {', '.join(map(str, numbers))}"


def _differences(first: str, other: str, rank: int, one: int) -> list[str]:
    """Return the lines that differ between the texts of two ranks."""
    pairs = zip_longest(first.splitlines(), other.splitlines(), fillvalue="nothing")
    return [f"rank {one}  {x}   rank {rank}  {y}" for x, y in pairs if x != y]
