"""What the library computes on its way to a result, which is its own business, and the results that replace a state's.

A module's function and an optimizer compute values that nobody reads, and that the caller has no part in. To tell what
a step has forgotten, a trace asks which values were handed back, not which ones were computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from .. import tree

__all__ = ["OwnWork", "hand_back", "own_work", "watching"]

_watched: ContextVar[OwnWork | None] = ContextVar("watched", default=None)


@dataclass(slots=True)
class OwnWork:
    """What calls of the library report to a trace.

    Attributes:
      depth: How many of them are running; more than 0 means that they make the ops, not the user's own lines.
      replaced: For each call, the trees that it handed back in place of others: the pairs (old leaf, new leaf) of each.
    """

    depth: int = 0
    replaced: list[list[list[tuple[Any, Any]]]] = field(default_factory=list)


@contextmanager
def watching(work: OwnWork) -> Iterator[None]:
    """Collect what calls of the library in the block report."""
    token = _watched.set(work)
    try:
        yield
    finally:
        _watched.reset(token)


@contextmanager
def own_work() -> Iterator[None]:
    """Report to the running trace, if any, that the block computes on the library's own behalf."""
    work = _watched.get()
    if work is None:
        yield
        return
    work.depth += 1
    try:
        yield
    finally:
        work.depth -= 1


def hand_back(old: Sequence[Any], new: Sequence[Any]) -> None:
    """Report to the running trace, if any, that a call returns some trees in place of others of the same structure."""
    work = _watched.get()
    if work is not None:
        pairs = (
            zip(tree.leaves(one), tree.leaves(other), strict=False)
            for one, other in zip(old, new, strict=True)
        )
        work.replaced.append([list(part) for part in pairs])
