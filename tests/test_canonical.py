"""Equal computations in another spelling become one: same values, and none of the work that the spelling costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import functional_cg as fcg
from functional_cg.stages.fx_passes.canonical import VIEWS, narrow_views, softmax_by_rows
from tests.compiled_graphs import assert_same_results, graph_of

aten = torch.ops.aten


def graph(loss: Any, weight: Tensor, batch: dict[str, Tensor], change: Any) -> Any:
    """The graph of a step with this loss after a change, which keeps every value."""

    def train_step(state: Any, batch: Any) -> Any:
        value, grads = fcg.value_and_grad(lambda p: loss(batch["x"] @ p["w"], batch["y"]))(state)
        return fcg.tree.map(lambda p, g: p - g, state, grads), {"loss": value}

    module, arguments = graph_of(train_step, fcg.place({"w": weight}), batch)
    assert_same_results(module, arguments, change, rtol=1e-6, atol=1e-6)
    return module.graph


def count(graph: Any, op: Any) -> int:
    return len(graph.find_nodes(op="call_function", target=op))


def data(*rows: int, classes: int = 7) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)
    x, y = torch.randn(*rows, 5), torch.randint(classes, rows)
    return torch.randn(5, classes), {"x": x, "y": y}


@pytest.mark.parametrize("dim", [-1, 2])
def test_log_softmax_takes_a_matrix(dim: int) -> None:
    def loss(logits: Tensor, y: Tensor) -> Tensor:
        logp = logits.log_softmax(dim).view(-1, 7)
        return torch.nn.functional.nll_loss(logp, y.flatten())

    made = graph(loss, *data(2, 3), softmax_by_rows)
    (call,) = made.find_nodes(op="call_function", target=aten._log_softmax.default)
    assert call.meta["spec"].shape == (6, 7)
    assert not any(user.target in VIEWS for user in call.users)


def test_log_softmax_over_another_dimension_is_left_alone() -> None:
    made = graph(lambda logits, y: logits.log_softmax(1).square().sum(), *data(2, 3), softmax_by_rows)
    (call,) = made.find_nodes(op="call_function", target=aten._log_softmax.default)
    assert call.meta["spec"].shape == (2, 3, 7)


def test_views_carry_the_narrower_dtype() -> None:
    def loss(logits: Tensor, y: Tensor) -> Tensor:
        wide = logits.bfloat16().float().view(3, 2, 7).view(-1, 7)
        return wide.square().sum()

    made = graph(loss, *data(2, 3), narrow_views)
    views = [node for node in made.nodes if node.target in VIEWS and "spec" in node.meta]
    assert {view.meta["spec"].dtype for view in views if view.meta["spec"].numel == 42} >= {torch.bfloat16}
    for view in views:
        assert (
            view.args[0].target is not aten._to_copy.default or view.meta["spec"].dtype is not torch.float32
        )
