"""Who looks at what modules return and at what optimizers do, while a function runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from torch import Tensor, nn

__all__ = ["Observer", "observer", "observing"]


class Observer(Protocol):
    """What looks at modules and optimizers."""

    def output(self, module: nn.Module, value: Any) -> Tensor | None:
        """Return the numbers of what a module has just returned; None if it has none."""

    def applied(self, model: Any, kind: str, paths: Sequence[str], numbers: Sequence[Tensor]) -> None:
        """Take the numbers of the modules of a model of some class, in the order in which they have returned."""

    def updated(self, params: Any, grads: Any, new_params: Any) -> None:
        """Take what an optimizer was given, and what it returned."""


_observer: ContextVar[Observer | None] = ContextVar("observer", default=None)


def observer() -> Observer | None:
    """Return who looks, if anybody does."""
    return _observer.get()


@contextmanager
def observing(one: Observer) -> Iterator[None]:
    """Let an observer look at what runs in a block."""
    token = _observer.set(one)
    try:
        yield
    finally:
        _observer.reset(token)
