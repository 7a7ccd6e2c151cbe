"""A result that the compiler could write into a slot is still what it was when the slot has its next value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import functional_cg as fcg
from functional_cg.stages.in_place import keep_slots
from functional_cg.testing import assert_trees_all_equal
from tests.sharding.programs import Setting, warm_up
from tests.sharding.ranks import on_ranks

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
PARTIAL = {
    "index_put": lambda w, b: w.index_put((b["i"],), b["v"]),
    "index_add": lambda w, b: w.index_add(0, b["i"], b["v"]),
    "index_fill": lambda w, b: w.index_fill(0, b["i"], 3.0),
    "index_copy": lambda w, b: w.index_copy(0, b["i"], b["v"]),
    "slice_scatter": lambda w, b: torch.slice_scatter(w, b["v"], 0, 0, 3),
    "select_scatter": lambda w, b: torch.select_scatter(w, b["v"][0], 0, 1),
    "diagonal_scatter": lambda w, b: torch.diagonal_scatter(w, b["v"][0, :2]),
    "twice": lambda w, b: w.index_put((b["i"],), b["v"]).index_put((b["i"] + 1,), b["v"] * 2),
    "a view of it": lambda w, b: w.index_put((b["i"],), b["v"]).t(),
    "of a copy": lambda w, b: written(w.clone(), b),
    "of a product with one": lambda w, b: written(w * 1, b),
    "by an op that writes": lambda w, b: tenfold(w.clone()),
}


@torch.library.custom_op("fcg_tests::tenfold_", mutates_args={"x"})
def tenfold_(x: Tensor) -> None:
    x.mul_(10)


def tenfold(copy: Tensor) -> Tensor:
    tenfold_(copy)
    return copy


def written(copy: Tensor, b: Any) -> Tensor:
    copy[b["i"]] = b["v"]
    return copy


def batch(call: int, device: str) -> dict[str, Tensor]:
    rows = torch.full((3, 2), float(call)) + torch.arange(2)
    return {"i": torch.tensor([0, 1, 3]).to(device), "v": rows.to(device)}


def assert_as_eager(train_step: Any, first: Any, device: str) -> None:
    """Sixteen calls, of which all metrics are kept."""
    state = fcg.place(fcg.tree.map(lambda leaf: leaf.to(device), first))
    twin, step = fcg.fork(state), fcg.graph_step(train_step, lowering="inductor")
    kept, expected = [], []
    for call in range(16):
        twin, wanted = step.eager(twin, batch(call, device))
        state, metrics = step(state, batch(call, device))
        kept.append(metrics)
        expected.append(wanted)
        assert_trees_all_equal((state, metrics), (twin, wanted), f"call {call}")
    assert_trees_all_equal(kept, expected, "kept metrics")
    assert step.stats.replays == 16


@pytest.mark.filterwarnings("ignore:.*torch._prims_common.check:FutureWarning")  # torch's own, of a diagonal
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", PARTIAL)
def test_a_metric_that_is_a_leaf_but_for_a_part(name: str, device: str) -> None:
    def train_step(state: Any, b: Any) -> Any:
        new = state["w"] + 1
        return {"w": new}, {"m": PARTIAL[name](state["w"], b)}

    assert_as_eager(train_step, {"w": torch.ones(5, 2)}, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("order", ["first", "last"])
def test_a_leaf_that_is_another_one_but_for_a_part(order: str, device: str) -> None:
    def train_step(state: Any, b: Any) -> Any:
        new = state["w"] + 1
        return {"w": new, "x": state["w"].index_put((b["i"],), b["v"])}, {}

    leaves = {"w": torch.ones(5, 2), "x": torch.zeros(5, 2)}
    assert_as_eager(train_step, leaves if order == "first" else dict(reversed(leaves.items())), device)


@pytest.mark.parametrize("device", DEVICES)
def test_what_becomes_its_own_slot_and_is_a_metric_too(device: str) -> None:
    def train_step(state: Any, b: Any) -> Any:
        new = state["w"].index_put((b["i"],), b["v"])
        return {"w": new}, {"m": new, "sum": new.sum(), "old": state["w"][0]}

    assert_as_eager(train_step, {"w": torch.ones(5, 2)}, device)


class Counting(fcg.TrainState):
    count: Any


def summed(state: Any, b: Any) -> Any:
    grads = fcg.tree.map(torch.ones_like, state.params)
    doubled = state.count * 2
    return state.apply_gradients(grads, count=doubled), {"m": fcg.sharding.sum(state.count)}


def sums_on_ranks() -> list[float]:
    """What was kept of a sum over ranks, of a leaf that each call doubles."""
    warm_up()
    zero = Setting({"data": 2}, 1).zero("cpu")
    given = {"params": torch.ones(8), "optimizer": fcg.optim.sgd(0.1), "sharding": zero}
    state, step, kept = (
        Counting.create(**given, count=torch.ones(5)),
        fcg.graph_step(summed, lowering="inductor"),
        [],
    )
    for call in range(4):
        state, metrics = step(state, batch(call, "cpu"))
        kept.append(metrics["m"])
    return [float(metric[0]) for metric in kept]


def test_a_sum_over_ranks_that_is_kept() -> None:
    assert on_ranks(2, sums_on_ranks, device="cpu", timeout=240.0) == [[2.0, 4.0, 8.0, 16.0]] * 2


def traced(function: Any) -> torch.fx.Graph:
    """As the compiler sees it: arguments are written at the end."""
    values = (torch.ones(5, 2), torch.tensor([0, 1, 3]), torch.zeros(3, 2))
    return torch.fx.experimental.proxy_tensor.make_fx(function)(*values).graph


def test_a_buffer_that_is_written_in_place_is_not_copied() -> None:
    """As a replay buffer is, by one or by two calls: a copy of it at each call is what nobody wants to pay."""

    def function(w: Tensor, i: Tensor, v: Tensor) -> Tensor:
        new = w.index_put((i,), v).index_put((i + 1,), v)
        found = new.sum()
        w.copy_(new)
        return found

    graph = traced(function)
    before = str(graph)
    keep_slots(graph)
    assert str(graph) == before


def test_a_result_that_outlives_its_slot_gets_a_copy() -> None:
    def function(w: Tensor, i: Tensor, v: Tensor) -> Tensor:
        new = w + 1
        part = w.index_put((i,), v)
        w.copy_(new)
        return part.t()

    graph = traced(function)
    keep_slots(graph)
    (put,) = graph.find_nodes(op="call_function", target=torch.ops.aten.index_put.default)
    assert put.args[0].target is torch.ops.aten.clone.default
