"""What the library computes on its way to a result, which is its own business, and the results that replace a state's.

A module's function and an optimizer compute values that nobody reads, and that the caller has no part in. To tell what
a step has forgotten, a trace asks which values were handed back, not which ones were computed. To tell where the time
of a step goes, it asks which module is running.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .. import tree
from .setting import backward_number

__all__ = ["OwnWork", "hand_back", "name_of", "own_work", "watched", "watching"]

_watched: ContextVar[OwnWork | None] = ContextVar("watched", default=None)


@dataclass(slots=True)
class OwnWork:
    """What calls of the library report to a trace.

    Attributes:
      running: For each call that is running, innermost last: the path of its module, or "" if it is no module's, and
        the number of the backward in which it began. If there is one, it makes the ops, not the user's own lines.
      replaced: For each call, the trees that it handed back in place of others: the pairs (old leaf, new leaf) of each.
      names: The names of the modules that were applied.
      applied: For each call of a module's function that has ended: the module that was copied, the name of its class,
        whether it did what modules do only in training mode, the submodules whose buffers it wrote, with their class,
        and the new values of those buffers.
      buffers: The buffers that any of these calls was given.
      fixed: By id, name and tensor of what the modules' plain objects hold, which never changes.
    """

    running: list[tuple[str, int]] = field(default_factory=list)
    replaced: list[list[list[tuple[Any, Any]]]] = field(default_factory=list)
    names: dict[Hashable, str] = field(default_factory=dict)
    applied: list[tuple[Any, str, bool, tuple[str, ...], list[Tensor]]] = field(default_factory=list)
    buffers: list[Tensor] = field(default_factory=list)
    fixed: dict[int, tuple[str, Tensor]] = field(default_factory=dict)

    @property
    def module(self) -> str:
        """Path of the running module, from the name of its model on: ``GPT.h.0.attn``; "" if none is running.

        A backward may begin while a module is running, as in one that computes forces; its calls are not the module's.
        """
        path, began = self.running[-1] if self.running else ("", -1)
        return path if began == backward_number() else ""


@contextmanager
def watching(work: OwnWork) -> Iterator[None]:
    """Collect what calls of the library in the block report."""
    token = _watched.set(work)
    try:
        yield
    finally:
        _watched.reset(token)


def watched() -> OwnWork | None:
    """Return what calls of the library report to the running trace; None if there is no trace."""
    return _watched.get()


@contextmanager
def own_work(module: str = "") -> Iterator[None]:
    """Report to the running trace, if any, that the block computes on the library's own behalf.

    Args:
      module: Path of the module that computes, from its :func:`name_of` on.
    """
    work = _watched.get()
    if work is None:
        yield
        return
    work.running.append((module, backward_number()))
    try:
        yield
    finally:
        work.running.pop()


def name_of(model: Hashable, kind: str) -> str:
    """Return a model's name in the running trace: its class, and a number from the second of a class on."""
    work = _watched.get()
    if work is None:
        return kind
    if model not in work.names:
        alike = sum(name.partition("#")[0] == kind for name in work.names.values())
        work.names[model] = f"{kind}#{alike + 1}" if alike else kind
    return work.names[model]


def hand_back(old: Sequence[Any], new: Sequence[Any]) -> None:
    """Report to the running trace, if any, that a call returns some trees in place of others of the same structure."""
    work = _watched.get()
    if work is not None:
        pairs = (
            zip(tree.leaves(one), tree.leaves(other), strict=False)
            for one, other in zip(old, new, strict=True)
        )
        work.replaced.append([list(part) for part in pairs])
