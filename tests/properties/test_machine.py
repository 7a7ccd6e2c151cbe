"""``testing.stateful.machine`` on a step that uses every feature, and on broken steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

import functional_cg as fcg
from functional_cg import tree
from functional_cg.testing import Simulator, assert_trees_all_equal
from functional_cg.testing.stateful import GraphStepMachine, machine
from functional_cg.testing.strategies import like

LIMITS = settings(deadline=None, stateful_step_count=25, suppress_health_check=[HealthCheck.too_slow])
ONCE = settings(LIMITS, max_examples=200, derandomize=True, database=None, phases=[Phase.generate])
numbers = st.integers(0, 7)


def create(seed: int) -> Any:
    return fcg.TrainState.create(
        params={"w": torch.linspace(-1, 1, 6).reshape(3, 2), "b": torch.zeros(2)},
        optimizer=fcg.optim.adamw(0.05, weight_decay=0.01),
        key=fcg.random.key(seed),
        buffers={
            "ema": {"w": torch.zeros(3, 2), "b": torch.zeros(2)},
            "pair": (torch.zeros(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)),
        },
    )


@fcg.graph_step
def train(state: Any, x: torch.Tensor) -> Any:
    key = fcg.random.fold_in(state.key, state.step)
    loss, grads = fcg.value_and_grad(
        lambda p: torch.tanh(fcg.random.dropout(key, x @ p["w"], 0.3) + p["b"]).square().mean()
    )(state.params)
    ema = tree.map(lambda e, p: e.lerp(p, 0.5), state.buffers["ema"], state.params)
    metrics = {"loss": loss, "x": x[0], "w": state.params["w"]}
    return state.apply_gradients(grads, buffers={**state.buffers, "ema": ema}), metrics


@fcg.graph_step
def swap(state: Any) -> Any:
    """Returns every kind of leaf that is not computed: swapped, passed through, twice."""
    pair = state.buffers["pair"]
    ema = {"b": state.params["b"], "w": state.buffers["ema"]["w"]}
    return state.replace(buffers={"ema": ema, "pair": pair[::-1]}), {"pair": pair}


@fcg.graph_fn
def evaluate(state: Any, x: torch.Tensor) -> Any:
    return {"out": x @ state.params["w"], "b": state.params["b"], "step": state.step}


def two_steps(backend: Any) -> type[GraphStepMachine]:
    """The machine of ``train``, with a second step on the same states and a step on a plain tree."""
    base: Any = machine(
        train,
        state=st.builds(create, numbers),
        inputs=like(torch.zeros(2, 3)),
        evaluate=[evaluate],
        backend=backend,
    )

    class TwoSteps(base):
        def __init__(self) -> None:
            super().__init__()
            self.swap = swap.anew(**self.options)

        @rule(which=numbers)
        def swap_leaves(self, which: int) -> None:
            state, model = self.chosen(which)
            expected, wanted = swap.__wrapped__(model)
            new, metrics = self.swap(state)
            self.advance(which, new, fcg.snapshot(expected))
            self.keep(metrics, wanted)

        @precondition(lambda self: len(self.states) < 4)
        @rule(which=numbers, x=like(torch.zeros(2, 3)))
        def step_on_a_plain_tree(self, which: int, x: torch.Tensor) -> None:
            """It is placed by copy, perhaps in an arena whose last handle is gone; the tree stays the caller's."""
            _, model = self.chosen(which)
            mine = fcg.snapshot(model)
            with torch.no_grad():
                expected, wanted = train.__wrapped__(model, x)
            state, metrics = self.captured(mine, x)
            assert_trees_all_equal(mine, model, "plain tree")
            tree.map(torch.Tensor.zero_, mine)
            self.states.append((state, fcg.snapshot(expected)))
            self.keep(metrics, wanted)

    return TwoSteps


TestMachine = two_steps(None).TestCase
TestMachine.settings = LIMITS
TestSimulatorMachine = two_steps(Simulator).TestCase
TestSimulatorMachine.settings = LIMITS


def test_what_the_host_watch_cannot_see_is_found_by_its_effect(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()

    def step(state: Any, x: torch.Tensor) -> Any:
        return {"w": state["w"] + x * log.stat().st_size}, {}

    base: Any = machine(
        fcg.graph_step(step), state=st.just({"w": torch.zeros(2)}), inputs=like(torch.ones(2))
    )

    class Logs(base):
        @rule()
        def write_the_log(self) -> None:
            log.write_text(log.read_text() + "x")

    with pytest.raises(AssertionError, match=r"state\['w'\]"):
        run_state_machine_as_test(Logs, settings=ONCE)


def test_an_eager_run_in_disguise_is_found() -> None:
    step = fcg.graph_step(lambda s, x: ({"w": s["w"] + x}, {}), backend="eager")
    eager = machine(step, state=st.just({"w": torch.zeros(2)}), inputs=like(torch.ones(2)))
    with pytest.raises(AssertionError, match="it did not replay"):
        run_state_machine_as_test(eager, settings=ONCE)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"step": lambda s, x: (s, {})}, "`step` must be a graph_step, got function"),
        ({"state": {"w": torch.zeros(2)}}, "`state` must be a hypothesis strategy, got dict"),
        ({"inputs": torch.zeros(2)}, "`inputs` must be a hypothesis strategy, got Tensor"),
        ({"evaluate": [lambda s: s]}, "`evaluate` must hold graph_fns, got function"),
    ],
    ids=["step", "state", "inputs", "evaluate"],
)
def test_what_is_no_strategy_is_refused(arguments: dict[str, Any], said: str) -> None:
    good = {"step": train, "state": st.builds(create, numbers), "inputs": like(torch.zeros(2, 3))}
    with pytest.raises(TypeError, match=said):
        machine(**(good | arguments))
