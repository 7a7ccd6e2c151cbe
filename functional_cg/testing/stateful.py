"""Stateful hypothesis tests of a step: whatever happens between calls, it must match the pure function.

It needs hypothesis and is imported on first use.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from .. import tree as pytree
from ..errors import DonatedStateError, ReadOnlyError
from ..graph_step import GraphFn, GraphStep
from ..stages.plan import Backend
from ..state.handle import snapshot
from ..state.lifecycle import fork
from .laws import assert_no_alias, assert_trees_all_equal
from .simulator import Simulator
from .twins import Subject, Twins, refused

__all__ = ["GraphStepMachine", "machine"]

_MOST_STATES = 3


def some() -> st.SearchStrategy[int]:
    """Draw an index into several things; rules use it modulo their number."""
    return st.integers(0, 7)


def machine(
    step: GraphStep[Any, Any],
    *,
    state: st.SearchStrategy[Any],
    inputs: st.SearchStrategy[Any],
    evaluate: Sequence[GraphFn[Any, Any]] = (),
    backend: Callable[[], Backend] | None = None,
    rtol: float = 0.0,
    atol: float = 0.0,
) -> type[GraphStepMachine]:
    """Make a hypothesis state machine that does to a step what users do between calls, mistakes included.

    It steps, steps eagerly, evaluates, keeps returned values, overwrites its inputs, reads and writes leaves, forks,
    saves and restores, drops states and collects garbage, passes inputs of another layout, uses donated states, lets
    the function raise, and closes and recreates the step. After each action every state must equal, bitwise, the result
    of the plain Python function on a plain tree, and no returned value may have changed.

    Each example captures the step again, so that it can be repeated; the trace is shared. Set ``deadline=None``.

    Args:
      step: The step to test. It is not called itself; each example makes a new step from it.
      state: Strategy for states to start from, all of one layout: handles or pytrees, such as ``st.builds(create)``.
      inputs: Strategy for the input of a call, or for a tuple of its inputs; all of one layout. Tensors are made
        contiguous: with other strides the plain function could sum in another order than a replay.
      evaluate: Read-only functions to call in between, with the state and the inputs.
      backend: Makes a backend for each example, such as :class:`functional_cg.testing.Simulator`; by default the
        step's.
      rtol: Relative tolerance for floating leaves, for a lowering that compiles. States are then compared call by call.
      atol: Absolute tolerance, likewise.
    Returns:
      A machine class; ``machine(...).TestCase`` is a test. Subclass it to add rules of your own.
    Raises:
      TypeError: If an argument has the wrong type.

    Example:
      >>> import torch, functional_cg as fcg
      >>> from hypothesis import settings, strategies as st
      >>> from functional_cg.testing.stateful import machine
      >>> from functional_cg.testing.strategies import like
      >>> step = fcg.graph_step(lambda s, x: ({"sum": s["sum"] + x}, {"old": s["sum"]}))
      >>> start = st.builds(lambda: {"sum": torch.zeros(2)})
      >>> TestSum = machine(step, state=start, inputs=like(torch.zeros(2))).TestCase
      >>> TestSum.settings = settings(deadline=None, max_examples=2)
      >>> TestSum().runTest()
    """
    if not isinstance(step, GraphStep):
        raise TypeError(f"machine: `step` must be a graph_step, got {type(step).__name__}")
    for name, strategy in (("state", state), ("inputs", inputs)):
        if not isinstance(strategy, st.SearchStrategy):
            raise TypeError(f"machine: `{name}` must be a hypothesis strategy, got {type(strategy).__name__}")
    for function in evaluate:
        if not isinstance(function, GraphFn):
            raise TypeError(f"machine: `evaluate` must hold graph_fns, got {type(function).__name__}")

    inputs = inputs.map(_dense)

    class StepMachine(GraphStepMachine):
        subject = Subject(step.anew(), (GraphFn(_all_leaves), *evaluate), backend, inputs, rtol, atol)

        @initialize(state=state)
        def start(self, state: Any) -> None:
            self.add(state)

        @precondition(lambda self: len(self.states) < _MOST_STATES)
        @rule(state=state)
        def start_another(self, state: Any) -> None:
            self.add(state)

        @rule(which=some(), inputs=inputs, overwrite=st.booleans())
        def take_a_step(self, *, which: int, inputs: Any, overwrite: bool) -> None:
            self.call(which, inputs, overwrite=overwrite)

        @rule(which=some(), inputs=inputs)
        def take_a_step_eagerly(self, which: int, inputs: Any) -> None:
            self.call(which, inputs, eagerly=True)

        @rule(which=some(), inputs=inputs)
        def evaluate_in_between(self, which: int, inputs: Any) -> None:
            self.look(which, inputs)

        @rule(which=some(), inputs=inputs, how=some())
        def pass_another_layout(self, which: int, inputs: Any, how: int) -> None:
            self.misfit(which, inputs, how)

        @precondition(lambda self: self.donated)
        @rule(which=some(), inputs=inputs)
        def use_what_was_donated(self, which: int, inputs: Any) -> None:
            self.misuse(which, inputs)

        @rule(which=some(), inputs=inputs)
        def raise_inside(self, which: int, inputs: Any) -> None:
            self.fail(which, inputs)

        @rule(which=some(), inputs=inputs)
        def close_and_make_anew(self, which: int, inputs: Any) -> None:
            self.renew(which, inputs)

    StepMachine.__name__ = StepMachine.__qualname__ = f"{step._name}_machine"
    return StepMachine


class GraphStepMachine(Twins, RuleBasedStateMachine):
    """Base class of the machines from :func:`machine`; custom rules can use the methods of :class:`Twins`.

    Attributes:
      saved: Snapshots to restore.
    """

    def __init__(self) -> None:
        super().__init__()
        self.saved: list[Any] = []

    @precondition(lambda self: isinstance(self.options.get("backend"), Simulator))
    @rule(data=st.data(), which=some())
    def take_steps_on_streams(self, data: Any, which: int) -> None:
        """Queue a few steps on two streams, with one buffer for their inputs, before anything runs."""
        simulator = self.options["backend"]
        pairs = []
        for _ in range(4):
            with simulator.stream(data.draw(st.sampled_from("ab"), label="stream")):
                pairs.append(
                    self.advanced(which, data.draw(self.subject.inputs, label="inputs"), overwrite=True)
                )
        simulator.synchronize()
        for metrics, wanted in pairs:
            self.keep(metrics, wanted)

    @rule(which=some(), leaf=some(), back=st.booleans())
    def write_a_leaf(self, *, which: int, leaf: int, back: bool) -> None:
        """Replace a leaf by zeros or flip it, then overwrite the value that was passed in."""
        state, model = self.chosen(which)

        def where(tree: Any) -> Any:
            return pytree.leaves(tree)[leaf % len(pytree.leaves(tree))]

        value = where(model).flip(0) if back and where(model).dim() else torch.zeros_like(where(model))
        model = pytree.at(where, model, value.clone())
        new = pytree.at(where, state, value)
        value.zero_()
        self.advance(which, new, model)

    @precondition(lambda self: len(self.states) < _MOST_STATES)
    @rule(which=some())
    def fork(self, which: int) -> None:
        state, model = self.chosen(which)
        self.states.append((fork(state), snapshot(model)))

    @rule(which=some())
    def save(self, which: int) -> None:
        state, model = self.chosen(which)
        self.saved.append(snapshot(state))
        self.kept.append((self.saved[-1], snapshot(model)))

    @precondition(lambda self: self.saved)
    @rule(which=some(), saved=some())
    def restore(self, which: int, saved: int) -> None:
        """Write a snapshot into the slots of a state."""
        state, _ = self.chosen(which)
        value = self.saved[saved % len(self.saved)]
        self.advance(which, pytree.at(lambda tree: tree, state, value), snapshot(value))

    @rule(which=some())
    def use_the_latest(self, which: int) -> None:
        """Continue from ``latest()``, as a user does after Ctrl-C in a notebook."""
        state, model = self.chosen(which)
        self.states[which % len(self.states)] = (state.latest(), model)

    @precondition(lambda self: len(self.states) > 1)
    @rule(which=some())
    def drop(self, which: int) -> None:
        """Drop a state and everything that was taken from it."""
        del self.states[which % len(self.states)]
        self.donated.clear()
        gc.collect(1)

    @rule(which=some(), leaf=some())
    def write_into_a_leaf(self, which: int, leaf: int) -> None:
        state, _ = self.chosen(which)
        leaves = pytree.leaves(state)
        with refused(ReadOnlyError):
            leaves[leaf % len(leaves)].zero_()

    @precondition(lambda self: self.donated)
    @rule(which=some())
    def read_what_was_donated(self, which: int) -> None:
        stale = self.donated[-1 - which % len(self.donated)]  # most recent first
        with refused(DonatedStateError):
            snapshot(stale)

    @invariant()
    def states_are_what_the_function_made(self) -> None:
        backend = self.options.get("backend")
        if isinstance(backend, Simulator):
            backend.poison()
        for state, model in self.states:
            assert_trees_all_equal(state, model, "state")

    @invariant()
    def what_was_kept_never_changes(self) -> None:
        for mine, its_copy in self.kept:
            assert_trees_all_equal(mine, its_copy, "kept")
        assert_no_alias([state for state, _ in self.states], [mine for mine, _ in self.kept])

    @invariant()
    def one_trace_serves_all_states(self) -> None:
        assert self.captured.stats.traces <= 1, f"more than one trace: {self.captured!r}"


def _dense(call: Any) -> Any:
    return pytree.map(lambda leaf: leaf.contiguous() if isinstance(leaf, Tensor) else leaf, call)


def _all_leaves(state: Any, *inputs: Any) -> Any:
    """Return all leaves unchanged; the result must not be the state's memory."""
    return {"state": pytree.leaves(state), "inputs": inputs}
