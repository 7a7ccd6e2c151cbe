"""Conjugated views: the copy that resolves them stays, for kernels that cannot read such views."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import functional_cg as fcg
from functional_cg.testing import assert_trees_all_equal


def loss_fn(params: Any, x: Tensor) -> Tensor:
    a, b = torch.view_as_complex(params["a"]), torch.view_as_complex(params["b"])
    return ((a * b.conj()).real * x).sum()


def test_a_product_with_a_conjugate_has_its_gradients_in_a_replay() -> None:
    def train_step(state: Any, x: Tensor) -> Any:
        value, grads = fcg.value_and_grad(loss_fn)(state, x)
        return fcg.tree.map(lambda p, g: p - 0.1 * g, state, grads), {"loss": value}

    eager = fcg.place({"a": torch.randn(5, 3, 2), "b": torch.randn(5, 3, 2)})
    captured, x = fcg.fork(eager), torch.randn(5, 3)
    step = fcg.graph_step(train_step, lowering="aten")
    assert_trees_all_equal(step(captured, x), step.eager(eager, x), "state and metrics")


def test_a_solution_that_a_kernel_returns_as_its_conjugate() -> None:
    """Of a system with one unknown; the trace knows nothing of that bit."""

    def step(state: Any, b: Tensor) -> Any:
        factors, pivots = torch.linalg.lu_factor(torch.view_as_complex(state["a"]))

        def norm(b: Any) -> Tensor:
            solved = torch.linalg.lu_solve(
                factors, pivots, torch.view_as_complex(b), left=False, adjoint=True
            )
            return torch.view_as_real(solved.resolve_conj()).square().sum()

        value, grad = fcg.value_and_grad(norm)(b)
        return {"a": state["a"] + 1}, {"value": value, "grad": grad}

    captured = fcg.graph_step(step, lowering="aten")
    eager = fcg.fork(state := fcg.place({"a": torch.ones(1, 1, 2)}))
    for _ in range(3):
        b = torch.randn(1, 1, 2)
        eager, expected = captured.eager(eager, b)
        state, metrics = captured(state, b)
        assert_trees_all_equal((state, metrics), (eager, expected))


@pytest.mark.parametrize(
    "copy", [torch.clone, lambda x: torch.where(x.real[0] > 0, x, x)], ids=["clone", "where"]
)
def test_a_copy_that_nobody_needs_does_not_take_the_one_that_resolves_with_it(copy: Any) -> None:
    """The first copy is dropped; the view of it is one of the slot then, and still has to be resolved."""

    def step(state: Any, x: Tensor) -> Any:
        conjugate = copy(state["z"]).conj().resolve_conj()
        negative = torch._neg_view(copy(state["w"])).resolve_neg()
        metrics = {"sums": torch.view_as_real(conjugate).sum(0), "bits": negative.view(torch.int32).sum()}
        return {"z": state["z"] * x, "w": state["w"] + 1}, metrics

    captured = fcg.graph_step(step, lowering="aten")
    state = fcg.place({"z": torch.tensor([1 + 2j, 3j]), "w": torch.arange(3.0)})
    eager = fcg.fork(state)
    for call in range(4):
        state, metrics = captured(state, torch.tensor(call + 0.5))
        eager, expected = captured.eager(eager, torch.tensor(call + 0.5))
        assert_trees_all_equal((state, metrics), (eager, expected), f"call {call}")
