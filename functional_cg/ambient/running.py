"""The run that the library's code computes in: what this code tells it, and asks of it.

A trace overrides what any other run does. A module's function and an optimizer compute values that nobody reads, and
that the caller has no part in: to tell what a step has forgotten, a trace asks which values were handed back, not which
ones were computed. To tell where the time of a step goes, it asks which module is running.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import tree
from .setting import backward_number

__all__ = ["OwnWork", "Run", "hand_back", "name_of", "own_work", "running", "tracing"]


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
      warnings: What the user is warned of when the trace ends, once for all its runs.
    """

    running: list[tuple[str, int]] = field(default_factory=list)
    replaced: list[list[list[tuple[Any, Any]]]] = field(default_factory=list)
    names: dict[Hashable, str] = field(default_factory=dict)
    applied: list[tuple[Any, str, bool, tuple[str, ...], list[Tensor]]] = field(default_factory=list)
    buffers: list[Tensor] = field(default_factory=list)
    fixed: dict[int, tuple[str, Tensor]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    @property
    def module(self) -> str:
        """Path of the running module, from the name of its model on: ``GPT.h.0.attn``; "" if none is running.

        A backward may begin while a module is running, as in one that computes forces; its calls are not the module's.
        """
        path, began = self.running[-1] if self.running else ("", -1)
        return path if began == backward_number() else ""


class Run:
    """A run without a trace; a trace overrides what it does.

    Attributes:
      work: What calls of the library report to a trace; None without one.
    """

    work: OwnWork | None = None

    def rehearsal(self) -> AbstractContextManager[None]:
        """Run a block to see what it computes: a trace checks its calls, and records none of them."""
        return nullcontext()

    def unknown(
        self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Make a tensor whose values nobody knows: under a trace, a fake one, which is made by no call."""
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)

    def place(self) -> Any:
        """Return where the last call of a trace comes from: the user's line, its module, its backward; else None."""

    def as_before(self, place: Any) -> AbstractContextManager[None]:
        """Record the calls of a block as ones that come from a place, which :meth:`place` returned."""
        return nullcontext()

    def repeated(
        self,
        name: Hashable,
        act: Callable[[list[Tensor]], list[Tensor]],
        given: Sequence[Any],
        title: str = "",
    ) -> list[Any]:
        """Compute a block that is computed several times: the same calls, on tensors of the same layouts.

        A trace records it once. From then on its results are no tensors; :meth:`tensor` makes one of a result.

        Args:
          name: What all times have in common.
          act: Computes it; what its calls are may depend on the layouts of what it is given alone.
          given: What it is given: tensors, or results of blocks.
          title: Name of the function that a compiler makes of it; empty if it makes none.
        """
        return act(list(given))

    def tensor(self, value: Any) -> Tensor:
        """Return the tensor that a result of a block is, or stands for."""
        return value  # type: ignore[no-any-return]

    def copying(self) -> AbstractContextManager[None]:
        """Copy or list the user's objects in a block, of which a trace follows the user's own code alone."""
        return nullcontext()

    def for_members(
        self,
        act: Callable[[list[Tensor]], list[Tensor]],
        given: Sequence[Tensor],
        names: Sequence[str],
        count: int,
    ) -> list[Tensor]:
        """Compute a function of one member for all: the tensors given and returned have the member axis first."""
        columns = [act([tensor[number] for tensor in given]) for number in range(count)]
        return [torch.stack(column) for column in zip(*columns, strict=True)]

    def announce(self, text: str) -> None:
        """Add a text that describes the program of a trace: ``explain`` prints it, and ranks compare it."""


_running: ContextVar[Run | None] = ContextVar("running", default=None)


def running() -> Run:
    """Return the trace that is running; without one, what stands for any other run."""
    return _running.get() or Run()


@contextmanager
def tracing(trace: Run) -> Iterator[None]:
    """Make a trace the running one."""
    token = _running.set(trace)
    try:
        yield
    finally:
        _running.reset(token)


@contextmanager
def own_work(module: str = "") -> Iterator[None]:
    """Report to the running trace, if any, that the block computes on the library's own behalf.

    Args:
      module: Path of the module that computes, from its :func:`name_of` on.
    """
    work = running().work
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
    work = running().work
    if work is None:
        return kind
    if model not in work.names:
        alike = sum(name.partition("#")[0] == kind for name in work.names.values())
        work.names[model] = f"{kind}#{alike + 1}" if alike else kind
    return work.names[model]


def hand_back(old: Sequence[Any], new: Sequence[Any]) -> None:
    """Report to the running trace, if any, that a call returns some trees in place of others of the same structure."""
    work = running().work
    if work is not None:
        pairs = (
            zip(tree.leaves(one), tree.leaves(other), strict=False)
            for one, other in zip(old, new, strict=True)
        )
        work.replaced.append([list(part) for part in pairs])
