"""Compiled steps in branches: what they say of themselves, and their bits on simulated lanes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import functional_cg as fcg
from functional_cg.options import Options
from functional_cg.stages.lower.compiled import lower
from functional_cg.stages.plan import Buffers, faster
from functional_cg.testing import Simulator, assert_replay_equals_eager, assert_trees_all_equal
from tests.branched import branched, inputs, schedules
from tests.shares import thorough


def two_networks(state: Any, x: Tensor) -> Any:
    a, b = (x @ state["a"]).tanh() @ state["a"], (x @ state["b"]).tanh() @ state["b"]
    return {"a": state["a"] - a.mT @ a, "b": state["b"] - b.mT @ b}, {"a": a.sum(), "b": b.sum()}


def chain(state: Any, x: Tensor) -> Any:
    return {"a": x @ state["a"] @ state["a"], "b": state["b"]}, {}


def words(fn: Any, **options: Any) -> str:
    """What a step says on a GPU, before it is compiled."""
    state = {"a": torch.zeros(4, 4), "b": torch.zeros(4, 4)}
    lowered = fcg.graph_step(fn, lowering="aten").lower(state, torch.zeros(4, 4))
    plan = lower(lowered.program, torch.device("cuda"), Options(**options), lowered.reference)
    return plan.branches


@pytest.mark.kernels
def test_what_a_compiled_step_says_of_its_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    assert words(two_networks, branches=1) == ""
    assert words(two_networks, compile_once=True) == ""
    assert words(two_networks) == "branches: told once it is compiled"
    assert words(two_networks, branches=4) == "branches: told once it is compiled"
    assert words(two_networks, branches="auto") == "branches: told once it is compiled"
    assert words(chain, branches="auto") == "branches: none, since they would gain less than they cost"
    assert words(chain, branches=4) == "branches: none, each call needs the one before"
    monkeypatch.setattr("functional_cg.stages.lower.compiled.SMALL", 32)
    large = words(two_networks, branches=4)
    assert large == "branches: none, its values are so large that each kernel fills the device"
    assert words(two_networks, lowering="aten") == large
    assert words(two_networks, lowering="aten", branches=2).startswith(
        "branches: 13 units of work on 2 lanes"
    )


@thorough
def test_the_simulator_has_no_lanes_for_a_compiled_step_in_one_line() -> None:
    step = fcg.graph_step(chain, lowering="inductor", branches=2, backend=Simulator(), certify=False)
    with pytest.raises(TypeError, match=r'records ATen calls; it needs `lowering="aten"` .*the one before'):
        step({"a": torch.zeros(4, 4), "b": torch.zeros(4, 4)}, torch.ones(4, 4))


def networks(state: Any, x: Tensor) -> Any:
    """Three networks of whole numbers that read each other; products stand between the kernels that are fused."""
    names = ("a", "b", "c")
    out = {}
    for name, other in zip(names, ("b", "c", "a"), strict=True):
        hidden = ((x @ state[name]).relu() + 1).clamp(-8, 8)
        out[name] = ((hidden @ state[other]).clamp(-8, 8) @ state[name].mT).clamp(-8, 8)
    new = {name: (state[name] + out[name].mT @ (x - state["n"])).clamp(-8, 8) for name in names}
    return {**new, "n": state["n"] + 1}, {"a": out["a"], "sum": sum(value.sum() for value in out.values())}


@thorough
@pytest.mark.parametrize("number", range(12))
def test_compiled_networks_on_simulated_lanes(number: int) -> None:
    start = {"a": torch.eye(8), "b": torch.ones(8, 8), "c": -torch.eye(8), "n": torch.tensor(1)}
    with schedules(number):
        step = fcg.graph_step(networks, lowering="inductor", branches=2 + number % 5, backend=Simulator())
        assert_replay_equals_eager(step, start, inputs(torch.zeros(8, 8), 9, number))
        assert "units of work on" in step.explain(), step.explain()


@pytest.mark.kernels
@pytest.mark.parametrize("on_lanes", [0.9, 0.98])
@pytest.mark.parametrize("lowering", ["aten", "inductor"])
def test_lanes_stay_if_they_are_measured_to_be_faster(lowering: str, on_lanes: float) -> None:
    """A plan for one line is made of the same program, and computes the same."""
    state = {"a": torch.eye(8), "b": torch.ones(8, 8), "c": -torch.eye(8), "n": torch.tensor(1)}
    (x,) = inputs(torch.zeros(8, 8), 1)
    new, metrics = networks(state, x)
    with schedules(2):
        plan = branched(networks, lowering=lowering).lower(fcg.fork(fcg.place(state)), x).plan

        def computed(plan: Any) -> list[Tensor]:
            buffers = Buffers([value.clone() for value in fcg.tree.leaves(state)], [x], [])
            return [*plan.bind(buffers)(()), *buffers.slots]

        results = [computed(plan), computed(line := plan.in_line())]
    expected = [*fcg.tree.leaves(metrics), *fcg.tree.leaves(new)]
    assert_trees_all_equal(results, [expected, expected])
    found, wide = faster(plan, on_lanes, line, 1.0), on_lanes == 0.9
    assert found is (plan if wide else line)
    assert f"measured {on_lanes:.3f} ms on 3 lanes, 1.000 ms in one line" in found.branches
    assert ("units of work on" in found.branches) == (found.temporaries > 0) == wide


def residual(state: Any, x: Tensor) -> Any:
    """A chain of gradients that are added up, each read by the gradient of a weight, too."""

    def loss_fn(params: Any) -> Tensor:
        hidden = x
        for _ in range(3):
            hidden = hidden + (hidden @ params["a"]).tanh() @ params["b"]
        return hidden.square().sum()

    grads = fcg.grad(loss_fn)(state)
    return fcg.tree.map(lambda leaf, grad: leaf - 0.1 * grad, state, grads), {}


@pytest.mark.kernels
def test_a_compiled_chain_waits_for_no_gradient_of_a_weight() -> None:
    """No launch writes a value over what another one made, and may still read."""
    step = fcg.graph_step(residual, lowering="inductor", branches=2, backend=Simulator(), certify=False)
    state = {"a": torch.eye(4) / 8, "b": torch.eye(4) / 8}
    captured = step.lower(fcg.place(state), torch.ones(4, 4)).capture()
    units = captured.lowered.plan.timeline.units
    made = {memory for unit in units for memory in unit.made}
    assert sum("mm" in unit.name for unit in units) > 15
    assert not [unit.name for unit in units if made & unit.writes - unit.made.keys()]
