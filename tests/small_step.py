"""A small step, its states and its inputs, for tests of the transform."""

from typing import Any

import torch

import functional_cg as fcg
from functional_cg.testing import assert_trees_all_equal


def a_state(scale: float = 1.0) -> Any:
    return fcg.place({"w": torch.arange(3.0) * scale, "n": torch.zeros((), dtype=torch.int64)})


def train(state: Any, batch: Any) -> Any:
    """A small step: every leaf changes."""
    w = state["w"] * 0.5 + batch["x"].sum(0)
    return {"w": w, "n": state["n"] + 1}, {"norm": w.norm(), "n": state["n"]}


def data(n: int) -> dict[str, torch.Tensor]:
    return {"x": torch.arange(6.0).reshape(2, 3) * (n + 1)}


def assert_runs_like_eager(step: Any, calls: int = 4) -> None:
    """Some calls of a step on fresh states, each compared with the eager run, bit for bit."""
    state, twin = a_state(), a_state()
    for n in range(calls):
        state, metrics = step(state, data(n))
        twin, expected = step.eager(twin, data(n))
        assert_trees_all_equal(fcg.snapshot(state), fcg.snapshot(twin))
        assert_trees_all_equal(metrics, expected)
