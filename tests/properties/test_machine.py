"""A rule-based machine: whatever a user does between two calls, the state is what the pure functions made of it.

The model of a state is a plain tree to which the Python functions are applied; the machine holds handles, donated
handles and old leaves, and metrics that it kept, and mixes steps, eager steps, evaluation, writes, forks, mistakes and
collected garbage.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import functional_cg as fcg
from functional_cg import tree
from functional_cg.testing import Simulator, assert_no_alias, assert_trees_all_equal

MOST_STATES = 4


def batch(n: int) -> torch.Tensor:
    return torch.linspace(-1, 1, 6).reshape(2, 3) * (n - 3)


def train(state: Any, x: torch.Tensor) -> Any:
    key = fcg.random.fold_in(state.key, state.step)
    loss, grads = fcg.value_and_grad(
        lambda p: torch.tanh(fcg.random.dropout(key, x @ p["w"], 0.3) + p["b"]).square().mean()
    )(state.params)
    ema = tree.map(lambda e, p: e.lerp(p, 0.5), state.buffers["ema"], state.params)
    return state.apply_gradients(grads, buffers={**state.buffers, "ema": ema}), {
        "loss": loss,
        "x": x[0],
        "w": state.params["w"],
    }


def swap(state: Any) -> Any:
    """Returns every kind of leaf that is not computed: swapped, passed through, twice."""
    pair = state.buffers["pair"]
    ema = {"b": state.params["b"], "w": state.buffers["ema"]["w"]}
    return state.replace(buffers={"ema": ema, "pair": pair[::-1]}), {"pair": pair}


def evaluate(state: Any, x: torch.Tensor) -> Any:
    return {"out": x @ state.params["w"], "b": state.params["b"], "step": state.step}


def plain(tree_: Any) -> Any:
    """Own copies; the model applies the Python functions to them."""
    return tree.map(torch.clone, fcg.snapshot(tree_))


numbers = st.integers(0, 7)


class Machine(RuleBasedStateMachine):
    """Handles beside the trees that they should show."""

    backend: Any = "auto"

    def __init__(self) -> None:
        super().__init__()
        backend = self.backend() if callable(self.backend) else self.backend
        self.simulator = backend if isinstance(backend, Simulator) else None
        self.train = fcg.graph_step(train, backend=backend)
        self.swap = fcg.graph_step(swap, backend=backend)
        self.evaluate = fcg.graph_fn(evaluate, backend=backend)
        self.states: list[tuple[Any, Any]] = []  # (handle, model)
        self.old: list[Any] = []  # donated handles, and leaves of them
        self.kept: list[tuple[Any, Any]] = []  # (what a call returned, its copy)
        self.saved: list[Any] = []

    @initialize(seed=numbers)
    def create(self, seed: int) -> None:
        """Start with one state."""
        state = fcg.TrainState.create(
            params={"w": torch.linspace(-1, 1, 6).reshape(3, 2), "b": torch.zeros(2)},
            optimizer=fcg.optim.adamw(0.05, weight_decay=0.01),
            key=fcg.random.key(seed),
            buffers={
                "ema": {"w": torch.zeros(3, 2), "b": torch.zeros(2)},
                "pair": (torch.zeros(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)),
            },
        )
        self.states.append((state, plain(state)))

    def advance(self, index: int, new: Any, model: Any) -> None:
        """Note that a state was donated, with two leaves taken from it before."""
        handle, _ = self.states[index % len(self.states)]
        self.old.append(handle)
        self.states[index % len(self.states)] = (new, model)

    def keep(self, got: Any, expected: Any) -> None:
        assert_trees_all_equal(got, expected, "metrics")
        self.kept.append((got, plain(got)))

    def call(self, step: Any, function: Any, index: int, *inputs: Any) -> None:
        state, model = self.states[index % len(self.states)]
        self.old.append(state.params["w"])
        self.old.append(state.params["b"][:1])
        with torch.no_grad():
            expected, wanted = function(model, *inputs)
            expected, wanted = plain(expected), plain(wanted)
        state, metrics = step(state, *inputs)
        self.advance(index, state, expected)
        self.keep(metrics, wanted)

    # -- what users do --------------------------------------------------------------------------------------------

    @rule(index=numbers, n=numbers, overwrite=st.booleans())
    def step(self, index: int, n: int, overwrite: bool) -> None:
        """Train; the input is overwritten as soon as the call returns, or kept: nobody else may write it."""
        x = batch(n)
        self.call(self.train, train, index, x)
        if overwrite:
            x.fill_(torch.nan)
        else:
            self.kept.append((x, batch(n)))

    @rule(index=numbers, n=numbers)
    def eager_step(self, index: int, n: int) -> None:
        self.call(self.train.eager, train, index, batch(n))

    @rule(index=numbers)
    def swap_leaves(self, index: int) -> None:
        """Another step on the same arena."""
        self.call(self.swap, swap, index)

    @rule(index=numbers, n=numbers)
    def evaluate_between(self, index: int, n: int) -> None:
        state, model = self.states[index % len(self.states)]
        generation = state.generation
        self.keep(self.evaluate(state, batch(n)), evaluate(model, batch(n)))
        assert state.generation == generation

    @rule(index=numbers, n=numbers)
    def write_a_leaf(self, index: int, n: int) -> None:
        state, model = self.states[index % len(self.states)]
        value = torch.full((2,), float(n))
        new = fcg.tree.at(lambda s: s.params["b"], state, value)
        model = fcg.tree.at(lambda s: s.params["b"], model, value.clone())
        value.fill_(torch.nan)
        self.advance(index, new, model)

    @precondition(lambda self: len(self.states) < MOST_STATES)
    @rule(index=numbers)
    def fork(self, index: int) -> None:
        state, model = self.states[index % len(self.states)]
        self.states.append((fcg.fork(state), plain(model)))

    @precondition(lambda self: len(self.states) < MOST_STATES)
    @rule(index=numbers, n=numbers)
    def step_on_a_plain_tree(self, index: int, n: int) -> None:
        """It is placed by copy, perhaps in an arena whose last handle is gone; the tree stays the caller's."""
        _, model = self.states[index % len(self.states)]
        mine = plain(model)
        with torch.no_grad():
            expected, wanted = train(model, batch(n))
        state, metrics = self.train(mine, batch(n))
        assert_trees_all_equal(mine, model, "plain tree")
        tree.map(torch.Tensor.zero_, mine)
        self.states.append((state, plain(expected)))
        self.keep(metrics, wanted)

    @rule(index=numbers)
    def save(self, index: int) -> None:
        state, _ = self.states[index % len(self.states)]
        self.saved.append(fcg.snapshot(state))

    @precondition(lambda self: self.saved)
    @rule(index=numbers, which=numbers)
    def restore(self, index: int, which: int) -> None:
        """Write a snapshot back into the same slots."""
        state, _ = self.states[index % len(self.states)]
        saved = self.saved[which % len(self.saved)]
        fields = ("step", "params", "opt_state", "buffers", "key")
        new = state.replace(**{name: getattr(saved, name) for name in fields})
        self.advance(index, new, plain(saved))

    @precondition(lambda self: len(self.states) > 1)
    @rule(index=numbers)
    def drop(self, index: int) -> None:
        """Let go of a state and of everything that was taken from it."""
        del self.states[index % len(self.states)]
        self.old.clear()
        gc.collect()

    # -- mistakes -------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.old)
    @rule(which=numbers)
    def use_what_was_donated(self, which: int) -> None:
        stale = self.old[-1 - which % len(self.old)]  # the latest first
        with pytest.raises(fcg.DonatedStateError, match="donated"):
            _ = stale + 0 if isinstance(stale, torch.Tensor) else self.train(stale, batch(0))

    @rule(
        index=numbers,
        bad=st.sampled_from([torch.ones(1, 3), torch.ones(2, 3).double(), torch.ones(3), [1.0, 2.0], None]),
    )
    def pass_another_layout(self, index: int, bad: Any) -> None:
        state, _ = self.states[index % len(self.states)]
        if self.train.stats.traces:  # the first call sets the layout
            with pytest.raises(fcg.LayoutError, match="x"):
                self.train(state, bad)

    @rule(index=numbers)
    def write_into_a_leaf(self, index: int) -> None:
        state, _ = self.states[index % len(self.states)]
        with pytest.raises(fcg.ReadOnlyError, match="read-only"):
            state.params["w"].zero_()

    # -- what holds after each rule -------------------------------------------------------------------------------

    @invariant()
    def states_are_what_the_functions_made(self) -> None:
        if self.simulator is not None:
            self.simulator.poison()
        for state, model in self.states:
            assert_trees_all_equal(state, model, "state")

    @invariant()
    def what_was_kept_never_changes(self) -> None:
        for mine, copy in self.kept:
            assert_trees_all_equal(mine, copy, "kept")

    def teardown(self) -> None:
        """One trace however many states; nothing that was kept shares memory."""
        assert self.train.stats.traces <= 1
        assert_no_alias([state for state, _ in self.states], [mine for mine, _ in self.kept])


class SimulatorMachine(Machine):
    backend = Simulator


LIMITS = settings(stateful_step_count=25, suppress_health_check=[HealthCheck.too_slow])

TestMachine = Machine.TestCase
TestMachine.settings = LIMITS
TestSimulatorMachine = SimulatorMachine.TestCase
TestSimulatorMachine.settings = LIMITS
