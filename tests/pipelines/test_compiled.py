"""Stages are compiled once: parts of a program that run several times share a function, in the order of the trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import functional_cg as fcg
from functional_cg.stages.lower.regions import RegionsPlan
from functional_cg.testing import assert_trees_all_equal
from tests.pipelines.programs import ONE, Run, made, rows
from tests.shares import share

CALLS = 2


def as_it_is(graph: Any, arguments: Any) -> Any:
    """A compiler that runs the graph that it gets."""
    del arguments
    return graph


def run(program: Run, lowering: Any) -> tuple[Any, Any, Any]:
    pipe, state, function = made(program, ONE)
    step, kept = fcg.graph_step(function, lowering=lowering), []
    for call in range(CALLS):
        state, metrics = step(state, rows(call, pipe.mesh.rank))
        kept.append(metrics)
    return kept, dict(fcg.state_dict(state)), step.lower(state, rows(0, 0)).plan


@pytest.mark.parametrize("features", share([("tied", "dropout", "clip"), ("skip", "aux", "accumulate")], 2))
def test_a_stage_is_compiled_once_whatever_the_number_of_micro_batches(features: tuple[str, ...]) -> None:
    counts = set[int]()
    for microbatches in (2, 4):
        program = Run("1f1b", features, cuts=(2,), microbatches=microbatches)
        metrics, state, plan = run(program, as_it_is)
        expected = run(program, "aten")
        assert_trees_all_equal((metrics, state), expected[:2])
        assert isinstance(plan, RegionsPlan)
        counts.add(plan.functions)
    assert len(counts) == 1
    assert counts.pop() <= 6  # forward, backward and weights of two stages


def test_what_a_stage_keeps_for_its_backward_may_be_views() -> None:
    """Of its input, of a parameter, and of what it computes."""
    pipe = made(Run("1f1b", (), cuts=(2,)), ONE)[0]

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        h = pipe.cut((x @ params["w"].T).transpose(0, 1))
        first, second = h.chunk(2)
        return (
            (first.exp() * second.unsqueeze(0)[0] @ params["v"].expand(3, 2).T.sum(1).diag()).square().mean()
        )

    def grads(params: Any, x: Tensor) -> Any:
        return pipe.value_and_grad(lambda p, b: loss_fn(p, b))(params, x)

    params = {"w": torch.arange(12.0).reshape(4, 3) / 10, "v": torch.ones(2)}
    x = torch.arange(24.0).reshape(8, 3) / 10
    assert_trees_all_equal(*(fcg.graph_fn(grads, lowering=how)(params, x) for how in (as_it_is, "aten")))
