"""Stages are compiled once: parts of a program that run several times share a function, in the order of the trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain, repeat
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_cg as fcg
from functional_cg.stages.trial.judge import Judge
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
        assert len(plan.heads) > 1
        counts.add(len(plan.heads))
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


def compared(microbatches: int, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each function is compared with its calls before a first call commits."""
    counts, compare = Counter[str](), Judge.compare

    def counted(judge: Judge, *given: Any, times: float) -> Any:
        counts[judge._reference.program.function] += times == 1.0
        return compare(judge, *given, times=times)

    with monkeypatch.context() as patch:
        patch.setattr(Judge, "compare", counted)
        _, state, function = made(Run("1f1b", (), cuts=(2,), microbatches=microbatches), ONE)
        step = fcg.graph_step(function, lowering=compile_wide)
        step(state, rows(0, 0))
    assert "  certified: " in step.explain()
    return counts


def test_a_function_is_compared_as_often_whatever_the_number_of_micro_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the first micro-batch and on the last."""
    few, many = compared(2, monkeypatch), compared(6, monkeypatch)
    assert few == many
    assert {*few.values()} == {2}
    assert {name.partition(" of ")[0] for name in few} == {"forward", "backward", "weights"}


class ErrsOnce:
    """A compiler whose first function, the forward of the first stage, errs on one of its micro-batches."""

    def __init__(self, microbatch: int, microbatches: int) -> None:
        self.microbatch, self.microbatches, self.functions, self.calls = microbatch, microbatches, 0, 0

    def __call__(self, graph: Any, arguments: Any) -> Any:
        exact, self.functions = compile_wide(graph, arguments), self.functions + 1
        return exact if self.functions > 1 else lambda *args: self.called(exact, args)

    def called(self, exact: Any, args: Any) -> Any:
        self.calls += 1
        wrong = self.calls % self.microbatches == (self.microbatch + 1) % self.microbatches
        return [one * 1.001 if wrong and one.is_floating_point() else one for one in exact(*args)]


@pytest.mark.parametrize("microbatch", share([2, 0], 2))
def test_a_mistake_on_the_first_or_the_last_micro_batch_is_refused(microbatch: int) -> None:
    _, state, function = made(Run("1f1b", (), cuts=(2,), microbatches=3), ONE)
    step, before = fcg.graph_step(function, lowering=ErrsOnce(microbatch, 3)), fcg.snapshot(state)
    with pytest.raises(
        fcg.MiscompileError, match=r"something else; the state is unchanged(.|\n)*forward of stage 0  f32"
    ):
        step(state, rows(0, 0))
    assert_trees_all_equal(state, before)


@pytest.mark.parametrize(("rooms", "said"), [([None, 0], "certified: "), ([0], "not certified: by ")])
def test_one_call_of_a_function_will_do_where_memory_is_too_little(
    rooms: Sequence[int | None], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the first micro-batch, activations of few others are there; on the last, of many."""
    left = chain(rooms[:1], *([room] * 6 for room in rooms[:-1]), repeat(rooms[-1]))
    monkeypatch.setattr("functional_cg.stages.trial.space.free_room", lambda buffers: next(left))
    monkeypatch.setattr("functional_cg.stages.trial.space.free_host_memory", lambda: 0)
    _, state, function = made(Run("gpipe", (), cuts=(2,), microbatches=4), ONE)
    step = fcg.graph_step(function, lowering=compile_wide)
    step(state, rows(0, 0))
    assert any(line.strip().startswith(said) for line in step.explain().splitlines())
