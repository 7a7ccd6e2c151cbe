"""An evaluation through a pipeline has the bits of one rank that runs all stages, in one graph per rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_cg as fcg
from functional_cg import optim, sharding
from functional_cg.shards.transfers import RECEIVE, SEND
from functional_cg.testing import Simulator, assert_trees_all_equal
from tests.pipelines.programs import CUTS, ONE, TWO, Run, loss_of, made, params, rows
from tests.sharding.law import on_gloo_and_nccl
from tests.sharding.ranks import on_ranks
from tests.shares import share, thorough

FEATURES = ("tied", "everywhere", "dropout", "skip", "aux", "adamw")


def evaluated(runs: Sequence[Run], axes: Mapping[str, int], device: str = "cpu") -> list[Any]:
    """For each run, what an evaluation returns between steps, alone in a ``graph_fn`` and beside a step's update."""
    out = []
    for run in runs:
        pipe, state, function = made(run, axes, device)
        loss_fn, options = loss_of(pipe.cut, run), {"lowering": "aten", **run.options}

        def evaluate(state: Any, batch: Any, pipe: Any = pipe, loss_fn: Any = loss_fn) -> Any:
            return pipe.value(loss_fn)(state.params, batch, key=state.key)

        def train_step(state: Any, batch: Any, function: Any = function, evaluate: Any = evaluate) -> Any:
            new, metrics = function(state, batch)
            return new, {**metrics, "before": evaluate(state, batch), "after": evaluate(new, batch)}

        step, graph, kept = fcg.graph_step(train_step, **options), fcg.graph_fn(evaluate, **options), []
        for call in range(4):
            batch, other = (
                {name: leaf.to(pipe.mesh.device) for name, leaf in rows(number, pipe.mesh.rank).items()}
                for number in (call, 100 + call)
            )
            state, metrics = step(state, batch)
            kept.append((metrics, graph(state, other), graph(state, batch)))
            assert_trees_all_equal(kept[-1][2], metrics["after"])
        assert (graph.stats.traces, graph.stats.captures, graph.stats.replays) == (1, 1, 8)
        assert (step.stats.traces, step.stats.captures, step.stats.replays) == (1, 1, 4)
        out.append(fcg.tree.map(Tensor.cpu, kept))
        graph.close()
        step.close()
    return out


def assert_as_on_one_rank(
    runs: Sequence[Run], ranks: int, axes: Mapping[str, int], device: str = "cpu"
) -> None:
    data, patience = ranks // axes["stage"], 60.0 + 10.0 * len(runs)
    alone = (
        [evaluated(runs, ONE, device)]
        if data == 1
        else on_ranks(data, evaluated, runs, ONE, timeout=patience)
    )
    for rank, found in enumerate(
        on_ranks(ranks, evaluated, runs, axes, device, device=device, timeout=patience)
    ):
        assert_trees_all_equal(found, alone[rank % data], f"rank {rank}")


@on_gloo_and_nccl
@pytest.mark.parametrize("schedule", share([*reversed(CUTS)], len(CUTS)))
def test_each_schedule_on_two_ranks(schedule: str, device: str) -> None:
    assert_as_on_one_rank([Run(schedule, FEATURES)], 2, TWO, device)


@thorough
def test_zero_beside_stages() -> None:
    assert_as_on_one_rank([Run("1f1b", FEATURES, stage=3)], 4, TWO)


def simulated(run: Run, axes: Mapping[str, int]) -> Any:
    return evaluated([replace(run, options={"backend": Simulator()})], axes)


@pytest.mark.parametrize("schedule", share(["1f1b", "zbv"], 2))
def test_nothing_is_read_before_it_arrives_or_after_its_memory_is_free(schedule: str) -> None:
    """A simulated replay poisons its pool, which the step and the evaluation share."""
    run = Run(schedule, FEATURES)
    alone = evaluated([run], ONE)
    for found in on_ranks(2, simulated, run, TWO, timeout=90.0):
        assert_trees_all_equal(found, alone)


def test_compiled_stages_compute_an_evaluation() -> None:
    """Each of them once, whatever the number of micro-batches: as the graphs that a compiler gets, to the bit."""

    def as_it_is(graph: Any, arguments: Any) -> Any:
        del arguments
        return graph

    runs = [Run("1f1b", FEATURES, options={"lowering": how}) for how in (as_it_is, "aten")]
    assert_trees_all_equal(*evaluated(runs, ONE))
    counts = set[int]()
    for microbatches in (2, 4):
        run = Run("1f1b", ("aux",), microbatches=microbatches)
        pipe, state, _ = made(run, ONE)
        loss_fn = loss_of(pipe.cut, run)

        def evaluate(state: Any, batch: Any, pipe: Any = pipe, loss_fn: Any = loss_fn) -> Any:
            return pipe.value(loss_fn)(state.params, batch, key=state.key)

        counts.add(len(fcg.graph_fn(evaluate, lowering=as_it_is).lower(state, rows(0, 0)).plan.heads))
    assert counts == {2}


