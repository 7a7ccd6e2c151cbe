"""Equal computations in another spelling become one: same values, and none of the work that the spelling costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import functional_cg as fcg
from functional_cg import optim
from functional_cg.stages.fx_passes.canonical import (
    CAST,
    VIEWS,
    narrow_views,
    pick_by_comparison,
)
from functional_cg.stages.fx_passes.cross_entropy import suit
from functional_cg.testing import assert_replay_equals_eager
from tests.compiled_graphs import assert_same_results, compiled_once, graph_of

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


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.booleans())
def test_a_gather_of_one_for_each_row_needs_no_scatter(rows: list[int], negative: bool) -> None:
    """Whatever the shape, and whichever end its dimension is counted from."""

    def loss(logits: Tensor, y: Tensor) -> Tensor:
        dim = -1 if negative else logits.ndim - 1
        picked = logits.gather(dim, y.unsqueeze(dim)).squeeze(dim)
        return (logits.logsumexp(dim) - picked).mean()

    assert count(graph(loss, *data(*rows), pick_by_comparison), aten.scatter_add.default) == 0


def test_a_gather_along_the_first_dimension_needs_none_either() -> None:
    def loss(logits: Tensor, y: Tensor) -> Tensor:
        return logits.gather(0, (y[:1] % 3).unsqueeze(0).expand(1, 7)).square().sum()

    assert count(graph(loss, *data(3), pick_by_comparison), aten.scatter_add.default) == 0


def test_several_picks_of_a_row_are_added_up() -> None:
    """An index may come twice: one comparison is not enough."""

    def loss(logits: Tensor, y: Tensor) -> Tensor:
        return logits.gather(1, torch.stack([y, y], 1)).square().sum()

    assert count(graph(loss, *data(4), pick_by_comparison), aten.scatter_add.default) == 1


def test_a_scatter_whose_index_nobody_checks_is_left_alone() -> None:
    """A comparison would not notice an index that is out of range."""

    def loss(logits: Tensor, y: Tensor) -> Tensor:
        spread = torch.zeros_like(logits).scatter_add(1, y.unsqueeze(1), logits[:, :1].detach())
        return (spread * logits).sum()

    assert count(graph(loss, *data(4), pick_by_comparison), aten.scatter_add.default) == 1


def test_a_gather_among_more_classes_checks_too_little() -> None:
    def loss(logits: Tensor, y: Tensor) -> Tensor:
        index = y.unsqueeze(1) % 2
        spread = torch.zeros(len(logits), 3).scatter_add(1, index, logits.gather(1, index).detach())
        return (spread * logits[:, :3]).sum()

    assert count(graph(loss, *data(4), pick_by_comparison), aten.scatter_add.default) == 1


@pytest.mark.parametrize("change", [narrow_views, suit])
def test_views_carry_the_narrower_dtype(change: Any) -> None:
    """In every graph for a GPU, whether or not it has a large loss."""

    def loss(logits: Tensor, y: Tensor) -> Tensor:
        wide = logits.bfloat16().float().view(3, 2, 7).view(-1, 7)
        return wide.square().sum()

    made = graph(loss, *data(2, 3), change)
    views = [node for node in made.nodes if node.target in VIEWS and "spec" in node.meta]
    assert {view.meta["spec"].dtype for view in views if view.meta["spec"].numel == 42} >= {torch.bfloat16}
    for view in views:
        assert (
            view.args[0].target is not aten._to_copy.default or view.meta["spec"].dtype is not torch.float32
        )


@compiled_once
def test_a_window_into_a_flat_state_is_left_alone(compiled_on: str) -> None:
    """Of its leaves, which are parts of one vector, nothing is told in the graph."""

    def train_step(state: Any, x: Tensor) -> Any:
        def loss_fn(params: Any) -> Tensor:
            return (x @ params["w"].view(7, 5).bfloat16().float().t()).square().mean() + params["b"].sum()

        loss, grads = fcg.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads), {"loss": loss}

    optimizer = optim.flatten(optim.sgd(0.125, momentum=0.5))
    params = {"w": torch.randn(5, 7, device=compiled_on), "b": torch.zeros(3, device=compiled_on)}
    state = fcg.TrainState.create(params=params, optimizer=optimizer)
    step = fcg.graph_step(train_step, lowering="inductor")
    assert_replay_equals_eager(step, state, [*torch.randn(3, 4, 5, device=compiled_on)], rtol=1e-5, atol=1e-6)


def test_a_number_that_is_cast_is_left_alone() -> None:
    """The batching rules of a sweep cast numbers that are added to a value of each member."""

    def train_step(state: Any, batch: Any) -> Any:
        loss, grads = fcg.value_and_grad(lambda w: 1 + (batch["x"] @ w).square().mean())(state)
        return state - grads, {"loss": loss}

    weight, batch = data(3)
    module, arguments = graph_of(fcg.sweep(train_step), fcg.place(torch.stack([weight, -weight])), batch)
    casts = module.graph.find_nodes(op="call_function", target=CAST)
    assert not all(isinstance(node.args[0], torch.fx.Node) for node in casts)
    assert_same_results(module, arguments, narrow_views, rtol=1e-6, atol=1e-6)


def test_zeros_that_are_overwritten_are_no_zeros() -> None:
    def train_step(state: Any, b: Any) -> Any:
        zeros = torch.zeros(4, 6)
        zeros[0].fill_(5)
        spread = zeros.scatter_add(1, b["i"], b["x"].gather(1, b["i"]))
        return {"w": state["w"] * 1}, {"spread": spread, "number": b["x"].sum().gather(0, b["i"][0, 0])}

    batch = {"x": torch.randn(4, 6), "i": torch.zeros(4, 1, dtype=torch.long)}
    module, arguments = graph_of(train_step, fcg.place({"w": torch.ones(2)}), batch)
    assert_same_results(module, arguments, pick_by_comparison, rtol=0, atol=0)
