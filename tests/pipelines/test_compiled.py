"""Stages are compiled once: parts of a program that run several times share a function, in the order of the trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_cg as fcg
from functional_cg.stages.lower.regions import RegionsPlan
from functional_cg.stages.trial.reference import Reference
from functional_cg.stages.trial.ulps import Shaker, stand_ins
from functional_cg.testing import assert_trees_all_equal
from tests.other_rounding import compile_wide
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


# -- the comparison with the traced calls before the first call commits ------------------------------------------------


def perturbed(microbatches: int, monkeypatch: pytest.MonkeyPatch) -> Sequence[int]:
    """How many calls of stages a comparison perturbs in each of its runs; it needs one for each of two steps."""
    counts, results = list[int](), Shaker.results

    def counted(shaker: Shaker, instr: Any, made: Any) -> None:
        counts[-1] += 1
        results(shaker, instr, made)

    def run(reference: Reference, buffers: Any, see: Any, shaker: Any = None) -> None:
        counts.extend([0] if shaker is not None else [])
        runs(reference, buffers, see, shaker)

    runs = Reference.run
    with monkeypatch.context() as patch:
        patch.setattr(Shaker, "results", counted)
        patch.setattr(Reference, "run", run)
        _, state, function = made(Run("1f1b", (), cuts=(2,), microbatches=microbatches), ONE)
        step = fcg.graph_step(function, lowering=compile_wide)
        step(state, rows(0, 0))
    assert "  certified: " in step.explain()
    return counts


def test_rounding_is_measured_once_for_each_call_of_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one micro-batch or another, in place of all: as many calls are perturbed, whatever the number of these."""
    (few, again), many = perturbed(2, monkeypatch), perturbed(4, monkeypatch)
    assert few == again > 0
    assert many == [few, few]


def test_each_call_of_a_stage_is_perturbed_on_one_micro_batch_in_place_of_all() -> None:
    _, state, function = made(Run("zbv", (), cuts=(1, 2, 3), microbatches=4), ONE)
    program = fcg.graph_step(function, lowering="aten").lower(state, rows(0, 0)).program
    every = stand_ins(program.instrs)
    assert {every[one] for one in program.instrs if one.region is None} == {0}
    chosen = {one: every[one] for one in program.instrs if one.region is not None}
    assert Counter(chosen.values()) == {4: len(chosen) // 4, 0: len(chosen) - len(chosen) // 4}
    of_calls = Counter((one.region[0], one.site, str(one.op)) for one in chosen if chosen[one])  # type: ignore[index]
    on_all = Counter((one.region[0], one.site, str(one.op)) for one in chosen)  # type: ignore[index]
    assert {name: 4 * count for name, count in of_calls.items()} == on_all
    numbers = {one.region[1] for one in chosen if chosen[one]}  # type: ignore[index]
    assert len(numbers) == 4, "no micro-batch is left out"
    found = Shaker(stands_for=chosen)
    assert {found.on(one) is None for one in chosen if not chosen[one]} == {True}
    ulps = {found.on(one).most for one in chosen if chosen[one]}  # type: ignore[union-attr]
    assert ulps == {2}, "their variance is four times that of one ulp"


class ErrsOnce:
    """A compiler whose first function, the forward of the first stage, errs on one of two micro-batches."""

    def __init__(self, microbatch: int) -> None:
        self.microbatch, self.functions, self.calls = microbatch, 0, 0

    def __call__(self, graph: Any, arguments: Any) -> Any:
        exact, self.functions = compile_wide(graph, arguments), self.functions + 1
        return exact if self.functions > 1 else lambda *args: self.called(exact, args)

    def called(self, exact: Any, args: Any) -> Any:
        self.calls += 1
        wrong = self.calls % 2 == self.microbatch
        return [one * 1.001 if wrong and one.is_floating_point() else one for one in exact(*args)]


@pytest.mark.parametrize("microbatch", share([1, 0], 2))
def test_a_mistake_on_any_micro_batch_is_refused(microbatch: int) -> None:
    _, state, function = made(Run("1f1b", (), cuts=(2,), microbatches=2), ONE)
    step, before = fcg.graph_step(function, lowering=ErrsOnce(microbatch)), fcg.snapshot(state)
    with pytest.raises(fcg.MiscompileError, match=r"computes something else; the state is unchanged"):
        step(state, rows(0, 0))
    assert_trees_all_equal(state, before)
