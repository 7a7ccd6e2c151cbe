"""A compiled step has zeros of the sign that eager has: what divides by them, or asks for the sign, tells."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

import functional_cg as fcg
from functional_cg.stages.fx_passes.signs import keep_signs
from functional_cg.testing import assert_trees_all_equal
from tests.compiled_graphs import compiled_in_turn
from tests.test_core_graph import cored

aten = torch.ops.aten


def negated(state: Any, x: Tensor) -> Any:
    return {"a": -x}, {"by": 1 / -state["a"], "half": 1 / -x.half(), "twice": 1 / torch.neg(-x)}


def asked(state: Any, x: Tensor) -> Any:
    turned = -(x * state["a"])
    return {"a": torch.copysign(x, turned)}, {
        "side": torch.atan2(turned, x * 0 - 1).sign(),
        "is": turned.signbit(),
    }


def differentiated(state: Any, x: Tensor) -> Any:
    """The gradient of a difference is a negative one."""
    grad = fcg.grad(lambda a: ((x - a) * x.abs()).sum())(state["a"])
    return {"a": grad}, {"by": 1 / grad}


@pytest.mark.kernels
@compiled_in_turn("step", [(negated,), (asked,), (differentiated,)])
def test_zeros_have_the_sign_of_eager(compiled_on: str, step: Any) -> None:
    start = {"a": torch.zeros(12, device=compiled_on)}
    train_step, state, eager, zeros = fcg.graph_step(step, lowering="inductor"), fcg.place(start), start, 0
    for call in range(16):
        x = torch.randint(-3, 4, (12,), generator=torch.Generator().manual_seed(call))
        x = torch.where(x == 1, -0.0, x.float()).to(compiled_on)
        (state, metrics), (eager, expected) = train_step(state, x), step(eager, x)
        assert_trees_all_equal(metrics, expected)
        assert_trees_all_equal(fcg.snapshot(state), eager)
        zeros += int((eager["a"].eq(0) & eager["a"].signbit()).sum())
    assert zeros > 0


def test_negatives_of_floating_point_numbers_are_products() -> None:
    """On a CPU either has the sign: that it is a product, a GPU alone tells."""

    def targets(dtype: torch.dtype) -> set[Any]:
        made = fx.Graph()
        made.output((made.call_function(aten.neg.default, (made.placeholder("x"),)),))
        graph = cored(fx.GraphModule(torch.nn.Module(), made), torch.ones(4, dtype=dtype)).graph
        keep_signs(graph)
        return {node.target for node in graph.nodes if node.op == "call_function"}

    assert targets(torch.float32) == targets(torch.bfloat16) == {aten.mul.Tensor}
    assert targets(torch.int64) == targets(torch.complex64) == {aten.neg.default}
