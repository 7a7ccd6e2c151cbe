"""Rehearsals: a function runs in the middle of a trace to see what it computes, and its calls are made again later."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = [
    "Trace", "announce", "as_before", "copying", "for_members", "place", "rehearsing", "repeated",
    "tensor_of", "traced", "tracing", "unknown",
]  # fmt: skip


class Trace(Protocol):
    """What a rehearsal asks of the running trace."""

    def rehearsal(self) -> AbstractContextManager[None]:
        """Check the calls of a block by the rules of the trace, and record none of them."""
        ...

    def unknown(
        self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Make a fake tensor whose values nobody knows."""
        ...

    def place(self) -> Any:
        """Return where the last call comes from: the user's line, its module, its backward."""
        ...

    def as_before(self, place: Any) -> AbstractContextManager[None]:
        """Record the calls of a block as ones that come from a place."""
        ...

    def repeated(
        self, name: Hashable, act: Callable[[list[Tensor]], list[Tensor]], given: Sequence[Any], title: str
    ) -> list[Any]:
        """Compute a block that is computed several times, or only record its calls once more."""
        ...

    def tensor(self, value: Any) -> Tensor:
        """Return the tensor that a result of a block stands for."""
        ...

    def copying(self) -> AbstractContextManager[None]:
        """Follow only the user's own code, and what that calls, in a block that copies or lists the user's objects."""
        ...

    def for_members(
        self,
        act: Callable[[list[Tensor]], list[Tensor]],
        given: Sequence[Tensor],
        names: Sequence[str],
        count: int,
    ) -> list[Tensor]:
        """Trace a function on the tensors of one member, and record its calls for all members."""
        ...

    def announce(self, text: str) -> None:
        """Add a text that describes the program, and that is the same on all ranks."""
        ...


_running: ContextVar[Trace | None] = ContextVar("running", default=None)


@contextmanager
def tracing(trace: Trace) -> Iterator[None]:
    """Make a trace the running one."""
    token = _running.set(trace)
    try:
        yield
    finally:
        _running.reset(token)


def traced() -> bool:
    """Whether a trace is running."""
    return _running.get() is not None


def rehearsing() -> AbstractContextManager[None]:
    """Run a block as a rehearsal of the running trace; without a trace, do nothing."""
    trace = _running.get()
    return nullcontext() if trace is None else trace.rehearsal()


def unknown(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Make a tensor whose values nobody knows: a fake one of the running trace, or of the fake mode that is on."""
    trace = _running.get()
    if trace is not None:
        return trace.unknown(shape, stride, dtype, device)
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)


def place() -> Any:
    """Return where the last call of the running trace comes from; None without a trace."""
    trace = _running.get()
    return None if trace is None else trace.place()


def as_before(where: Any) -> AbstractContextManager[None]:
    """Record the calls of a block as ones that come from a place."""
    trace = _running.get()
    return nullcontext() if trace is None or where is None else trace.as_before(where)


def repeated(
    name: Hashable, act: Callable[[list[Tensor]], list[Tensor]], given: Sequence[Any], title: str = ""
) -> list[Any]:
    """Compute a block that is computed several times: the same calls, on tensors of the same layouts.

    A trace records it once. From then on its results are no tensors; :func:`tensor_of` makes one of a result.

    Args:
      name: What all times have in common.
      act: Computes it; what its calls are may depend on the layouts of what it is given alone.
      given: What it is given: tensors, or results of blocks.
      title: Name of the function that a compiler makes of it; empty if it makes none.
    """
    trace = _running.get()
    return act(list(given)) if trace is None else trace.repeated(name, act, given, title)


def for_members(
    act: Callable[[list[Tensor]], list[Tensor]], given: Sequence[Tensor], names: Sequence[str], count: int
) -> list[Tensor]:
    """Compute a function of one member for all: the tensors given and returned have the member axis first."""
    trace = _running.get()
    if trace is not None:
        return trace.for_members(act, given, names, count)
    columns = [act([tensor[number] for tensor in given]) for number in range(count)]
    return [torch.stack(column) for column in zip(*columns, strict=True)]


def tensor_of(value: Any) -> Tensor:
    """Return the tensor that a result of a block is, or stands for."""
    trace = _running.get()
    return value if trace is None else trace.tensor(value)


def copying() -> AbstractContextManager[None]:
    """Copy or list the user's objects in a block, of which a running trace follows the user's own code alone."""
    trace = _running.get()
    return nullcontext() if trace is None else trace.copying()


def announce(text: str) -> None:
    """Add a text to the program of the running trace, if any: ``explain`` prints it, and ranks compare it."""
    trace = _running.get()
    if trace is not None:
        trace.announce(text)
