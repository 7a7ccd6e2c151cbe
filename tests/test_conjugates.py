"""Conjugated views: what resolves them is a copy that stays, for kernels that cannot read such a view."""

from __future__ import annotations

from typing import Any

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
