"""Runs a step alongside the plain Python function, and compares states, metrics and kept values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from torch import Tensor

from .. import tree as pytree
from ..errors import ClosedError, DonatedStateError, FunctionalCGError, LayoutError
from ..graph_step import GraphFn, GraphStep
from ..stages.plan import Backend
from ..state.handle import Handle, place, snapshot
from .laws import arguments, assert_trees_all_close, assert_trees_all_equal

__all__ = ["Subject", "Twins", "refused"]


class _RaisedInsideError(Exception):
    """Raised by a step that is made to fail."""


@dataclass(frozen=True)
class Subject:
    """The subject of a machine and how to test it: the arguments of :func:`machine`."""

    step: GraphStep[Any, Any]
    readers: tuple[GraphFn[Any, Any], ...]
    backend: Callable[[], Backend] | None
    inputs: st.SearchStrategy[Any]
    rtol: float
    atol: float


class Twins:
    """What a loop does to a step between calls, mistakes included; each action is mirrored on a model.

    Attributes:
      captured: The step under test.
      states: Pairs of a state and the plain tree that it must equal.
      donated: Donated handles, and leaves that were taken from them before.
      kept: Pairs of a value that must never change and its copy.
      buffer: Memory for inputs that are overwritten once their call has returned.
    """

    subject: ClassVar[Subject]

    def __init__(self) -> None:
        super().__init__()
        backend = self.subject.backend
        self.options: dict[str, Any] = {} if backend is None else {"backend": backend()}
        self.captured: GraphStep[Any, Any] = self.subject.step.anew(**self.options)
        self.readers = [reader.anew(**self.options) for reader in self.subject.readers]
        self.states: list[tuple[Any, Any]] = []
        self.donated: list[Any] = []
        self.kept: list[tuple[Any, Any]] = []
        self.buffer: Any = None

    def add(self, state: Any) -> None:
        """Add a copy of a state; hypothesis may draw the original again."""
        self.states.append((place(snapshot(state)), snapshot(state)))

    def chosen(self, which: int) -> tuple[Any, Any]:
        """Return a state and its model."""
        return self.states[which % len(self.states)]

    def advance(self, which: int, state: Any, model: Any) -> None:
        """Replace a state by its successor, and note that the old one was donated."""
        old, _ = self.chosen(which)
        self.states[which % len(self.states)] = (state, model)
        self.donated.append(old)

    def keep(self, got: Any, expected: Any) -> None:
        """Compare a returned value with the expected one, and keep it: it must not change later."""
        self.compare(got, expected, "metrics")
        self.kept.append((got, snapshot(got)))

    def compare(self, got: Any, expected: Any, name: str) -> None:
        """Assert that two trees are equal, within the subject's tolerance."""
        rtol, atol = self.subject.rtol, self.subject.atol
        if rtol or atol:
            assert_trees_all_close(got, expected, rtol=rtol, atol=atol, name=name)
        else:
            assert_trees_all_equal(got, expected, name)

    def call(self, which: int, call: Any, *, eagerly: bool = False, overwrite: bool = False) -> None:
        """Step, and advance the model with the plain Python function."""
        metrics, wanted = self.advanced(which, call, eagerly=eagerly, overwrite=overwrite)
        self.keep(metrics, wanted)
        if self.subject.rtol or self.subject.atol:  # small differences would add up from call to call
            state, model = self.chosen(which)
            self.compare(state, model, "state")
            self.states[which % len(self.states)] = (state, snapshot(state))

    def advanced(self, which: int, call: Any, *, eagerly: bool = False, overwrite: bool = False) -> Any:
        """Step, and return the metrics and their expected values, not yet compared."""
        state, model = self.chosen(which)
        expected, wanted = _run(self.subject.step.__wrapped__, model, call)
        given = self.refilled(call) if overwrite else call
        leaves = pytree.leaves(state)
        replays = self.captured.stats.replays
        new, metrics = (self.captured.eager if eagerly else self.captured)(state, *arguments(given))
        self.advance(which, new, expected)
        self.donated += leaves[-2:]
        assert eagerly or self.captured.stats.replays == replays + 1, f"it did not replay: {self.captured!r}"
        if overwrite:
            pytree.map(_overwrite, given)
        else:
            mine = [leaf for leaf in pytree.leaves(call) if isinstance(leaf, Tensor)]
            self.kept.append((mine, snapshot(mine)))
        return metrics, wanted

    def refilled(self, call: Any) -> Any:
        """Copy the values of a call into one reused buffer, as a data loader does."""
        if self.buffer is None:
            self.buffer = snapshot(call)
        return pytree.map(_refill, self.buffer, call)

    def look(self, which: int, call: Any) -> None:
        """Call the read-only functions, which borrow the state."""
        state, model = self.chosen(which)
        generation = state.generation
        for reader in self.readers:
            self.keep(reader(state, *arguments(call)), _run(reader.__wrapped__, model, call))
        assert state.generation == generation, "a read-only function donated the state"

    def misuse(self, which: int, call: Any) -> None:
        """Step from a donated state, which must be refused."""
        handles = [stale for stale in self.donated if isinstance(stale, Handle)]
        if not handles:
            return
        with refused(DonatedStateError):
            self.captured(handles[-1 - which % len(handles)], *arguments(call))

    def misfit(self, which: int, call: Any, how: int) -> None:
        """Step with an input of another shape or dtype than the first call's, which must be refused."""
        leaves, treedef = pytree.flatten(call)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        if not places or not self.captured.stats.captures:
            return  # the first call sets the layout
        place = places[how // 2 % len(places)]
        leaf = leaves[place]
        leaves[place] = (
            leaf[None] if how % 2 else leaf.to(torch.int16 if leaf.is_floating_point() else torch.float32)
        )
        with refused(LayoutError):
            self.captured(self.chosen(which)[0], *arguments(pytree.unflatten(treedef, leaves)))

    def fail(self, which: int, call: Any) -> None:
        """Call a step whose function raises at its end."""

        def raises(state: Any, *inputs: Any) -> Any:
            self.subject.step.__wrapped__(state, *inputs)
            raise _RaisedInsideError

        failing: GraphStep[Any, Any] = GraphStep(raises, **self.options)
        with refused(_RaisedInsideError, FunctionalCGError):
            failing(self.chosen(which)[0], *arguments(call))

    def renew(self, which: int, call: Any) -> None:
        """Close the step, check that it refuses a call, and make a new one that continues with the states."""
        self.captured.close()
        with refused(ClosedError):
            self.captured(self.chosen(which)[0], *arguments(call))
        self.captured = self.subject.step.anew(**self.options)


def _run(function: Callable[..., Any], state: Any, call: Any) -> Any:
    """Return the plain function's result on a plain tree."""
    with torch.no_grad():
        return snapshot(function(state, *arguments(call)))


def _refill(buffer: Any, value: Any) -> Any:
    return buffer.copy_(value) if isinstance(buffer, Tensor) else value


def _overwrite(leaf: Any) -> None:
    if isinstance(leaf, Tensor):
        leaf.zero_()


@contextmanager
def refused(*errors: type[Exception]) -> Iterator[None]:
    try:
        yield
    except errors:
        return
    raise AssertionError(f"expected {' or '.join(error.__name__ for error in errors)}, nothing was raised")