@thorough
def test_four_stage_ranks() -> None:
    runs = [
        Run(schedule, FEATURES, cuts=tuple(range(1, 4 * (1 + len(cuts) // 2))), microbatches=8, layers=8)
        for schedule, cuts in CUTS.items()
    ]
    assert_as_on_one_rank(runs, 4, {"stage": 4})


def plain(run: Run) -> Any:
    """The same evaluation without any pipeline: micro-batches of the loss."""
    loss_fn = loss_of(lambda tree: tree, run)
    return fcg.microbatches(run.microbatches)(loss_fn)(params(), rows(0, 0), key=fcg.random.key(3))


def test_one_rank_is_what_micro_batches_are() -> None:
    for schedule in CUTS:
        run = Run(schedule, FEATURES)
        pipe, state, _ = made(run, ONE)
        found = pipe.value(loss_of(pipe.cut, run))(state.params, rows(0, 0), key=fcg.random.key(3))
        assert_trees_all_equal(found, plain(run), schedule)


def in_f64(run: Run, axes: Mapping[str, int]) -> Any:
    pipe, state, _ = made(run, axes)
    loss_fn = loss_of(pipe.cut, run)
    return fcg.graph_fn(
        lambda state, batch: pipe.value(loss_fn, dtype=torch.float64)(state.params, batch, key=state.key)
    )(state, rows(0, pipe.mesh.rank))


def test_results_are_summed_in_the_dtype_that_was_asked_for() -> None:
    run = Run("interleaved", ("aux",))
    alone = in_f64(run, ONE)
    assert alone[0].dtype is torch.float64
    for found in on_ranks(2, in_f64, run, TWO):
        assert_trees_all_equal(found, alone)


def programs(schedule: str, cuts: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Bytes at the peak without the inputs, and how often this rank sends and receives, with 8 and 16 micro-batches."""
    found = []
    for microbatches in (8, 16):
        mesh = sharding.mesh(TWO, device="cpu", timeout=20)
        pipe = sharding.pipeline(mesh, schedule=schedule, microbatches=microbatches)
        weights = {f"w{i}": torch.ones(16, 16) for i in range(4)}

        def loss_fn(params: Any, x: Tensor, pipe: Any = pipe) -> Tensor:
            for i in range(4):
                x = torch.tanh((pipe.cut(x) if i in cuts else x) @ params[f"w{i}"])
            return x.square().mean()

        x = torch.zeros(64 * microbatches, 16)
        zero = pipe.zero(loss_fn, weights, x)
        state = fcg.TrainState.create(params=weights, optimizer=optim.sgd(0.1), sharding=zero)
        evaluate = fcg.graph_fn(
            lambda state, x, pipe=pipe, loss_fn=loss_fn: pipe.value(loss_fn)(state.params, x), lowering="aten"
        )
        lowered = evaluate.lower(state, x)
        ops = [instr.op for instr in lowered.program.instrs]
        found.append((lowered.memory_analysis()["peak"] - x.nbytes, ops.count(SEND), ops.count(RECEIVE)))
    return found


@pytest.mark.parametrize(
    ("schedule", "cuts"), share([("1f1b", (2,)), ("gpipe", (2,)), ("zbv", (1, 2, 3))], 2)
)
def test_an_evaluation_frees_what_a_stage_has_computed(schedule: str, cuts: tuple[int, ...]) -> None:
    """Whatever the number of micro-batches, and it sends no more than activations."""
    for rank, ((few, sends, receives), (many, *_)) in enumerate(on_ranks(2, programs, schedule, cuts)):
        assert many - few <= 100
        assert few <= 4 * 16 * 16 * 4 + 6 * 64 * 16 * 4  # bytes of the weights, and of six activations
        crossings = {"zbv": (8, 8)}.get(schedule, (8, 0) if rank == 0 else (0, 8))
        assert (sends, receives) == crossings


def integers(axes: Mapping[str, int]) -> Any:
    """Parameters that cannot be trained, as those of a quantized model, and no loss but a table of counts."""
    mesh = sharding.mesh(axes, device="cpu", timeout=20)
    pipe = sharding.pipeline(mesh, schedule="1f1b", microbatches=2)

    def counts(params: Any, x: Tensor) -> Any:
        hidden = pipe.cut(x * params["scale"])
        return {"large": (hidden * params["step"] > 10).sum(), "means": hidden.mean(0)}

    x, values = torch.arange(24.0).view(8, 3), {"scale": torch.tensor(2), "step": torch.tensor(3)}
    return pipe.value(counts)(values, x)


def test_any_tree_may_be_returned_and_parameters_need_no_gradient() -> None:
    found = integers(ONE)
    assert found["large"] == 22
    assert_trees_all_equal(found["means"], torch.tensor([21.0, 23.0, 25.0]))
