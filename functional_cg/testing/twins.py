"""A step beside the plain Python function: states and the trees that they must equal, and what must never change."""

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
from ..stages.run.capture import Backend
from ..state.handle import Handle, place, snapshot
from .laws import arguments, assert_trees_all_close, assert_trees_all_equal

__all__ = ["Subject", "Twins", "refused"]


class _RaisedInsideError(Exception):
    """What a step raises that is made to fail."""


@dataclass(frozen=True)
class Subject:
    """What a machine tests, and how: the arguments of :func:`machine`."""

    step: GraphStep[Any, Any]
    readers: tuple[GraphFn[Any, Any], ...]
    backend: Callable[[], Backend] | None
    inputs: st.SearchStrategy[Any]
    rtol: float
    atol: float


class Twins:
    """What a loop does with a step between two calls, mistakes included; each act is done to its model, too.

    Attributes:
      captured: The step under test.
      states: Pairs of a state and the plain tree that it must equal.
      donated: Handles that were donated, and leaves that were taken from them before.
      kept: Pairs of what must never change and its copy.
      buffer: Memory of the inputs that are overwritten once their call has returned.
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
        """Take a state in, by copy: it may be drawn again."""
        self.states.append((place(snapshot(state)), snapshot(state)))

    def chosen(self, which: int) -> tuple[Any, Any]:
        """A state and its model."""
        return self.states[which % len(self.states)]

    def advance(self, which: int, state: Any, model: Any) -> None:
        """Note that a state was donated for a new one, and with it the leaves that were taken from it."""
        old, _ = self.chosen(which)
        self.states[which % len(self.states)] = (state, model)
        self.donated.append(old)

    def keep(self, got: Any, expected: Any) -> None:
        """Compare what was returned with what should have been; it must stay so."""
        self.compare(got, expected, "metrics")
        self.kept.append((got, snapshot(got)))

    def compare(self, got: Any, expected: Any, name: str) -> None:
        """Assert that two trees are equal, as far as the tolerance asks for it."""
        rtol, atol = self.subject.rtol, self.subject.atol
        if rtol or atol:
            assert_trees_all_close(got, expected, rtol=rtol, atol=atol, name=name)
        else:
            assert_trees_all_equal(got, expected, name)

    def call(self, which: int, call: Any, *, eagerly: bool = False, overwrite: bool = False) -> None:
        """Step, and let the Python function make the same step of the model."""
        metrics, wanted = self.advanced(which, call, eagerly=eagerly, overwrite=overwrite)
        self.keep(metrics, wanted)
        if self.subject.rtol or self.subject.atol:  # small differences add up from call to call
            state, model = self.chosen(which)
            self.compare(state, model, "state")
            self.states[which % len(self.states)] = (state, snapshot(state))

    def advanced(self, which: int, call: Any, *, eagerly: bool = False, overwrite: bool = False) -> Any:
        """Step; returns the metrics and what they should be, not yet compared."""
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
        """The values of a call in one buffer that is used again and again, as a loader does it."""
        if self.buffer is None:
            self.buffer = snapshot(call)
        return pytree.map(_refill, self.buffer, call)

    def look(self, which: int, call: Any) -> None:
        """Read-only functions between steps: they borrow the state."""
        state, model = self.chosen(which)
        generation = state.generation
        for reader in self.readers:
            self.keep(reader(state, *arguments(call)), _run(reader.__wrapped__, model, call))
        assert state.generation == generation, "a read-only function donated the state"

    def misuse(self, which: int, call: Any) -> None:
        """Step from a state that was donated."""
        handles = [stale for stale in self.donated if isinstance(stale, Handle)]
        if not handles:
            return
        with refused(DonatedStateError):
            self.captured(handles[-1 - which % len(handles)], *arguments(call))

    def misfit(self, which: int, call: Any, how: int) -> None:
        """Step with an input that has another shape or dtype than the first call's."""
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
        """Let the function raise when it is done."""

        def raises(state: Any, *inputs: Any) -> Any:
            self.subject.step.__wrapped__(state, *inputs)
            raise _RaisedInsideError

        failing: GraphStep[Any, Any] = GraphStep(raises, **self.options)
        with refused(_RaisedInsideError, FunctionalCGError):
            failing(self.chosen(which)[0], *arguments(call))

    def renew(self, which: int, call: Any) -> None:
        """Close the step, try it once more, and make a new one: the states go on."""
        self.captured.close()
        with refused(ClosedError):
            self.captured(self.chosen(which)[0], *arguments(call))
        self.captured = self.subject.step.anew(**self.options)


def _run(function: Callable[..., Any], state: Any, call: Any) -> Any:
    """What the Python function makes of a plain tree."""
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
